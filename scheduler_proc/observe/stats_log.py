"""The throughput line of the log, every --log-stats-interval seconds while there is work."""

import logging
from collections.abc import Callable
from typing import Any

from quadriga.wire.messages.public import InfoValues
from scheduler_proc.observe.status_line import StatusValues, status_values


class StatsLog:
    """Log throughput and load. The scheduler calls `update` after each of its steps.

    A line comes at the end of each interval that began with work. An idle server logs nothing.

    Args:
        interval_s: seconds that a line covers.
        info: returns gauges and counters, as docs/protocol.md lists them.

    Attributes:
        wake_at: when `update` must be called even if nothing happens; None for never.
    """

    def __init__(self, interval_s: float, info: Callable[[], InfoValues]) -> None:
        self.wake_at: float | None = None
        self._interval_s = interval_s
        self._info = info
        self._began_at = 0.0
        # At the begin of the interval, or, before it, when the server was last seen idle.
        self._values = StatusValues()

    def update(self, now: float) -> None:
        """Begin an interval if there is work and none is open, or log a line at its end."""
        if self.wake_at is not None and now < self.wake_at:
            return
        info: dict[str, Any] = self._info()
        values = status_values(info)
        if self.wake_at is not None:
            logging.info("%s", self._line(values, info, now - self._began_at))
        has_work = bool(values.running or values.waiting)
        self.wake_at = now + self._interval_s if has_work else None
        self._began_at, self._values = now, values

    def _line(self, values: StatusValues, info: dict[str, Any], seconds: float) -> str:
        prompted = values.prompted - self._values.prompted
        cached = values.cached - self._values.cached
        return (
            f"{values.running} running · {values.waiting} waiting"
            f" · prompt {prompted / seconds:.0f} tok/s"
            f" · generated {(values.generated - self._values.generated) / seconds:.0f} tok/s"
            f" · KV {100 * values.held / max(1, info.get('pages_total', 0)):.0f} %"
            f" · hits {100 * cached / max(1, prompted):.0f} %"
        )

    def close(self) -> None:
        """Do nothing: there is nothing to erase."""
