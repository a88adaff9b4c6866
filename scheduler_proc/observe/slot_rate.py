"""How fast slots become free for the requests that wait."""

from collections import deque

NUM_RECENT_ENDS = 64


class SlotRate:
    """Measure how often a running request ends while others wait.

    An end at which nothing waits forgets the ones before: a queue that forms later is measured
    anew, and idle hours do not count.
    """

    def __init__(self) -> None:
        self._ended_at: deque[float] = deque(maxlen=NUM_RECENT_ENDS)

    def on_end(self, now: float, has_waiting: bool) -> None:
        """Count the end of a request that had a slot."""
        if has_waiting:
            self._ended_at.append(now)
        else:
            self._ended_at.clear()

    def interval_s(self, now: float) -> float | None:
        """Return the seconds between two ends; None until ends of two moments are known.

        Without further ends it grows with the time since the last one.
        """
        ended_at = self._ended_at
        if not ended_at or ended_at[-1] == ended_at[0]:
            return None
        first, num_ends = ended_at[0], len(ended_at)
        return max((ended_at[-1] - first) / (num_ends - 1), (now - first) / num_ends)
