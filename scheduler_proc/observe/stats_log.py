"""The throughput line of the log, every --log-stats-interval seconds while there is work."""

import logging
from collections.abc import Callable
from typing import Any

from quadriga.runtime.logs import log_fields
from quadriga.wire.messages.to_client import InfoValues
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
            self._log(values, info, now - self._began_at)
        has_work = bool(values.running or values.waiting)
        self.wake_at = now + self._interval_s if has_work else None
        self._began_at, self._values = now, values

    def _log(self, values: StatusValues, info: dict[str, Any], seconds: float) -> None:
        prompted = values.prompted - self._values.prompted
        generated = values.generated - self._values.generated
        kv_share = values.held / max(1, info.get("pages_total", 0))
        hit_share = (values.cached - self._values.cached) / max(1, prompted)
        text = (
            f"{values.running} running · {values.waiting} waiting"
            f" · prompt {prompted / seconds:.0f} tok/s"
            f" · generated {generated / seconds:.0f} tok/s"
            f" · KV {100 * kv_share:.0f} %"
            f" · hits {100 * hit_share:.0f} %"
        )
        log_fields(
            logging.INFO,
            text,
            event="throughput",
            running=values.running,
            waiting=values.waiting,
            prompt_tokens_per_s=round(prompted / seconds, 3),
            generated_tokens_per_s=round(generated / seconds, 3),
            kv_share=round(kv_share, 4),
            hit_share=round(hit_share, 4),
        )

    def close(self) -> None:
        """Do nothing: there is nothing to erase."""
