"""Clocks: one that never jumps, and two that stop while the process is suspended.

`now` returns the wall clock's time at the start of the server plus the monotonic seconds since. The
launcher measures the difference of the two clocks once and passes it to every process, so that all
read the same clock, even if the wall clock is set meanwhile.
"""

import time
from collections.abc import Callable

# The offset is measured so often; the sample that took the least time counts.
NUM_SAMPLES = 5


def _measured_offset() -> float:
    """Return the wall clock minus the monotonic clock, in seconds."""
    samples = []
    for _ in range(NUM_SAMPLES):
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        samples.append((after - before, wall - (before + after) / 2))
    return min(samples)[1]


_offset = _measured_offset()


def now() -> float:
    """Return the time of a clock that never jumps, in Unix seconds."""
    return _offset + time.monotonic()


def offset() -> float:
    """Return the seconds that `now` adds to the monotonic clock, for other processes."""
    return _offset


def use_offset(seconds: float) -> None:
    """Use the `offset` of another process, so that both read the same clock."""
    global _offset
    _offset = seconds


class RunningTime:
    """Counts the seconds in which this process runs; a clock for timeouts of other processes.

    From one reading to the next it advances by at most `max_tick_s`, so that a suspension of this
    process, by a signal or with its machine, does not count. Read it at least that often.
    """

    def __init__(self, max_tick_s: float, clock: Callable[[], float]) -> None:
        self._max_tick_s = max_tick_s
        self._clock = clock
        self._read_at = clock()
        self._seconds = 0.0

    def now(self) -> float:
        """Return the seconds counted so far."""
        read_at = self._clock()
        self._seconds += min(read_at - self._read_at, self._max_tick_s)
        self._read_at = read_at
        return self._seconds


class Countdown:
    """A timeout in running time: a suspension uses up at most `max_tick_s` of it."""

    def __init__(
        self, seconds: float, max_tick_s: float = 0.5, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._max_tick_s = max_tick_s
        self._time = RunningTime(max_tick_s, clock)

    def left(self) -> float:
        """Return the remaining seconds, 0.0 at the end."""
        return max(0.0, self._seconds - self._time.now())

    def left_to_wait(self) -> float:
        """Return the seconds to wait until the next reading, 0.0 at the end."""
        return min(self.left(), self._max_tick_s / 2)
