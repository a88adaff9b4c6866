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
        last = self.mark[-1:]
        candidates = [(i, data) for i, data in enumerate(tokens) if last in data[:-1]]
        ids: list[Ints] = []
        for num_matched in range(len(self.mark)):
            after = [i for i, data in candidates if self.scan(num_matched, data).num_after]
            ids.append(np.array(after, dtype=np.int64))
        return ids


def _fallbacks(mark: bytes) -> list[int]:
    """Return how much of the mark still matches where the byte after its first i differs."""
    fallbacks, matched = [0, 0], 0
    for byte in mark[1:]:
        while matched and mark[matched] != byte:
            matched = fallbacks[matched]
        matched += mark[matched] == byte
        fallbacks.append(matched)
    return fallbacks
