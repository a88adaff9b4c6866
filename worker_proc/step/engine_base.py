"""The contract of an engine, and the path through a step that every engine can take."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quadriga import __version__
from quadriga.runtime.cpu_affinity import Cpus
from quadriga.wire.messages.logprobs import PromptPiece
from quadriga.wire.messages.worker import GuessedRow, StepPlan
from worker_proc.sampling.logits_processors import apply_logits_processors, constrained
from worker_proc.sampling.sampler import NO_SAMPLE, SamplingRows, sample
from worker_proc.speculation.verification import verify_guesses
from worker_proc.step.inputs import StepInputs, make_inputs
from worker_proc.step.logprobs import prompt_logprobs, prompt_spans, row_logprobs, sampled_logprobs
from worker_proc.step.outputs import (
    NO_TOKENS,
    EngineOutput,
    PendingStep,
    SampledTokens,
    pending_step,
)
from worker_proc.step.slot_table import ALL_FINITE, SlotTable
from worker_proc.system.step_clock import HostStep, RunningStep
from worker_proc.system.transfer import send

if TYPE_CHECKING:
    from worker_proc.distributed.tp_group import TPGroup


class Engine(ABC):
    """A loaded model with its KV pages. The runner calls `execute`, one step at a time.

    An engine must implement `forward` and `logits`. It takes a faster path by overriding `execute`
    (from the plan to the tokens in one call), `forward_and_sample` (sampling inside of the kernels
    or graphs), `sample_slots` or `sample`.

    Attributes:
        name: The value of --attention-backend, or of --model-impl, that selects the engine.
        ranks: The processes with the other parts of the model, if there are any.
        stores_tokens: `sample_slots` writes the tokens to the slot table.
        last_replay: Launches the last step again, as it was, for measurements; None if it was not
            a graph.
        has_graphs: Decode steps are CUDA graphs.
        supports_jump_forward: A row with a few more tokens hardly makes a step longer, so that the
            tokens that a grammar forces are computed together with the sampled one.
        supports_guesses: Rows of several tokens can sample after each of them.
        has_equal_bits: A token's numbers are the same to the last bit, whatever else is in a step.
        max_guess_samples: Tokens that a step with guesses may sample.
        draft: The same model over the same KV pages, with weights of fewer bits, which drafts
            guesses; None: there is none.
    """

    name: str
    ranks: "TPGroup | None" = None
    stores_tokens = False
    last_replay: Callable[[], None] | None = None
    has_graphs = False
    supports_jump_forward = True
    supports_guesses = True
    has_equal_bits = False
    max_guess_samples = sys.maxsize
    draft: "Engine | None" = None

    @property
    def kernels(self) -> str:
        """What computes, and its version.

        Deterministic engines with the same value and weights give the same bits.
        """
        return f"{self.name} {__version__}, torch {torch.__version__}"

    def execute(self, plan: StepPlan, table: SlotTable, clock: RunningStep) -> PendingStep:
        """Compute the rows of a plan, sample, and add the tokens to the slots.

        Args:
            plan: A plan with rows.
            table: The slots, with the plan's releases, admissions and pages applied.
            clock: Of the step.

        Raises:
            ValueError: The rows contradict the slots.
        """
        inputs = make_inputs(plan, table, clock)
        clock.start()
        prompt_pieces: list[Callable[[], PromptPiece]] = []
        if spans := prompt_spans(inputs):
            hidden = self.forward(inputs)
            prompt_pieces = prompt_logprobs(spans, hidden, self.logits, table.copier)
            sampled = self.sample_rows(inputs, inputs.of_samples(hidden))
        else:
            sampled = self.forward_and_sample(inputs)
        table.num_computed[inputs.layout.slots] = inputs.num_computed_after
        if table.has_guesses:
            fetch = table.copier.begin_all(sampled.token_ids, table.nonfinite_from)
            verify = partial(self._verify, plan, inputs, sampled, fetch, prompt_pieces)
            return PendingStep(verify, blocks_next=True)
        self._append_tokens(inputs, sampled)
        return pending_step(inputs, sampled, prompt_pieces, self.supports_jump_forward)

    def _verify(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        sampled: SampledTokens,
        fetch: Callable[[], Sequence[np.ndarray]],
        prompt_pieces: Sequence[Callable[[], PromptPiece]],
    ) -> EngineOutput:
        """Wait for the samples of a step with guesses, and add those that count to the slots."""
        token_ids, nonfinite_from = fetch()
        is_first = np.diff(inputs.samples, prepend=-1) != 0
        has_guesses = inputs.table.num_guesses[inputs.sampled_slots] > 0
        if (token_ids[is_first & has_guesses] < 0).any():
            return self._compute_without_guesses(plan, inputs)
        slots = inputs.layout.slots
        inputs, sampled, guessed = verify_guesses(inputs, sampled._replace(token_ids=token_ids))
        num_computed = inputs.table.num_computed[slots]
        is_wrong = (nonfinite_from[slots] >= num_computed) & (nonfinite_from[slots] < ALL_FINITE)
        if is_wrong.any():
            inputs.table.forget_nonfinite(slots[is_wrong], num_computed[is_wrong])
        self._append_tokens(inputs, sampled)
        jump_forward = self.supports_jump_forward
        return pending_step(inputs, sampled, prompt_pieces, jump_forward, guessed).wait()

    def _compute_without_guesses(self, plan: StepPlan, inputs: StepInputs) -> EngineOutput:
        """Compute a step again, as if there had been no guesses.

        The numbers of a guess may overflow where the tokens before it do not, and what a query does
        not see has weight 0, which makes NaN of infinity.
        """
        table, slots, before = inputs.table, inputs.layout.slots, inputs.layout.num_computed
        rows = zip(inputs.plan_rows.tolist(), table.num_guesses[slots].tolist(), strict=True)
        guessed = [GuessedRow(row, count, b"") for row, count in rows if count]
        table.forget_guesses()
        table.num_computed[slots] = before
        table.forget_nonfinite(slots, before)
        output = self.execute(plan, table, HostStep()).wait()
        output.guessed = guessed
        return output

    def _append_tokens(self, inputs: StepInputs, sampled: SampledTokens) -> None:
        """Add the sampled tokens to the slots."""
        table = inputs.table
        if len(inputs.samples):
            slots, positions = inputs.sampled_slots, inputs.sample_positions
            if self.ranks is not None:
                self.ranks.check_tokens(sampled.token_ids)
            if not sampled.stored:
                table.write_tokens(slots, positions, sampled.token_ids)
            table.num_known[slots] = positions + 1

    @abstractmethod
    def forward(self, inputs: StepInputs) -> Tensor:
        """Compute the step's tokens and write their keys and values to the pages.

        Returns:
            Hidden states `[tokens, hidden]`, valid until the next call.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits of some rows of `forward`'s result.

        Args:
            hidden: `[rows, hidden]`.

        Returns:
            `[rows, vocab_size]`, valid until the next call.
        """

    def forward_and_sample(self, inputs: StepInputs) -> SampledTokens:
        """Compute the step's tokens, and sample a token for each row that samples."""
        return self.sample_rows(inputs, inputs.of_samples(self.forward(inputs)))

    def sample_rows(self, inputs: StepInputs, hidden: Tensor) -> SampledTokens:
        """Sample by each slot's parameters, in the order that sampler.py describes.

        Args:
            inputs: The step.
            hidden: `[samples, hidden]` of the rows that sample.
        """
        table, slots, positions = inputs.table, inputs.sampled_slots, inputs.sample_positions
        if not len(slots):
            return SampledTokens(NO_TOKENS)
        logits = self.logits(hidden)
        rules = table.sampling.row_logits(slots)
        asked = row_logprobs(logits, rules)
        changing = [row for row in rules if row.changes_logits]
        if changing:
            numbers = send(np.array([row.row for row in changing]), logits.device)
            is_finite = logits.index_select(0, numbers).amax(-1).isfinite()
            logits = apply_logits_processors(logits, changing, positions, table.tokens)
        token_ids = self.sample_slots(logits, inputs)
        if changing:  # what they mask is no error of the model, nor do they hide one
            sampled = token_ids.index_select(0, numbers).clamp(min=0)
            token_ids[numbers] = sampled.masked_fill_(~is_finite, NO_SAMPLE)
        logprobs = asked and sampled_logprobs(asked, token_ids, inputs.sampled_rows, table.copier)
        return SampledTokens(token_ids, logprobs, constrained(rules), self.stores_tokens)

    def sample_slots(self, logits: Tensor, inputs: StepInputs) -> Tensor:
        """Sample `[samples]` int64 from logits `[samples, vocab_size]` by the slots' parameters."""
        rows = inputs.table.sampling.sampling_rows(inputs.sampled_slots, inputs.sample_positions)
        return self.sample(logits, rows)

    def sample(self, logits: Tensor, rows: SamplingRows | None) -> Tensor:
        """Sample `[rows]` int64 from logits `[rows, vocab_size]`, as sampler.py's `sample` does."""
        return sample(logits, rows)

    def capture_graphs(self, table: SlotTable) -> None:  # noqa: B027 (most engines have none)
        """Prepare for steps on a table, before the first one that counts."""

    def kv_parts(self) -> Sequence[Tensor]:
        """Return the memory of the KV pages.

        Returns:
            Contiguous tensors `[pages, …]`. The rows of a page in all of them are what it holds; a
            copy of them in the rows of another page means the same.
        """
        raise NotImplementedError

    def kv_numbers(self) -> Sequence[Tensor]:
        """Return the floating-point numbers of the KV pages, `[pages, …]` as in `kv_parts`."""
        return self.kv_parts()

    def prefault_pages(self, cpus: Cpus) -> None:  # noqa: B027 (most engines have written to all)
        """Let a thread write to the KV pages before steps do.

        Args:
            cpus: Where the thread may run; empty: anywhere.
        """
