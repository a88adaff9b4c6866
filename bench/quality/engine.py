"""Score texts and continue prompts with the worker's own engine in this process."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bench.quality.metrics import ScoredTexts
from quadriga.config.server_config import ServerConfig
from quadriga.model_files.resolve import resolve_model
from quadriga.wire.messages.arrays import pack_ids, unpack_ids
from quadriga.wire.messages.worker import DECODE, EXTEND, NewSlot, StepPlan
from worker_proc.runner import Runner
from worker_proc.startup.build import make_runner
from worker_proc.step.inputs import make_inputs
from worker_proc.system.devices import take_cores

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
