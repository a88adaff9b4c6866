"""The clocks of a server: one that never jumps, and two that stand still while a process does.

`now` gives Unix seconds as of the server's start: what the wall clock said then, plus the monotonic
seconds since. The launcher takes the difference of the two once and hands it to every process, so
that all of them read the same clock, whatever becomes of the wall clock meanwhile.
"""

import time
from collections.abc import Callable

SAMPLES = 5
"""The offset is taken so often, and the sample that took least time is used."""


def _measured_offset() -> float:
    """Return the wall clock's lead over the monotonic one, in seconds."""
    samples = []
    for _ in range(SAMPLES):
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        samples.append((after - before, wall - (before + after) / 2))
    return min(samples)[1]


_offset = _measured_offset()


def now() -> float:
    """Return the time in Unix seconds of a clock that never jumps."""
    return _offset + time.monotonic()


def offset() -> float:
    """Return what `now` adds to the monotonic clock, for another process of this server."""
    return _offset


def use_offset(seconds: float) -> None:
    """Read the same clock as the process whose `offset` this is."""
    global _offset
    _offset = seconds


class RunningTime:
    """Counts the seconds in which this process runs: a clock for timeouts of other processes.

    A process that was suspended, by a signal or with its machine, finds that much time has passed
    in which it could see nothing. From one reading to the next this clock goes on by at most
    `max_tick_s`: read it at least that often.
    """

    def __init__(self, max_tick_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_tick_s = max_tick_s
        self._clock = clock
        self._read_at = clock()
        self._seconds = 0.0

    def now(self) -> float:
        """Return the seconds that were counted up to now."""
        read_at = self._clock()
        self._seconds += min(read_at - self._read_at, self._max_tick_s)
        self._read_at = read_at
        return self._seconds


class Countdown:
    """A timeout in running time: a suspension takes at most `max_tick_s` of it."""

    def __init__(
        self,
        seconds: float,
        max_tick_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._max_tick_s = max_tick_s
        self._time = RunningTime(max_tick_s, clock)

    def left(self) -> float:
        """Return the seconds that are left, 0.0 at the end."""
        return max(0.0, self._seconds - self._time.now())

    def left_to_wait(self) -> float:
        """Return how long to wait before the next look at it, in seconds; 0.0 at the end."""
        return min(self.left(), self._max_tick_s / 2)
