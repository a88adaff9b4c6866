"""What ends a text that comes in pieces: stop strings, and regular expressions (stop_regexes.py).

The match that ends first wins, and of several that end at the same character the longest, so
that the result does not depend on how the text was cut into pieces. Only a suffix that can still
become a stop string is held back. Each stop string is matched by Knuth, Morris and Pratt's
automaton ("Fast Pattern Matching in Strings", 1977): linear time, whatever text and stops are.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from detok_proc.stop_regexes import RegexMatcher


class Scanned(NamedTuple):
    """text: what may be sent now. matched: the stop string or regular expression that ended the
    text: before itself, or behind itself where it is kept."""

    text: str
    matched: str | None


class StopStrings:
    """The search for what stops one request. After a match nothing may be pushed.

    keeps_stop: what stopped the text is part of it.
    """

    __slots__ = ("_held", "_keeps", "_matchers")

    def __init__(
        self, strings: list[str], regexes: Sequence[str] = (), keeps_stop: bool = False
    ) -> None:
        self._matchers: list[_Matcher | RegexMatcher] = [_Matcher(string) for string in strings]
        self._matchers += [RegexMatcher(pattern) for pattern in regexes]
        self._keeps = keeps_stop
        self._held = ""

    def push(self, piece: str) -> Scanned:
        """Take the next piece of text, of any length. Raises TookTooLong."""
        ends = [(matcher.feed(piece), matcher) for matcher in self._matchers]
        found = [(end, -matcher.found_length, matcher.name) for end, matcher in ends if end]
        text = self._held + piece
        if found:
            end, minus_length, name = min(found)
            kept = len(self._held) + end + (0 if self._keeps else minus_length)
            self._held = ""
            return Scanned(text[: max(0, kept)], name)
        keep_back = max((matcher.matched for matcher in self._matchers), default=0)
        certain = len(text) - keep_back
        self._held = text[certain:]
        return Scanned(text[:certain], None)

    def flush(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """matched: how many characters of the stop string, its name, the text ends with."""

    __slots__ = ("_fallback", "found_length", "matched", "name")

    def __init__(self, string: str) -> None:
        self.name = string
        self.found_length = len(string)
        self.matched = 0
        self._fallback = _fallbacks(string)

    def feed(self, piece: str) -> int | None:
        """The number of characters of `piece` up to the end of the first match, or None."""
        string, matched, position = self.name, self.matched, 0
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
        self.matched = matched
        return None


@lru_cache(maxsize=1024)
def _fallbacks(string: str) -> tuple[int, ...]:
    """[n]: the longest proper prefix of `string` that its first n characters end with."""
    fallbacks = [0, 0]
    for position in range(1, len(string)):
        matched = fallbacks[position]
        while matched and string[matched] != string[position]:
            matched = fallbacks[matched]
        fallbacks.append(matched + (string[matched] == string[position]))
    return tuple(fallbacks)
