"""The live status line: what the server does, at most once a second, and only where it changed."""

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from quadriga.runtime.terminal import TransientLine
from quadriga.wire.messages.public import InfoValues

INTERVAL = 1.0
"""Seconds between two lines, at least."""


class Seen(NamedTuple):
    """What the line was made of."""

    running: int = 0
    waiting: int = 0
    held: int = 0
    generated: int = 0
    prompted: int = 0
    cached: int = 0


class StatusLine:
    """Rounds of the scheduler call `update`; while nothing happens nobody does.

    wake_at: when `update` wants to be called even if nothing happens; None: never.
    """

    def __init__(self, show: Callable[[str], None], info: Callable[[], InfoValues]) -> None:
        self.wake_at: float | None = None
        self._show = show
        self._info = info
        self._seen = Seen()
        self._shown_at = 0.0
        self._rate = 0.0
        self._hits = 0.0

    def update(self, now: float) -> None:
        """Show what has changed, if that is not too soon; else ask to be called when it is not."""
        due = self._shown_at + INTERVAL
        if now < due:
            self.wake_at = due
            return
        info: dict[str, Any] = self._info()
        seen = _seen(info)
        if seen == self._seen and self._rate == 0:
            self.wake_at = None
            return
        self._take(seen, now)
        self._show(self._text(info))
        self.wake_at = now + INTERVAL

    def _take(self, seen: Seen, now: float) -> None:
        self._rate = (seen.generated - self._seen.generated) / (now - self._shown_at)
        prompted = seen.prompted - self._seen.prompted
        if prompted > 0:
            self._hits = (seen.cached - self._seen.cached) / prompted
        self._seen, self._shown_at = seen, now

    def _text(self, info: dict[str, Any]) -> str:
        held = 100 * info.get("pages_held", 0) / max(1, info.get("pages_total", 0))
        return (
            f"{self._seen.running} running · {self._seen.waiting} waiting ·"
            f" {self._rate:.0f} tok/s · KV {held:.0f} % · hits {100 * self._hits:.0f} %"
        )


def _seen(info: dict[str, Any]) -> Seen:
    return Seen(
        info["running"],
        info["waiting"],
        info.get("pages_held", 0),
        info["generation_tokens_total"],
        info["prompt_tokens_total"],
        info["cached_tokens_total"],
    )


class NoStatusLine:
    """Where nobody looks."""

    wake_at: float | None = None

    def update(self, now: float) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class TerminalStatusLine(StatusLine):
    """The line at the terminal of standard error."""

    def __init__(self, info: Callable[[], InfoValues]) -> None:
        self._line = TransientLine(os.ttyname(sys.stderr.fileno()))
        super().__init__(self._line.show, info)

    def close(self) -> None:
        self._line.close()


def status_line(wanted: bool, info: Callable[[], InfoValues]) -> TerminalStatusLine | NoStatusLine:
    """The one for this process."""
    if not wanted or not sys.stderr.isatty():
        return NoStatusLine()
    try:
        return TerminalStatusLine(info)
    except OSError:  # the terminal is another user's, or has no name in this container
        return NoStatusLine()
