"""The live status line: what the server does, at most once a second, and only when it changed."""

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from quadriga.runtime.terminal import TransientLine
from quadriga.wire.messages.to_client import InfoValues

INTERVAL_S = 1.0  # shortest time between two lines


class StatusValues(NamedTuple):
    """The numbers from which a line is made: requests, pages and tokens."""

    running: int = 0
    waiting: int = 0
    held: int = 0
    generated: int = 0
    prompted: int = 0
    cached: int = 0


class StatusLine:
    """Show what the server does. The scheduler calls `update` after each of its steps.

    Attributes:
        wake_at: when `update` must be called even if nothing happens; None for never.
    """

    def __init__(self, show: Callable[[str], None], info: Callable[[], InfoValues]) -> None:
        self.wake_at: float | None = None
        self._show = show
        self._info = info
        self._values = StatusValues()
        self._shown_at = 0.0
        self._tokens_per_s = 0.0
        self._hit_share = 0.0

    def update(self, now: float) -> None:
        """Show what has changed, at the earliest INTERVAL_S after the last line."""
        next_at = self._shown_at + INTERVAL_S
        if now < next_at:
            self.wake_at = next_at
            return
        info: dict[str, Any] = self._info()
        values = status_values(info)
        if values == self._values and self._tokens_per_s == 0:
            self.wake_at = None
            return
        self._observe(values, now)
        self._show(self._text(info))
        self.wake_at = now + INTERVAL_S

    def _observe(self, values: StatusValues, now: float) -> None:
        seconds = now - self._shown_at
        self._tokens_per_s = (values.generated - self._values.generated) / seconds
        prompted = values.prompted - self._values.prompted
        if prompted > 0:
            self._hit_share = (values.cached - self._values.cached) / prompted
        self._values, self._shown_at = values, now

    def _text(self, info: dict[str, Any]) -> str:
        values, hits = self._values, 100 * self._hit_share
        held = 100 * values.held / max(1, info.get("pages_total", 0))
        return (
            f"{values.running} running · {values.waiting} waiting ·"
            f" {self._tokens_per_s:.0f} tok/s · KV {held:.0f} % · hits {hits:.0f} %"
        )


def status_values(info: dict[str, Any]) -> StatusValues:
    """Return the numbers of a line from gauges and counters of the scheduler."""
    return StatusValues(
        info["running"],
        info["waiting"],
        info.get("pages_held", 0),
        info["generation_tokens_total"],
        info["prompt_tokens_total"],
        info["cached_tokens_total"],
    )


class NoStatusLine:
    """A status line that is not shown."""

    wake_at: float | None = None

    def update(self, now: float) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class TerminalStatusLine(StatusLine):
    """A status line on the terminal of standard error."""

    def __init__(self, info: Callable[[], InfoValues]) -> None:
        self._line = TransientLine(os.ttyname(sys.stderr.fileno()))
        super().__init__(self._line.show, info)

    def close(self) -> None:
        """Erase the line."""
        self._line.close()


def status_line(wanted: bool, info: Callable[[], InfoValues]) -> TerminalStatusLine | NoStatusLine:
    """Return the status line of this process. wanted: unless stderr is not a terminal."""
    if not wanted or not sys.stderr.isatty():
        return NoStatusLine()
    try:
        return TerminalStatusLine(info)
    except OSError:  # the terminal is another user's, or has no name in this container
        return NoStatusLine()
