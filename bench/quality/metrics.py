"""Figures by which a variant of a model is compared with the reference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ScoredTexts:
    """Token ids: windows of the text, and prompts of one length with `continued` more tokens."""

    windows: list[list[int]]
    prompts: list[list[int]]
    continued: int


@dataclass(frozen=True, slots=True)
class Score:
    """Figures of a variant; the reference has none of the last three.

    Attributes:
        perplexity: per token.
        continuations: greedy continuations of the prompts.
        divergence: mean KL divergence of the reference's distributions from this one's, in nats.
        agreement: share of the reference's greedy tokens that this variant would choose too.
        prefix: mean number of tokens that a continuation has in common with the reference's.
    """

    perplexity: float
    continuations: list[list[int]]
    divergence: float | None = None
    agreement: float | None = None
    prefix: float | None = None


class Surprise:
    """Sum of the negative log-probabilities of a text's tokens."""

    def __init__(self) -> None:
        self._nats, self._count = 0.0, 0

    def add(self, log_probs: Floats, followed: Sequence[int]) -> None:
        """Add log-probabilities [rows, vocab_size] with the tokens that followed the first rows."""
        chosen = log_probs[np.arange(len(followed)), np.array(followed, dtype=np.int64)]
        self._nats -= float(chosen.sum(dtype=np.float64))
        self._count += len(followed)

    def perplexity(self) -> float:
        """Return the perplexity per token."""
        return math.exp(self._nats / self._count)


def divergences(reference: Floats, other: Floats) -> npt.NDArray[np.float64]:
    """Return the KL divergences in nats, [rows], of log-probabilities [rows, vocab_size].

    Kullback and Leibler, On information and sufficiency (1951).
    """
    wide = reference.astype(np.float64)
    result: npt.NDArray[np.float64] = (np.exp(wide) * (wide - other)).sum(-1)
    return result


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of equal tokens before the first different one."""
    pairs = enumerate(zip(first, second, strict=True))
    return next((index for index, (a, b) in pairs if a != b), len(first))
