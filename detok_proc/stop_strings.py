"""Stop strings in a text that comes in pieces.

The match that ends first wins, and of several that end at the same character the longest, so
that the result does not depend on how the text was cut into pieces. Only a suffix that can still
become a stop string is held back. Each stop string is matched by Knuth, Morris and Pratt's
automaton ("Fast Pattern Matching in Strings", 1977): linear time, whatever text and stops are.
"""

from functools import lru_cache
from typing import NamedTuple


class Scanned(NamedTuple):
    """text: what may be sent now. matched: the stop string that ended the text before itself."""

    text: str
    matched: str | None


class StopStrings:
    """The search for one request's stop strings. After a match nothing may be pushed."""

    __slots__ = ("_held", "_matchers")

    def __init__(self, strings: list[str]) -> None:
        self._matchers = [_Matcher(string) for string in strings]
        self._held = ""

    def push(self, piece: str) -> Scanned:
        """Take the next piece of text, of any length."""
        ends = [(matcher.feed(piece), matcher) for matcher in self._matchers]
        found = [(end, -len(matcher.string), matcher.string) for end, matcher in ends if end]
        text = self._held + piece
        if found:
            end, minus_length, string = min(found)
            self._held, kept = "", len(self._held) + end + minus_length
            return Scanned(text[:kept], string)
        keep_back = max((matcher.matched for matcher in self._matchers), default=0)
        certain = len(text) - keep_back
        self._held = text[certain:]
        return Scanned(text[:certain], None)

    def flush(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """matched: how many characters of `string` the text ends with."""

    __slots__ = ("_fallback", "matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        self._fallback = _fallbacks(string)

    def feed(self, piece: str) -> int | None:
        """The number of characters of `piece` up to the end of the first match, or None."""
        string, matched, position = self.string, self.matched, 0
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
