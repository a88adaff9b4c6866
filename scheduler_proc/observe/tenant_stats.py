"""Counters of each tenant, bounded in number, for the server info."""

import heapq

from quadriga.tenants.tenant import parent_name
from scheduler_proc.state.request import Request

MAX_SHOWN = 100
MAX_KEPT = 1024
OTHER = "other"

# What is counted, in the order of the numbers.
FIELDS = ("requests", "prompt_tokens", "cached_tokens", "generation_tokens", "queue_seconds")
Counts = list[float]


def usage_of(request: Request) -> tuple[int, int, int]:
    """Return prompt, cached and generated tokens; the prompt counts for the first choice only."""
    if request.index:
        return 0, 0, request.num_generated
    return request.num_prompt, request.cached_tokens, request.num_generated


class TenantStats:
    """Count requests and tokens by tenant; users count with their tenants.

    The MAX_SHOWN tenants with the most tokens are shown by name, the others together. At most
    MAX_KEPT are kept apart; beyond them the smaller half is added to the others for good.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Counts] = {}
        self._other: Counts = [0.0] * len(FIELDS)

    def on_finish(self, request: Request) -> None:
        """Count a request that has ended."""
        if not request.tenant:
            return
        name = parent_name(request.tenant)
        counts = self._counts.get(name)
        if counts is None:
            if len(self._counts) >= MAX_KEPT:
                self._merge_smaller_half()
            counts = self._counts[name] = [0.0] * len(FIELDS)
        prompt, cached, generated = usage_of(request)
        queued = max(0.0, request.admitted_at - request.tokenized_at) if request.admitted_at else 0
        _add(counts, [request.index == 0, prompt, cached, generated, queued])

    def info(self) -> dict[str, Counts]:
        """Return the numbers of FIELDS by the names of tenants."""
        shown = set(heapq.nlargest(MAX_SHOWN, self._counts, self._num_tokens))
        values = {name: list(counts) for name, counts in self._counts.items() if name in shown}
        other = list(self._other)
        for name, counts in self._counts.items():
            if name not in shown:
                _add(other, counts)
        return values | {OTHER: other} if any(other) else values

    def _num_tokens(self, name: str) -> float:
        _, prompt, _, generated, _ = self._counts[name]
        return prompt + generated

    def _merge_smaller_half(self) -> None:
        for name in sorted(self._counts, key=self._num_tokens)[: MAX_KEPT // 2]:
            _add(self._other, self._counts.pop(name))


def _add(counts: Counts, more: Counts) -> None:
    for index, count in enumerate(more):
        counts[index] += count
