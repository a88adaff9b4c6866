"""Decode rows by the weights of tenants, where more requests run than a step has rows.

Stride scheduling (Waldspurger and Weihl, "Stride Scheduling: Deterministic Proportional-Share
Resource Management", 1995): each tenant has a pass, which grows by 1 / weight with each of its
rows, and the tenant with the smallest pass has the next row. A tenant whose requests all have rows
saves nothing up: its pass is lifted to that of the row that was given last.
"""

import heapq
from collections.abc import Iterator

from quadriga.tenants.tenant import parent_name
from scheduler_proc.state.batch import move_to_end
from scheduler_proc.state.request import Request


class WeightedTurns:
    """The passes of the tenants that had rows in the last step."""

    def __init__(self) -> None:
        self._passes: dict[str, float] = {}
        self._last_pass = 0.0

    def next_rows(self, requests: dict[int, Request], count: int) -> list[Request]:
        """Return the requests that have the next rows, and move them to the end.

        Those of a tenant take equal turns.

        Args:
            requests: running requests by number, in the order of their turns.
            count: number of rows.
        """
        if len(requests) <= count:
            self._passes.clear()
            self._last_pass = 0.0
            return list(requests.values())
        tenants = self._turns_of_tenants(requests)
        group: list[Request] = []
        while len(group) < count:
            self._last_pass, name, turns = tenants[0]
            request = next(turns, None)
            if request is None:
                heapq.heappop(tenants)
                continue
            group.append(request)
            self._passes[name] = self._last_pass + 1 / request.weight
            heapq.heapreplace(tenants, (self._passes[name], name, turns))
        move_to_end(requests, group)
        return group

    def _turns_of_tenants(
        self, requests: dict[int, Request]
    ) -> list[tuple[float, str, Iterator[Request]]]:
        """Return a heap of the pass, name and requests of each tenant."""
        groups: dict[str, list[Request]] = {}
        for request in requests.values():
            groups.setdefault(parent_name(request.tenant), []).append(request)
        self._passes = {name: max(self._passes.get(name, 0.0), self._last_pass) for name in groups}
        tenants = [(self._passes[name], name, iter(group)) for name, group in groups.items()]
        heapq.heapify(tenants)
        return tenants
