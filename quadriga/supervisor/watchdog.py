"""Asks every process again and again whether it is there, and says who does not answer."""

import time
from collections.abc import Callable, Iterable

from quadriga.clock import RunningTime
from quadriga.runtime.child import BEAT
from quadriga.supervisor.child_process import ChildProcess

QUESTIONS_PER_TIMEOUT = 4


class Watchdog:
    """timeout: seconds that an answer may take, in which the watchdog itself runs: what was
    suspended with it, or a little longer, is not to blame. 0 asks nobody."""

    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout = timeout
        self._interval = timeout / QUESTIONS_PER_TIMEOUT
        self._time = RunningTime(self._interval, clock)
        self._next_at = 0.0

    def seconds_to_next(self) -> float | None:
        """Return in how many seconds `ask` wants to be called; None: never."""
        return max(0.0, self._next_at - self._time.now()) if self._timeout else None

    def ask(self, children: Iterable[ChildProcess]) -> list[ChildProcess]:
        """Ask those who have answered; return who has not for too long."""
        now = self._time.now()
        if not self._timeout or now < self._next_at:
            return []
        self._next_at = now + self._interval
        silent = []
        for child in children:
            if child.asked_at is None:
                child.asked_at = now
                child.order(BEAT)
            elif now - child.asked_at >= self._timeout:
                silent.append(child)
        return silent
