"""How a variant of a model compares with the reference: figures, without a model at hand."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ScoredTexts:
    """Token ids. windows: of the text, each scored by itself. prompts: of one length, to be
    continued by `continued` tokens."""

    windows: list[list[int]]
    prompts: list[list[int]]
    continued: int


@dataclass(frozen=True, slots=True)
class Score:
    """Of a variant.

    perplexity: per token. continuations: greedy ones of the prompts. divergence: mean KL
    divergence of the reference's distributions from this one's, in nats. agreement: share of the
    reference's greedy tokens that are this variant's too, given those before. prefix: tokens that a
    continuation has in common with the reference's, in the mean. The reference itself has none of
    the last three.
    """

    perplexity: float
    continuations: list[list[int]]
    divergence: float | None = None
    agreement: float | None = None
    prefix: float | None = None


class Surprise:
    """Of the tokens of a text, each given those before it."""

    def __init__(self) -> None:
        self._nats, self._count = 0.0, 0

    def add(self, log_probs: Floats, followed: Sequence[int]) -> None:
        """log_probs: [rows, vocab_size]; followed: which tokens came after the first rows."""
        chosen = log_probs[np.arange(len(followed)), np.array(followed, dtype=np.int64)]
        self._nats -= float(chosen.sum(dtype=np.float64))
        self._count += len(followed)

    def perplexity(self) -> float:
        return math.exp(self._nats / self._count)


def divergences(reference: Floats, other: Floats) -> npt.NDArray[np.float64]:
    """[rows] nats, of log-probabilities [rows, vocab_size] (Kullback and Leibler 1951)."""
    wide = reference.astype(np.float64)
    result: npt.NDArray[np.float64] = (np.exp(wide) * (wide - other)).sum(-1)
    return result


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens are the same before the first that is not."""
    pairs = enumerate(zip(first, second, strict=True))
    return next((place for place, (a, b) in pairs if a != b), len(first))
