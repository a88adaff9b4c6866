"""Find stop strings and stop expressions in a text that arrives piece by piece.

First the expressions, whose searches have a budget of CPU time; then `StopStrings`, which looks for
both and holds back what may still become a match.
"""

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from quadriga.server.grammars.stop_regex import MAX_MATCH_CHARS, compile_stop_regex

if TYPE_CHECKING:
    import regex


# Search a text that comes in pieces for regular expressions that end it (`stop_regex`).
#
# The text ends at the first character that completes a match, so that the result does not depend
# on how the text was cut into pieces. Only the beginning of a possible match is held back.
# Expressions come from clients and may be hostile: a match has at most MAX_MATCH_CHARS
# characters, and the searches of a request have a budget of CPU time, which grows with its text.
# Wall time is not limited, so that a busy machine makes no expression slow.

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


# Search a text that comes in pieces for what ends it: stop strings, and expressions.
#
# The match that ends first wins, and of several that end at the same character the longest, so
# that the result does not depend on how the text was cut into pieces. Only a suffix that can
# still become a stop string is held back. Each stop string is matched by Knuth, Morris and
# Pratt's automaton ("Fast Pattern Matching in Strings", 1977), whose state is the length of that
# suffix. `str.find` in the tail of the text finds matches as fast, but not the longest such
# suffix: to compare every start takes 30 times as long (0.8 ms a token) where a client has a
# repetitive text and such stop strings.


class Scanned(NamedTuple):
    """The text that may be sent now, and what ended the whole text: a stop or an expression."""

    text: str
    matched: str | None


class StopStrings:
    """Look for what stops the text of one choice. After a match nothing may be pushed.

    With `keeps_stop` the match is part of the text. `budget` is the one of the choice's request.
    """

    __slots__ = ("_held", "_keeps_stop", "_matchers")

    def __init__(
        self,
        strings: Sequence[str],
        regexes: Sequence[str] = (),
        keeps_stop: bool = False,
        budget: RequestBudget | None = None,
    ) -> None:
        self._matchers: list[StringMatcher | RegexMatcher] = [StringMatcher(s) for s in strings]
        if regexes:
            choice_budget = ChoiceBudget(budget or RequestBudget())
            self._matchers += [RegexMatcher(pattern, choice_budget) for pattern in regexes]
        self._keeps_stop = keeps_stop
        self._held = ""

    def push(self, piece: str) -> Scanned:
        """Take the next piece of text, of any length. Raise SearchTooSlow."""
        first: tuple[int, int, str] | None = None
        num_open = 0
        for matcher in self._matchers:
            end = matcher.feed(piece)
            if end is None:
                num_open = max(num_open, matcher.num_open)
            else:
                match = (end, -matcher.match_length, matcher.name)
                first = match if first is None else min(first, match)
        text = self._held + piece
        if first is not None:
            end, minus_length, name = first
            num_kept = len(self._held) + end + (0 if self._keeps_stop else minus_length)
            self._held = ""
            return Scanned(text[: max(0, num_kept)], name)
        num_certain = len(text) - num_open
        self._held = text[num_certain:]
        return Scanned(text[:num_certain], None)

    def flush(self) -> str:
        """Return the text that was held back and did not become a match."""
        held, self._held = self._held, ""
        return held


class StringMatcher:
    """Look for the first occurrence of one stop string.

    Attributes:
        name: the stop string.
        num_open: number of characters of the stop string that the text ends with.
        match_length: length of the stop string.
    """

    __slots__ = ("_fallback", "match_length", "name", "num_open")

    def __init__(self, string: str) -> None:
        self.name = string
        self.match_length = len(string)
        self.num_open = 0
        self._fallback = _fallbacks(string)

    def feed(self, piece: str) -> int | None:
        """Return the number of characters of `piece` up to the end of the first match, or None."""
        string, matched, position = self.name, self.num_open, 0
        while position < len(piece):
            if matched == 0:
                position = piece.find(string[0], position)
                if position < 0:
                    break
            character = piece[position]
            while matched and string[matched] != character:
                matched = self._fallback[matched]
            matched += string[matched] == character
            position += 1
            if matched == len(string):
                return position
        self.num_open = matched
        return None


@lru_cache(maxsize=1024)
def _fallbacks(string: str) -> tuple[int, ...]:
    """Return for each n the longest proper prefix that the first n characters end with."""
    fallbacks = [0, 0]
    for position in range(1, len(string)):
        matched = fallbacks[position]
        while matched and string[matched] != string[position]:
            matched = fallbacks[matched]
        fallbacks.append(matched + (string[matched] == string[position]))
    return tuple(fallbacks)
