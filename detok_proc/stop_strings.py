"""Search a text that comes in pieces for what ends it: stop strings, and expressions.

The match that ends first wins, and of several that end at the same character the longest, so that
the result does not depend on how the text was cut into pieces. Only a suffix that can still become
a stop string is held back. Each stop string is matched by Knuth, Morris and Pratt's automaton
("Fast Pattern Matching in Strings", 1977), whose state is the length of that suffix. `str.find` in
the tail of the text finds matches as fast, but not the longest such suffix: to compare every start
takes 30 times as long (0.8 ms a token) where a client has a repetitive text and such stop strings.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from detok_proc.stop_regexes import ChoiceBudget, RegexMatcher, RequestBudget


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
