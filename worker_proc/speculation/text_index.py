"""Find where the last tokens of a text occurred before, in time that does not grow with it."""

from collections.abc import Sequence
from typing import NamedTuple

NGRAM_SIZES = (4, 2)  # tokens that must match; the longer ones are looked for first
MAX_MATCH = 16  # tokens that are compared to tell how good a match is
END = -1  # stands between texts, and never matches


class Match(NamedTuple):
    """A place at which a text goes on as another one may.

    Attributes:
        position: of the token that followed there.
        length: number of tokens before it that are equal, at most MAX_MATCH.
    """

    position: int
    length: int


class TextIndex:
    """A growing text, and where each sequence of a few tokens occurred last.

    Attributes:
        tokens: The text.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._places: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in NGRAM_SIZES)
        self.extend(tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the text."""
        begin = len(self.tokens)
        self.tokens += token_ids
        tokens = self.tokens
        for size, places in zip(NGRAM_SIZES, self._places, strict=True):
            for position in range(max(begin, size), len(tokens)):
                places[tuple(tokens[position - size : position])] = position

    def find(self, text: Sequence[int]) -> Match | None:
        """Return the last place where this text goes on after the end of another one.

        Args:
            text: The other text, or this one, whose own end is no match.
        """
        for size, places in zip(NGRAM_SIZES, self._places, strict=True):
            position = places.get(tuple(text[-size:])) if len(text) >= size else None
            if position is not None:
                return Match(position, self._match_length(position, text))
        return None

    def after(self, position: int, count: int, repeats: bool) -> list[int]:
        """Return at most `count` tokens from a position on, up to the end of a text.

        Args:
            position: of the first one.
            count: their largest number.
            repeats: go on after the last token with those from `position` on again.
        """
        token_ids = self.tokens[position : position + count]
        if repeats:
            token_ids = (token_ids * -(-count // len(token_ids)))[:count]
        return token_ids[: token_ids.index(END)] if END in token_ids else token_ids

    def _match_length(self, position: int, text: Sequence[int]) -> int:
        tokens, most = self.tokens, min(MAX_MATCH, position, len(text))
        for length in range(most):
            if tokens[position - 1 - length] != text[-1 - length]:
                return length
        return most
