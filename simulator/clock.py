"""The simulated clock, on which everything of a simulation happens."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

# Simulated seconds at which a run begins; a time of 0.0 means never.
START = 1000.0


class Clock:
    """Simulated Unix seconds, and a queue of calls by time."""

    def __init__(self) -> None:
        self.now = START
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = count()
        self._after: dict[Callable[[], None], None] = {}

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def at(self, when: float, act: Callable[[Any], None], subject: Any) -> None:
        """Call `act(subject)` at a time."""
        heappush(self._heap, (when, next(self._order), act, subject))

    def after_this(self, act: Callable[[], None]) -> None:
        """Call `act` once, after all other calls of this moment."""
        self._after[act] = None

    def advance(self) -> bool:
        """Advance to the next moment with a call; return False if there is none."""
        heap = self._heap
        if not heap:
            return False
        now = self.now = heap[0][0]
        while heap and heap[0][0] == now:
            _, _, act, subject = heappop(heap)
            act(subject)
        after, self._after = self._after, {}
        for last in after:
            last()
        return True
