"""Find where the last tokens of a text occurred before, in time that does not grow with it."""

from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

import numpy as np

NGRAM_SIZES = (4, 2)  # tokens that must match; the longer ones are looked for first
MAX_MATCH = 16  # tokens that are compared to tell how good a match is
END = -1  # stands between texts, and never matches
# A sequence is found by the sum of its tokens times these, which fits into 63 bits.
FACTORS = (0x4F1BBCDCBF, 0x35D54D6137, 0x2545F4914F, 0x61C8864681)
MIN_ARRAY_TOKENS = 32  # for fewer, numpy takes longer than Python


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
        self._places: tuple[dict[int, int], ...] = tuple({} for _ in NGRAM_SIZES)
        self.extend(tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the text."""
        begin = len(self.tokens)
        self.tokens += token_ids
        tokens = self.tokens
        for size, places in zip(NGRAM_SIZES, self._places, strict=True):
            first = max(begin, size)
            keys = _keys(tokens[first - size : -1], size)
            places.update(zip(keys, range(first, len(tokens)), strict=True))

    def find(self, text: Sequence[int]) -> Match | None:
        """Return the last place where this text goes on after the end of another one.

        Args:
            text: The other text, or this one, whose own end is no match.
        """
        for size, places in zip(NGRAM_SIZES, self._places, strict=True):
            position = places.get(_key(text[-size:])) if len(text) >= size else None
            if position is None:
                continue
            length = self._match_length(position, text)
            if length >= size:
                return Match(position, length)
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


def _key(token_ids: Sequence[int]) -> int:
    return sum(map(mul, token_ids, FACTORS))


def _keys(token_ids: Sequence[int], size: int) -> list[int]:
    """Return the keys of all sequences of `size` tokens, in order."""
    count = len(token_ids) - size + 1
    if count < MIN_ARRAY_TOKENS:
        return [_key(token_ids[begin : begin + size]) for begin in range(count)]
    tokens = np.array(token_ids, dtype=np.int64)
    sums = sum(tokens[i : i + count] * FACTORS[i] for i in range(size))
    keys: list[int] = np.asarray(sums).tolist()
    return keys
