"""Score texts and continue prompts with one variant of a model, against the reference.

The worker's own engine runs in a process of its own.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from torch import Tensor

from bench.quality.metrics import Floats, Score, ScoredTexts, Surprise, common_prefix, divergences
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.resolve import resolve_model
from quadriga.wire.packing import pack_ids, unpack_ids
from quadriga.wire.worker import DECODE, EXTEND, NewSlot, StepPlan
from worker_proc.startup.build import make_runner
from worker_proc.startup.devices import take_cores
from worker_proc.step.inputs import make_inputs
from worker_proc.step.runner import Runner

# Score texts and continue prompts with the worker's own engine in this process.

MAX_LOGIT_ROWS = 128  # computed at a time


class Scorer:
    """A model that scores one text at a time, or continues all prompts together."""

    def __init__(self, config: ServerConfig, texts: ScoredTexts) -> None:
        """Load the model, or raise QuadrigaError."""
        take_cores(config.worker)
        self._texts = texts
        self._page_size = config.worker.page_size
        self._pages_per_prompt = self._pages(len(texts.prompts[0]) + texts.continued)
        rows = len(texts.prompts)
        pages = max(rows * self._pages_per_prompt, *(self._pages(len(w)) for w in texts.windows))
        pool = pages * self._page_size
        small = config.replace(max_total_tokens=pool, max_running_requests=rows)
        files = resolve_model(config.model)
        self.vocab_size = files.vocab_size
        self._runner: Runner = make_runner(small, files)
        self._steps = 0

    @torch.inference_mode()
    def log_probs(self, ids: Sequence[int]) -> Iterator[Tensor]:
        """Yield the log-probabilities of the next token at each position of a text.

        Blocks are float32, [at most MAX_LOGIT_ROWS, vocab_size].
        """
        runner, table = self._runner, self._runner.table
        table.admit([self._slot(0, ids)])
        inputs = make_inputs(self._plan(EXTEND, 1, len(ids)), table)
        hidden = runner.engine.forward(inputs)
        for block in torch.split(hidden, MAX_LOGIT_ROWS):
            yield runner.engine.logits(block).float().log_softmax(-1)
        table.release([0])

    def argmax(self, ids: Sequence[int]) -> list[int]:
        """Return the most likely next token at each position of a text."""
        return [token for block in self.log_probs(ids) for token in block.argmax(-1).tolist()]

    def continuations(self) -> list[list[int]]:
        """Return the greedy continuation of each prompt."""
        prompts, count = self._texts.prompts, self._texts.continued
        rows = len(prompts)
        new = [self._slot(slot, prompt, count) for slot, prompt in enumerate(prompts)]
        plans = [self._plan(EXTEND, rows, len(prompts[0]), new)]
        plans += [self._plan(DECODE, rows, 1) for _ in range(count - 1)]
        steps = [unpack_ids(self._runner.run(plan).token_ids) for plan in plans]
        self._runner.table.release(list(range(rows)))
        return [list(tokens) for tokens in zip(*steps, strict=True)]

    def _slot(self, slot: int, ids: Sequence[int], num_continued: int = 0) -> NewSlot:
        first = slot * self._pages_per_prompt
        pages = pack_ids(range(first, first + self._pages(len(ids) + num_continued)))
        return NewSlot(slot, pack_ids(ids), 0, pages, 0.0, -1, 1.0, 0)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def _plan(self, mode: int, rows: int, tokens: int, new: Sequence[NewSlot] = ()) -> StepPlan:
        self._steps += 1
        slots, counts = pack_ids(range(rows)), pack_ids([tokens] * rows)
        return StepPlan(self._steps, mode, slots, counts, list(new), b"")


# Score one variant of a model, in a process of its own, against the reference.

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
