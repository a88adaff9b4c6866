"""Restart decisions: which processes hang, and when a process that died may be restarted."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable

from quadriga.clock import RunningTime
from quadriga.runtime.control_channel import Command
from quadriga.supervisor.child_process import ChildProcess

DEATH_WINDOW_S = 300.0
MIN_DELAY_S, MAX_DELAY_S = 0.1, 5.0
PINGS_PER_TIMEOUT = 4


class RestartPolicy:
    """Exponential backoff per process, up to `max_restarts` within DEATH_WINDOW_S."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self._died_at: defaultdict[str, deque[float]] = defaultdict(deque)

    def delay_after_death(self, name: str, now: float) -> float | None:
        """Record a death and return the restart delay in seconds; None: do not restart.

        The first death is followed by a restart at once, each further one by twice the delay.

        Args:
            name: the process that died.
            now: seconds of a clock that never goes back.
        """
        died_at = self._died_at[name]
        died_at.append(now)
        while died_at[0] < now - DEATH_WINDOW_S:
            died_at.popleft()
        if len(died_at) > self.max_restarts:
            return None
        if len(died_at) == 1:
            return 0.0
        return min(MAX_DELAY_S, MIN_DELAY_S * 2.0 ** (len(died_at) - 2))


class Watchdog:
    """Pings the processes and finds those that do not answer within the timeout.

    Args:
        timeout_s: seconds of running time, so that a suspension of the watchdog and the processes
            together does not count; 0 switches the watchdog off.
        clock: a monotonic clock.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._interval_s = timeout_s / PINGS_PER_TIMEOUT
        self._time = RunningTime(self._interval_s, clock)
        self._next_at = 0.0

    def seconds_to_next(self) -> float | None:
        """Return the seconds until the next call of `check`; None: never."""
        return max(0.0, self._next_at - self._time.now()) if self._timeout_s else None

    def check(self, children: Iterable[ChildProcess]) -> list[ChildProcess]:
        """Ping the processes that have answered; return those whose answer is overdue."""
        now = self._time.now()
        if not self._timeout_s or now < self._next_at:
            return []
        self._next_at = now + self._interval_s
        overdue = []
        for child in children:
            if child.pinged_at is None:
                child.pinged_at = now
                child.send(Command.HEARTBEAT)
            elif now - child.pinged_at >= self._timeout_s:
                overdue.append(child)
        return overdue
