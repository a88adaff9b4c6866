"""Score one variant of a model, in a process of its own, against the reference."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

import numpy as np

from bench.quality.engine import Scorer
from bench.quality.metrics import Floats, Score, ScoredTexts, Surprise, common_prefix, divergences
from quadriga.config.server_config import ServerConfig

# The whole distribution is compared at every fourth position: each takes 4 bytes per token of the
# vocabulary in a file.
COMPARED_INTERVAL = 4


def score_reference(config: ServerConfig, texts: ScoredTexts, reference_file: Path) -> Score:
    """Score the reference, and write its distributions to a file."""
    scorer = Scorer(config, texts)
    count = sum(len(window[::COMPARED_INTERVAL]) for window in texts.windows)
    shape = count, scorer.vocab_size
    file = np.lib.format.open_memmap(reference_file, mode="w+", dtype=np.float32, shape=shape)
    surprise, done = Surprise(), 0
    for block, followed, compared in _blocks(scorer, texts.windows):
        surprise.add(block, followed)
        file[done : done + len(compared)] = compared
        done += len(compared)
    return Score(surprise.perplexity(), scorer.continuations())


def score_variant(
    config: ServerConfig, texts: ScoredTexts, reference_file: Path, reference: Score
) -> Score:
    """Score a variant, with the reference's distributions and continuations."""
    scorer = Scorer(config, texts)
    distributions = np.load(reference_file, mmap_mode="r")
    surprise, diverged, done = Surprise(), 0.0, 0
    for block, followed, compared in _blocks(scorer, texts.windows):
        surprise.add(block, followed)
        diverged += divergences(distributions[done : done + len(compared)], compared).sum()
        done += len(compared)
    continuations, expected = scorer.continuations(), reference.continuations
    return Score(
        surprise.perplexity(),
        continuations,
        divergence=float(diverged / len(distributions)),
        agreement=_agreement(scorer, texts.prompts, expected),
        prefix=mean(common_prefix(a, b) for a, b in zip(continuations, expected, strict=True)),
    )


def _blocks(
    scorer: Scorer, windows: Sequence[list[int]]
) -> Iterator[tuple[Floats, list[int], Floats]]:
    """Yield blocks of log-probabilities with their next tokens and the rows to compare.

    The last position of a window has no next token.
    """
    for window in windows:
        first = 0
        for tensor in scorer.log_probs(window):
            block = tensor.numpy()
            yield (
                block,
                window[first + 1 : first + 1 + len(block)],
                block[-first % COMPARED_INTERVAL :: COMPARED_INTERVAL],
            )
            first += len(block)


def _agreement(
    scorer: Scorer, prompts: Sequence[list[int]], continuations: Sequence[list[int]]
) -> float:
    same = []
    for prompt, tokens in zip(prompts, continuations, strict=True):
        argmax = scorer.argmax(prompt + tokens)[len(prompt) - 1 : -1]
        same += [a == b for a, b in zip(argmax, tokens, strict=True)]
    return sum(same) / len(same)
