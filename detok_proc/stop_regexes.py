"""Search a text that comes in pieces for regular expressions that end it (`stop_regex`).

The text ends at the first character that completes a match, so that the result does not depend on
how the text was cut into pieces. Only the beginning of a possible match is held back. Expressions
come from clients and may be hostile: a match has at most MAX_MATCH_CHARS characters, and the
searches of a request have a budget of CPU time, which grows with its text. Wall time is not
limited, so that a busy machine makes no expression slow.
"""

import time
from functools import lru_cache
from typing import TYPE_CHECKING

from quadriga.sampling.stop_regex import MAX_MATCH_CHARS, compile_stop_regex

if TYPE_CHECKING:
    import regex

# An ordinary search takes about 5 us. The choices of a request, up to 128, share REQUEST_BUDGET_S
# for what is slower; the other two keep ordinary choices going when a sibling has used that up.
REQUEST_BUDGET_S = 0.02
CHOICE_BUDGET_S = 0.001
BUDGET_PER_SEARCH_S = 20e-6
# What a choice can save from fast searches for a slow one, in which all other texts wait.
MAX_SAVED_BUDGET_S = 0.02


_compile = lru_cache(maxsize=256)(compile_stop_regex)


class SearchTooSlow(Exception):
    """The searches of a choice take too long; the message is meant for the client."""


class RequestBudget:
    """The CPU time that all choices of a request may take beyond the budget of each."""

    __slots__ = ("__weakref__", "left_s")

    def __init__(self) -> None:
        self.left_s = REQUEST_BUDGET_S


class ChoiceBudget:
    """The CPU time that the searches of one choice may take, for all expressions together."""

    __slots__ = ("_left_s", "_request")

    def __init__(self, request: RequestBudget) -> None:
        self._request = request
        self._left_s = CHOICE_BUDGET_S

    def search(self, pattern: "regex.Pattern[str]", text: str) -> "regex.Match[str] | None":
        """Return the first match, which may be partial. Raise SearchTooSlow."""
        self._left_s = min(self._left_s + BUDGET_PER_SEARCH_S, MAX_SAVED_BUDGET_S)
        began_at = time.thread_time()
        try:
            match = pattern.search(text, partial=True, timeout=self._left_s + self._request.left_s)
        except (TimeoutError, MemoryError):  # an expression that calls itself takes memory
            match, self._left_s = None, -REQUEST_BUDGET_S
        self._left_s -= time.thread_time() - began_at
        if self._left_s < 0:
            self._request.left_s += self._left_s
            self._left_s = 0.0
            if self._request.left_s <= 0:
                self._request.left_s = 0.0
                raise SearchTooSlow(
                    f"stop_regex is {pattern.pattern!r}: looking for it takes too long; simplify"
                    " it, above all repeats within repeats"
                )
        return match


class RegexMatcher:
    """Look for the first match of one expression.

    Attributes:
        name: the expression.
        num_open: number of last characters that may still become a match.
        match_length: length of the match that was found.
    """

    __slots__ = ("_budget", "_pattern", "_window", "match_length", "name", "num_open")

    def __init__(self, pattern: str, budget: ChoiceBudget) -> None:
        self.name = pattern
        self.num_open = 0
        self.match_length = 0
        self._budget = budget
        self._pattern = _compile(pattern)
        self._window = ""

    def feed(self, piece: str) -> int | None:
        """Return the number of characters of `piece` up to the end of the first match, or None."""
        window = self._window
        for position, character in enumerate(piece, start=1):
            window = window[1 - MAX_MATCH_CHARS :] + character
            match = self._budget.search(self._pattern, window)
            if match is None or match.end() == match.start():
                self.num_open = 0
                continue
            if not match.partial:
                self.match_length = len(window) - match.start()
                return position
            self.num_open = len(window) - match.start()
        self._window = window
        return None
