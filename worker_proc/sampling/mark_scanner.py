"""Find a mark in the text of tokens, however the text is split into tokens."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from worker_proc.attention.base import Ints


class MarkState(NamedTuple):
    """Where a scan stands after a token.

    Attributes:
        num_matched: Bytes of the mark at the end of the text; all of them where the mark is
            complete.
        num_after: Bytes of the token after the complete mark.
    """

    num_matched: int
    num_after: int = 0


class MarkScanner:
    """Searches for a mark, token by token (Knuth, Morris and Pratt 1977).

    Its state is one number, so that the scan continues from the tokens of a request alone.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark.encode()
        self._fallbacks = _fallbacks(self.mark)

    def scan(self, num_matched: int, data: bytes) -> MarkState:
        """Return the state after the bytes of a token.

        Args:
            num_matched: Bytes of the mark at the end of the text before the token.
            data: The token's bytes.
        """
        mark, fallbacks = self.mark, self._fallbacks
        for index, byte in enumerate(data):
            while num_matched and mark[num_matched] != byte:
                num_matched = fallbacks[num_matched]
            if mark[num_matched] == byte:
                num_matched += 1
                if num_matched == len(mark):
                    return MarkState(num_matched, len(data) - index - 1)
        return MarkState(num_matched)

    def is_complete(self, scanned: MarkState) -> bool:
        """Return whether the mark is complete."""
        return scanned.num_matched == len(self.mark)

    def overshooting(self, tokens: Iterable[bytes]) -> list[Ints]:
        """Return the ids of tokens that have bytes after the end of the mark.

        Args:
            tokens: Bytes of each token id.

        Returns:
            An array for each number of bytes that are matched before the token.
        """
        mark, last = self.mark, self.mark[-1:]
        suffixes = {mark[start:]: start for start in range(1, len(mark))}
        ids: list[list[int]] = [[] for _ in mark]  # by the part of the mark before the token
        for token, data in enumerate(tokens):
            if last not in data[:-1]:
                continue
            if mark in data[:-1]:
                ids[0].append(token)
            for length in range(1, min(len(data), len(mark))):
                start = suffixes.get(data[:length])
                if start is not None:
                    ids[start].append(token)
        return [
            np.unique(np.array([i for part in self._parts(n) for i in ids[part]], dtype=np.int64))
            for n in range(len(mark))
        ]

    def _parts(self, num_matched: int) -> list[int]:
        """Return the lengths of all parts of the mark that end where the longest one does."""
        parts = [num_matched]
        while parts[-1]:
            parts.append(self._fallbacks[parts[-1]])
        return parts


def _fallbacks(mark: bytes) -> list[int]:
    """Return how much of the mark still matches where the byte after its first i differs."""
    fallbacks, matched = [0, 0], 0
    for byte in mark[1:]:
        while matched and mark[matched] != byte:
            matched = fallbacks[matched]
        matched += mark[matched] == byte
        fallbacks.append(matched)
    return fallbacks
