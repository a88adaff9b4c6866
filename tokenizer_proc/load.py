"""How much the server has to do: whoever comes when that is too much is refused at once, before
anything is done for him."""

import math
import time
from collections import deque
from collections.abc import Callable

from quadriga.errors import QueueFull

MOST_BYTES_IN_WORK = 256 * 1024 * 1024
"""Of messages whose prompts are being encoded or whose grammars are being checked."""
ENDINGS_SEEN = 64
"""So many endings tell how fast requests end."""
SHORTEST_RETRY, LONGEST_RETRY = 1, 60
"""Seconds."""


class Load:
    """Counts what this front door let in and has not seen ending.

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
        self._open: dict[bytes, dict[str, int]] = {}
        self._waiting = 0
        self._let_in_since = 0
        self._bytes_in_work = 0
        self._endings: deque[float] = deque(maxlen=ENDINGS_SEEN)

    @property
    def open_requests(self) -> int:
        return sum(map(len, self._open.values()))

    def check(self, client: bytes, choices: int, size: int) -> None:
        """Raise QueueFull where a request of `size` bytes may not come in now."""
        waiting = self._waiting + self._let_in_since
        if waiting + choices > self._max_queued:
            after = self._retry_after(self._max_queued / 4)
            raise QueueFull(
                f"{waiting} requests are waiting and --max-queued-requests is {self._max_queued};"
                f" try again in {after} s",
                after,
            )
        mine = len(self._open.get(client, ()))
        if self._max_per_client is not None and mine >= self._max_per_client:
            after = self._retry_after(1)
            raise QueueFull(
                f"this client has {mine} open requests and --max-requests-per-client is"
                f" {self._max_per_client}; wait until one has ended, or try again in {after} s",
                after,
            )
        if self._bytes_in_work and self._bytes_in_work + size > MOST_BYTES_IN_WORK:
            raise QueueFull(
                f"prompts of {self._bytes_in_work} bytes are being encoded, and at most"
                f" {MOST_BYTES_IN_WORK} may be; try again in {SHORTEST_RETRY} s",
                SHORTEST_RETRY,
            )

    def _retry_after(self, endings: float) -> int:
        """Seconds until so many requests have probably ended."""
        if len(self._endings) < 2:
            return SHORTEST_RETRY
        seconds = (self._clock() - self._endings[0]) / len(self._endings) * endings
        return min(LONGEST_RETRY, max(SHORTEST_RETRY, math.ceil(seconds)))

    def let_in(self, client: bytes, request_id: str, choices: int, size: int) -> None:
        """A request of `size` bytes is worked on."""
        self._open.setdefault(client, {})[request_id] = choices
        self._let_in_since += choices
        self._bytes_in_work += size

    def worked_off(self, size: int) -> None:
        """What was let in went on to the scheduler, or was refused."""
        self._bytes_in_work -= size

    def ended(self, client: bytes, request_ids: list[str]) -> None:
        """Choices of these requests have ended."""
        mine = self._open.get(client)
        for request_id in request_ids:
            self._endings.append(self._clock())
            if mine is not None and request_id in mine:
                mine[request_id] -= 1
                if mine[request_id] <= 0:
                    self._forget_one(client, mine, request_id)

    def refused(self, client: bytes, request_id: str) -> None:
        """It was let in, and then refused at the front door."""
        mine = self._open.get(client)
        if mine is not None and request_id in mine:
            self._forget_one(client, mine, request_id)

    def _forget_one(self, client: bytes, mine: dict[str, int], request_id: str) -> None:
        del mine[request_id]
        if not mine:
            del self._open[client]

    def forget(self, client: bytes) -> None:
        """It is gone."""
        self._open.pop(client, None)

    def report(self, waiting: int) -> None:
        """So many requests wait in the scheduler."""
        self._waiting, self._let_in_since = waiting, 0
