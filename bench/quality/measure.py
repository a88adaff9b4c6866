"""One variant of a model against the reference: what is measured, in a process of its own."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

import numpy as np

from bench.quality.engine import Scorer
from bench.quality.metrics import Floats, Score, ScoredTexts, Surprise, common_prefix, divergences
from quadriga.config.server_config import ServerConfig

EVERY = 4
"""Of every so many positions the whole distribution is compared: each takes 4 bytes a token of the
vocabulary, in a file."""


def score_reference(config: ServerConfig, texts: ScoredTexts, kept: Path) -> Score:
    """Also writes its distributions to the file `kept`, for the others."""
    scorer = Scorer(config, texts)
    count = sum(len(window[::EVERY]) for window in texts.windows)
    shape = count, scorer.vocab_size
    file = np.lib.format.open_memmap(kept, mode="w+", dtype=np.float32, shape=shape)
    surprise, done = Surprise(), 0
    for block, followed, compared in _blocks(scorer, texts.windows):
        surprise.add(block, followed)
        file[done : done + len(compared)] = compared
        done += len(compared)
    return Score(surprise.perplexity(), scorer.continuations())


def score_variant(config: ServerConfig, texts: ScoredTexts, kept: Path, reference: Score) -> Score:
    scorer = Scorer(config, texts)
    distributions = np.load(kept, mmap_mode="r")
    surprise, diverged, done = Surprise(), 0.0, 0
    for block, followed, compared in _blocks(scorer, texts.windows):
        surprise.add(block, followed)
        diverged += divergences(distributions[done : done + len(compared)], compared).sum()
        done += len(compared)
    own, others = scorer.continuations(), reference.continuations
    return Score(
        surprise.perplexity(),
        own,
        divergence=float(diverged / len(distributions)),
        agreement=_agreement(scorer, texts.prompts, others),
        prefix=mean(common_prefix(a, b) for a, b in zip(own, others, strict=True)),
    )


def _blocks(
    scorer: Scorer, windows: Sequence[list[int]]
) -> Iterator[tuple[Floats, list[int], Floats]]:
    """Log-probabilities of some rows, the tokens that followed them (the last of a window has
    none), and the rows whose distributions are compared."""
    for window in windows:
        first = 0
        for tensor in scorer.log_probs(window):
            block = tensor.numpy()
            yield block, window[first + 1 : first + 1 + len(block)], block[-first % EVERY :: EVERY]
            first += len(block)


def _agreement(
    scorer: Scorer, prompts: Sequence[list[int]], continuations: Sequence[list[int]]
) -> float:
    same = []
    for prompt, tokens in zip(prompts, continuations, strict=True):
        argmax = scorer.argmax(prompt + tokens)[len(prompt) - 1 : -1]
        same += [a == b for a, b in zip(argmax, tokens, strict=True)]
    return sum(same) / len(same)
