"""How often and how soon a process that died may be started again."""

from collections import defaultdict, deque

WINDOW = 300.0
"""Seconds over which deaths are counted."""
FIRST_DELAY, MAX_DELAY = 0.1, 5.0
"""Seconds. The first death is followed by a start at once, each further one by twice the delay."""


class Restarts:
    """Counts the deaths of each process. most: restarts of one process within WINDOW."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._deaths: defaultdict[str, deque[float]] = defaultdict(deque)

    def delay_after_death(self, name: str, now: float) -> float | None:
        """Seconds until the process may be started again; None: it dies too often. now: seconds of
        a clock that never goes back."""
        deaths = self._deaths[name]
        deaths.append(now)
        while deaths[0] < now - WINDOW:
            deaths.popleft()
        if len(deaths) > self.most:
            return None
        if len(deaths) == 1:
            return 0.0
        return min(MAX_DELAY, FIRST_DELAY * 2.0 ** (len(deaths) - 2))
