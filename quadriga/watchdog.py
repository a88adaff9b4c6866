"""Asks every process again and again whether it is there, and says who does not answer."""

from collections.abc import Iterable

from quadriga.child_process import ChildProcess
from quadriga.process import BEAT

QUESTIONS_PER_TIMEOUT = 4


class Watchdog:
    """timeout: seconds that an answer may take; 0 asks nobody."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._next = 0.0

    @property
    def next(self) -> float | None:
        """When `ask` wants to be called, in seconds of its clock; None: never."""
        return self._next if self._timeout else None

    def ask(self, children: Iterable[ChildProcess], now: float) -> list[ChildProcess]:
        """Ask those who have answered; who has not for too long. now: seconds of a clock that never
        goes back."""
        if not self._timeout or now < self._next:
            return []
        self._next = now + self._timeout / QUESTIONS_PER_TIMEOUT
        silent = []
        for child in children:
            if child.asked_at is None:
                child.asked_at = now
                child.order(BEAT)
            elif now - child.asked_at >= self._timeout:
                silent.append(child)
        return silent
