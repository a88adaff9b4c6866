"""How much the server has to do: whoever comes when that is too much is refused at once, before
anything is done for him."""

import math
import time
from collections import deque
from collections.abc import Callable

from quadriga.errors import QueueFull

ENDINGS_SEEN = 64
"""So many endings tell how fast requests end."""
MIN_RETRY_S, MAX_RETRY_S = 1, 60
"""Seconds."""


class OverloadGuard:
    """Says whether another request may come in.

    max_queued: requests that may wait in the scheduler, choices counted; it knows the number
    exactly, here it is known as of the last message that came from there. max_per_client: open
    requests of one client; None: any number.
    """

    def __init__(
        self,
        max_queued: int,
        max_per_client: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_queued = max_queued
        self._max_per_client = max_per_client
        self._clock = clock
        self._waiting = 0
        self._let_in_since = 0
        self._endings: deque[float] = deque(maxlen=ENDINGS_SEEN)

    def check(self, open_requests: int, choices: int) -> None:
        """Raise QueueFull where a request may not come in now, from a client that has so many open
        ones."""
        waiting = self._waiting + self._let_in_since
        if waiting + choices > self._max_queued:
            after = self._retry_after(self._max_queued / 4)
            raise QueueFull(
                f"{waiting} requests are waiting and --max-queued-requests is {self._max_queued};"
                f" try again in {after} s",
                after,
            )
        if self._max_per_client is not None and open_requests >= self._max_per_client:
            after = self._retry_after(1)
            raise QueueFull(
                f"this client has {open_requests} open requests and --max-requests-per-client is"
                f" {self._max_per_client}; wait until one has ended, or try again in {after} s",
                after,
            )

    def _retry_after(self, endings: float) -> int:
        """Seconds until so many requests have probably ended."""
        if len(self._endings) < 2:
            return MIN_RETRY_S
        seconds = (self._clock() - self._endings[0]) / len(self._endings) * endings
        return min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(seconds)))

    def let_in(self, choices: int) -> None:
        """So many are on their way to the scheduler."""
        self._let_in_since += choices

    def ended(self, choices: int) -> None:
        """So many have ended."""
        self._endings.extend([self._clock()] * choices)

    def report(self, waiting: int) -> None:
        """So many requests wait in the scheduler."""
        self._waiting, self._let_in_since = waiting, 0
