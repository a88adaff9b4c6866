"""Counters of the scheduler, for the server info and the bench.

`GuessStats` counts speculative tokens, `TenantStats` what each tenant has used, `SchedulerStats`
everything else.
"""

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise

from quadriga.server.histogram import SECONDS, Histogram
from quadriga.server.tenants import parent_name
from quadriga.wire import client, packing, to_scheduler, worker
from scheduler_proc.state.batch import ForwardMode, ScheduleBatch, StepUpdate
from scheduler_proc.state.request import FinishReason, Request


class GuessStats:
    """Rows with guesses, guesses, and right guesses, since start."""

    def __init__(self, max_guesses: int) -> None:
        """Start at zero. max_guesses: largest number of guesses in a row of a step."""
        self._num_rows = 0
        self._num_guesses = 0
        self._num_right = [0] * max_guesses  # by place in the row

    def on_step(self, result: worker.StepResult) -> None:
        """Count the guesses of a step."""
        for row in result.guessed:
            self._num_rows += 1
            self._num_guesses += row.num_guesses
            for place in range(packing.num_ids(row.token_ids)):
                self._num_right[place] += 1

    def info(self) -> client.InfoValues:
        """Return all counters, as docs/protocol.md lists them."""
        return {
            "spec_decode_num_drafts_total": self._num_rows,
            "spec_decode_num_draft_tokens_total": self._num_guesses,
            "spec_decode_num_accepted_tokens_total": sum(self._num_right),
            "spec_decode_num_accepted_tokens_per_pos": {
                str(place): count for place, count in enumerate(self._num_right)
            },
        }


# Counters of each tenant, bounded in number, for the server info.

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


RECENT_STEPS = 4096
ABORTED_BY = (to_scheduler.CLIENT, to_scheduler.CLIENT_LOST, to_scheduler.SERVER_STOPPING)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STAGES = ("tokenize", "queue", "prefill", "decode")


@dataclass(slots=True)
class SchedulerStats:
    """Totals since start.

    Attributes:
        late_plans: number of steps with decode rows that were planned after the step before ended.
        ended: number of ended requests by finish reason.
        aborts: number of aborts by their origin.
        errors: number of errors by code.
        step_tokens: tokens in a step.
        stages: seconds that a request spent in each stage that it came to.
        tenants: what each tenant has used.
        guesses: guessed tokens; None where none are guessed.
    """

    steps: int = 0
    prefill_steps: int = 0
    late_plans: int = 0
    busy_seconds: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    ended: dict[str, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0}
    )
    aborts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ABORTED_BY, 0))
    errors: Counter[str] = field(default_factory=Counter)
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS))
    stages: dict[str, Histogram] = field(
        default_factory=lambda: {stage: Histogram(SECONDS) for stage in STAGES}
    )
    tenants: TenantStats = field(default_factory=TenantStats)
    guesses: GuessStats | None = None
    # Worker idle time between two steps, the second already planned.
    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _last_ended: float = 0.0

    def on_step(self, batch: ScheduleBatch, result: worker.StepResult, update: StepUpdate) -> None:
        """Count a step of the worker, and its tokens."""
        self.steps += 1
        self.prefill_steps += batch.mode is not ForwardMode.DECODE
        self.busy_seconds += result.ended - result.began
        self.step_tokens.observe(sum(batch.num_tokens))
        if batch.planned_at < self._last_ended:
            self._gaps.append(result.began - self._last_ended)
        elif batch.num_decodes:
            self.late_plans += 1
        self._last_ended = result.ended
        self.generation_tokens += len(update.seqs)
        if self.guesses is not None:
            self.guesses.on_step(result)
        vectors = [request for request in update.finished if request.vector is not None]
        for request in (*update.started, *vectors):
            self.prompt_tokens += request.num_prompt
            self.cached_tokens += request.cached_tokens

    def on_finish(self, request: Request, now: float) -> None:
        """Count the end of a request, and the seconds that it spent in each stage."""
        assert request.finish_reason is not None
        self.ended[request.finish_reason.value] += 1
        if request.finish_reason is FinishReason.ERROR and request.error is not None:
            self.errors[request.error.code] += 1
        self.tenants.on_finish(request)
        for stage, seconds in stage_seconds(request, now):
            self.stages[stage].observe(seconds)

    def info(self) -> client.InfoValues:
        """Return all counters, as docs/protocol.md lists them."""
        gaps = sorted(self._gaps)
        values: client.InfoValues = {
            "steps": self.steps,
            "prefill_steps": self.prefill_steps,
            "late_plans": self.late_plans,
            "busy_seconds": self.busy_seconds,
            "step_gap_ms_p50": 1000 * _percentile(gaps, 0.5),
            "step_gap_ms_p99": 1000 * _percentile(gaps, 0.99),
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generation_tokens,
            "cached_tokens_total": self.cached_tokens,
            "ended": dict(self.ended),
            "aborts": dict(self.aborts),
            "errors": dict(self.errors),
            "step_tokens": self.step_tokens.as_map(),
            "stage_seconds": {stage: times.as_map() for stage, times in self.stages.items()},
        }
        if self.guesses is not None:
            values |= self.guesses.info()
        tenants = self.tenants.info()
        return values | {"tenants": tenants} if tenants else values


def stage_seconds(request: Request, now: float) -> list[tuple[str, float]]:
    """Return the stages that a request came to before it ended at `now`, and their seconds."""
    passed = (
        request.received_at,
        request.tokenized_at,
        request.admitted_at,
        request.first_token_at,
    )
    times = [time for time in passed if time] + [now]
    return [(stage, e - b) for stage, (b, e) in zip(STAGES, pairwise(times), strict=False)]


def _percentile(ordered: list[float], share: float) -> float:
    """Return the value below which this share (0 to 1) lies; 0.0 without values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
