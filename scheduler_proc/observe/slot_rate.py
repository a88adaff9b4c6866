"""How fast slots become free for the requests that wait."""

from collections import deque

NUM_RECENT_ENDS = 64


class SlotRate:
    """Measure how often a running request ends while others wait.

    An end at which nothing waits forgets the ones before: a queue that forms later is measured
    from its beginning, and idle hours do not count.
    """

    def __init__(self) -> None:
        self._ended_at: deque[float] = deque(maxlen=NUM_RECENT_ENDS)

    def on_end(self, now: float, has_waiting: bool) -> None:
        """Count the end of a request that had a slot."""
        if has_waiting:
            self._ended_at.append(now)
        else:
            self._ended_at.clear()

    def interval_s(self, now: float, waiting_since: float) -> float | None:
        """Return the seconds between two ends; None without a measured one.

        Without further ends it grows with the time.

        Args:
            now: Unix time in seconds.
            waiting_since: time at which the oldest waiting request came. The ends after it count;
                if it came later than the first end, the time counts from that one.
        """
        if not self._ended_at:
            return None
        first, last, num_ends = self._ended_at[0], self._ended_at[-1], len(self._ended_at)
        if waiting_since < first:
            first = waiting_since
        else:
            num_ends -= 1
        if not num_ends:
            return None
        return max((last - first) / num_ends, (now - first) / (num_ends + 1))
