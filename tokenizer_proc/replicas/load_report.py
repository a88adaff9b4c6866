"""The load of a server whose number of replicas follows it, as the launcher gets it."""

import asyncio
from collections.abc import Callable

# Between two reports; a load that does not change is not reported again.
LOAD_INTERVAL_S = 1.0


class LoadReport:
    """Reports the number of open requests when it has changed, at most once in a while.

    Args:
        num_open: returns the number of open requests.
        report: called with the number.
    """

    def __init__(self, num_open: Callable[[], int], report: Callable[[int], None]) -> None:
        self._num_open = num_open
        self._report = report
        self._last = 0
        self._timer: asyncio.TimerHandle | None = None

    def on_change(self) -> None:
        """Take in that the number may have changed."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(LOAD_INTERVAL_S, self._look)

    def _look(self) -> None:
        self._timer = None
        num_open = self._num_open()
        if num_open != self._last:
            self._last = num_open
            self._report(num_open)
