"""A regular expression that ends a text, looked for in pieces.

The text ends at the first character that completes a match, so that the result does not depend on
how the text was cut into pieces. Only what a match has begun with is held back. Expressions come
from clients and may be hostile: each has a budget of time, which grows with the text, and a match
has at most MAX_MATCH_CHARS characters.
"""

import time
from functools import lru_cache
from typing import TYPE_CHECKING

from quadriga.sampling.stop_regex import MAX_MATCH_CHARS, compile_stop_regex

if TYPE_CHECKING:
    import regex

FIRST_BUDGET = 0.02
BUDGET_PER_CHARACTER = 0.00002
"""Seconds of this thread's own time, so that a busy machine makes no expression slow. An ordinary
search takes about 0.000005."""


class TookTooLong(Exception):
    """The message says it to the client."""


class RegexMatcher:
    """matched: how many of the last characters may still become a match. found_length: of the
    match that was found."""

    __slots__ = ("_budget", "_pattern", "_window", "found_length", "matched", "name")

    def __init__(self, pattern: str) -> None:
        self.name = pattern
        self.matched = 0
        self.found_length = 0
        self._pattern = _compiled(pattern)
        self._window = ""
        self._budget = FIRST_BUDGET

    def feed(self, piece: str) -> int | None:
        """The number of characters of `piece` up to the end of the first match, or None. Raises
        TookTooLong."""
        window = self._window
        for position, character in enumerate(piece, start=1):
            window = window[1 - MAX_MATCH_CHARS :] + character
            begin, is_whole = self._search(window)
            if is_whole:
                self.found_length = len(window) - begin
                return position
            self.matched = len(window) - begin
        self._window = window
        return None

    def _search(self, window: str) -> tuple[int, bool]:
        """Where a match begins, and whether it is a whole one."""
        self._budget += BUDGET_PER_CHARACTER
        began = time.thread_time()
        try:
            match = self._pattern.search(window, partial=True, timeout=self._budget)
        except (TimeoutError, MemoryError):  # of memory: where the expression calls itself
            match, self._budget = None, 0.0
        self._budget -= time.thread_time() - began
        if self._budget <= 0:
            raise TookTooLong(
                f"stop_regex is {self.name!r}: looking for it takes too long; simplify it, above"
                " all repeats within repeats"
            )
        if match is None or match.end() == match.start():
            return len(window), False
        return match.start(), not match.partial


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> "regex.Pattern[str]":
    return compile_stop_regex(pattern)
