"""The schedule of a client's pings while it searches for its server."""

import asyncio
from collections.abc import Callable

# Pause between the first two pings of a search; each further pause is twice as long.
MIN_PAUSE_S = 0.1
MAX_PAUSE_S = 1.0
# Event loops may call a timer about a millisecond too early.
CLOCK_RESOLUTION_S = 0.002


class Search:
    """Calls `ping` repeatedly until `stop` is called or the time is over.

    Owns the only timer of a connection, so that a search cannot be started twice or forgotten.

    Args:
        ping: called at once when a search starts, and then after growing pauses.
        not_found: called once when the time of a search is over; the search has stopped by then.
    """

    def __init__(self, ping: Callable[[], None], not_found: Callable[[], None]) -> None:
        self._ping = ping
        self._not_found = not_found
        self._timer: asyncio.Handle | None = None
        self._pause = MIN_PAUSE_S
        self._pinged_at = self._next_at = self._deadline_at = 0.0

    @property
    def is_running(self) -> bool:
        """Whether a search is under way."""
        return self._timer is not None

    def start(self, timeout: float) -> None:
        """Search for at most `timeout` seconds from now, in place of a search under way."""
        self._pause = MIN_PAUSE_S
        self._deadline_at = asyncio.get_running_loop().time() + timeout
        self._ping_and_wait()

    def stop(self) -> None:
        """Stop pinging, if a search is running."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def hurry(self) -> None:
        """Ping soon, since a connection was established, but not more often than at the start."""
        self._pause = MIN_PAUSE_S
        soon = max(asyncio.get_running_loop().time(), self._pinged_at + MIN_PAUSE_S)
        if self.is_running and soon < self._next_at:
            self._wait_until(soon)

    def _wait_until(self, when: float) -> None:
        self.stop()
        self._next_at = when
        self._timer = asyncio.get_running_loop().call_at(when, self._next)

    def _next(self) -> None:
        now = asyncio.get_running_loop().time()
        delay_s = now - self._next_at
        if delay_s > MAX_PAUSE_S:  # a suspension of this process does not use up the timeout
            self._deadline_at += delay_s
        if self._deadline_at - now < CLOCK_RESOLUTION_S:
            self.stop()
            self._not_found()
        else:
            self._ping_and_wait()

    def _ping_and_wait(self) -> None:
        self._pinged_at = asyncio.get_running_loop().time()
        self._wait_until(min(self._pinged_at + self._pause, self._deadline_at))
        self._pause = min(2 * self._pause, MAX_PAUSE_S)
        self._ping()
