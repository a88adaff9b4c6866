"""The contract of an engine, and the path through a step that every engine can take.

Before `Engine` is the verification of drafts, with which such a step ends.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quadriga import __version__
from quadriga.errors import ModelError
from quadriga.server.processes.machine import Cpus
from quadriga.wire.logprobs import PromptPiece
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import GuessedRow, StepPlan, VectorRow
from worker_proc.models.attention import Ints
from worker_proc.models.transfer import send
from worker_proc.sampling.grammar import Constrained
from worker_proc.sampling.logits_processors import apply_logits_processors, constrained
from worker_proc.sampling.sampler import NO_SAMPLE, SamplingRows, sample
from worker_proc.step.clock import HostStep, RunningStep
from worker_proc.step.inputs import StepInputs, make_inputs
from worker_proc.step.outputs import (
    NO_TOKENS,
    EngineOutput,
    PendingStep,
    SampledTokens,
    keep_samples,
    pending_step,
    prompt_logprobs,
    prompt_spans,
    row_logprobs,
    sampled_logprobs,
)
from worker_proc.step.pooling import Classifier, OutputNorm, VectorHeads, begin_vectors, pooled_rows
from worker_proc.step.slot_table import ALL_FINITE, SlotTable

if TYPE_CHECKING:
    from worker_proc.adapters.change import Adapter
    from worker_proc.distributed.tp_group import TPGroup


# Keep what was sampled after right drafts.
#
# A token is a function of seed, position and logits. So a draft is right if the token that was
# sampled in its place equals it, and what was sampled after it is then what a step of its own
# would have sampled: drawn, with penalties, or masked by a grammar, as well as greedy.

Flags = npt.NDArray[np.bool_]
NO_DRAFT = -1  # in the place of a row's last sample


def verify_drafts(
    inputs: StepInputs, sampled: SampledTokens
) -> tuple[StepInputs, SampledTokens, list[GuessedRow]]:
    """Drop what was sampled after wrong drafts.

    Args:
        inputs: a step with drafts, which are forgotten.
        sampled: all of its samples, on the host. The tokens may have been written over the drafts.

    Returns:
        The step and its tokens as if it had no other samples, and its rows with drafts.
    """
    table, samples = inputs.table, inputs.samples
    token_ids = np.asarray(sampled.token_ids)
    starts = np.flatnonzero(np.diff(samples, prepend=-1))
    drafts = [
        token
        for slot in inputs.sampled_slots[starts].tolist()
        for token in (*table.drafts.get(slot, ()), NO_DRAFT)
    ]
    counts = np.diff(starts, append=len(samples))
    num_wrong = np.cumsum(token_ids != np.array(drafts))
    num_wrong_before = np.concatenate(([0], num_wrong[:-1]))
    kept = num_wrong_before == np.repeat(num_wrong_before[starts], counts)
    is_first = np.diff(samples, prepend=-1) != 0
    kept &= is_first | (token_ids >= 0)  # the next step finds out about what could not be sampled
    num_kept = np.add.reduceat(kept, starts, dtype=np.int64)
    drafted = [
        GuessedRow(
            row=int(inputs.sampled_rows[start]),
            num_guesses=int(count) - 1,
            token_ids=pack_ids(token_ids[start + 1 : start + num].tolist()),
        )
        for start, count, num in zip(starts, counts, num_kept, strict=True)
        if count > 1
    ]
    table.forget_drafts()
    right = _only(inputs, kept)
    table.num_computed[right.sampled_slots] = right.sample_positions  # of several, the last counts
    return right, _only_tokens(inputs, sampled, kept), drafted


def _only(inputs: StepInputs, kept: Flags) -> StepInputs:
    return replace(
        inputs,
        samples=inputs.samples[kept],
        sampled_slots=inputs.sampled_slots[kept],
        sampled_rows=inputs.sampled_rows[kept],
        sample_positions=inputs.sample_positions[kept],
    )


def _only_tokens(inputs: StepInputs, sampled: SampledTokens, kept: Flags) -> SampledTokens:
    """Return the kept samples. A grammar's own state then has to accept each token of its slot."""
    table, numbers = inputs.table, np.cumsum(kept) - 1
    logprobs = sampled.logprobs and partial(
        keep_samples, sampled.logprobs(), inputs.sampled_rows, kept
    )
    constrained = [
        Constrained(int(numbers[row]), grammar)
        for row, _ in sampled.constrained
        if kept[row] and (grammar := table.sampling.grammar_of(int(inputs.sampled_slots[row])))
    ]
    token_ids = np.asarray(sampled.token_ids)[kept]
    return SampledTokens(token_ids, logprobs, constrained, sampled.stored)


class Engine(ABC):
    """A loaded model with its KV pages. The runner calls `execute`, one step at a time.

    An engine must implement `forward` and `logits`. It takes a faster path by overriding `execute`
    (from the plan to the tokens in one call), `forward_and_sample` (sampling inside of the kernels
    or graphs), `sample_slots` or `sample`.

    Attributes:
        name: the value of --attention-backend, or of --model-impl, that selects the engine.
        ranks: the processes with the other parts of the model, if there are any.
        stores_tokens: `sample_slots` writes the tokens to the slot table.
        last_replay: launches the last step again, as it was, for measurements; None if it was not
            a graph.
        is_for_gpu: it is written for a GPU, and runs on a CPU in tests only.
        has_graphs: decode steps are CUDA graphs.
        max_graph_tokens: tokens of the largest step that will be captured as a graph.
        supports_jump_forward: a row with a few more tokens hardly makes a step longer, so that the
            tokens that a grammar forces are computed together with the sampled one.
        supports_drafts: rows of several tokens can sample after each of them.
        supports_adapters: `set_adapter` takes adapters.
        has_equal_bits: a token's numbers are the same to the last bit, whatever else is in a step.
        max_draft_samples: tokens that a step with drafts may sample.
        output_norm: of hidden states before the head; None: `forward` returns normalized ones.
        has_head: tokens can be sampled; else every row has a vector.
        classifier: the head that scores texts; None: there is none.
        dense: functions of a pooled vector, which follow one another before it is normalized.
        draft: the same model over the same KV pages, with weights of fewer bits, which drafts
            tokens; None: there is none.
    """

    name: str
    ranks: "TPGroup | None" = None
    stores_tokens = False
    last_replay: Callable[[], None] | None = None
    is_for_gpu = False
    has_graphs = False
    max_graph_tokens = 0
    supports_jump_forward = True
    supports_drafts = True
    supports_adapters = False
    has_equal_bits = False
    max_draft_samples = sys.maxsize
    output_norm: OutputNorm | None = None
    has_head = True
    classifier: Classifier | None = None
    dense: Sequence[Callable[[Tensor], Tensor]] = ()
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
            plan: a plan with rows.
            table: the slots, with the plan's releases, admissions and pages applied.
            clock: of the step.

        Raises:
            ValueError: the rows contradict the slots.
        """
        inputs = make_inputs(plan, table, clock)
        clock.start()
        prompt_pieces: list[Callable[[], PromptPiece]] = []
        vectors: list[Callable[[], VectorRow]] = []
        spans, pooled = prompt_spans(inputs), pooled_rows(inputs)
        if spans or pooled:
            hidden = self.forward(inputs)
            heads = VectorHeads(self.output_norm, self.classifier, self.dense, self.logits)
            vectors = begin_vectors(pooled, hidden, heads, table.copier)
            prompt_pieces = prompt_logprobs(spans, hidden, self.logits, table.copier)
            sampled = self.sample_rows(inputs, inputs.of_samples(hidden))
        else:
            sampled = self.forward_and_sample(inputs)
        table.num_computed[inputs.layout.slots] = inputs.num_computed_after
        if table.has_drafts:
            fetch = table.copier.begin_all(sampled.token_ids, table.nonfinite_from)
            verify = partial(self._verify, plan, inputs, sampled, fetch, prompt_pieces)
            return PendingStep(verify, blocks_next=True)
        self._append_tokens(inputs, sampled)
        jump_forward = self.supports_jump_forward
        return pending_step(inputs, sampled, prompt_pieces, jump_forward, (), vectors)

    def _verify(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        sampled: SampledTokens,
        fetch: Callable[[], Sequence[np.ndarray]],
        prompt_pieces: Sequence[Callable[[], PromptPiece]],
    ) -> EngineOutput:
        """Wait for the samples of a step with drafts, and add those that count to the slots."""
        token_ids, nonfinite_from = fetch()
        is_first = np.diff(inputs.samples, prepend=-1) != 0
        has_drafts = inputs.table.num_drafts[inputs.sampled_slots] > 0
        if (token_ids[is_first & has_drafts] < 0).any():
            return self._compute_without_drafts(plan, inputs)
        slots = inputs.layout.slots
        inputs, sampled, drafted = verify_drafts(inputs, sampled._replace(token_ids=token_ids))
        num_computed = inputs.table.num_computed[slots]
        is_wrong = (nonfinite_from[slots] >= num_computed) & (nonfinite_from[slots] < ALL_FINITE)
        if is_wrong.any():
            inputs.table.forget_nonfinite(slots[is_wrong], num_computed[is_wrong])
        self._append_tokens(inputs, sampled)
        jump_forward = self.supports_jump_forward
        return pending_step(inputs, sampled, prompt_pieces, jump_forward, drafted).wait()

    def _compute_without_drafts(self, plan: StepPlan, inputs: StepInputs) -> EngineOutput:
        """Compute a step again, as if there had been no drafts.

        The numbers of a draft may overflow where the tokens before it do not, and what a query does
        not see has weight 0, which makes NaN of infinity.
        """
        table, slots, before = inputs.table, inputs.layout.slots, inputs.layout.num_computed
        rows = zip(inputs.plan_rows.tolist(), table.num_drafts[slots].tolist(), strict=True)
        drafted = [GuessedRow(row, count, b"") for row, count in rows if count]
        table.forget_drafts()
        table.num_computed[slots] = before
        table.forget_nonfinite(slots, before)
        output = self.execute(plan, table, HostStep()).wait()
        output.drafted = drafted
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
    def logits(self, hidden: Tensor, adapters: Ints | None = None) -> Tensor:
        """Compute the logits of some rows of `forward`'s result.

        Args:
            hidden: `[rows, hidden]`.
            adapters: `[rows]` the index of each row's adapter, as in the slot table; None: no row
                has one.

        Returns:
            `[rows, vocab_size]`, valid until the next call.
        """

    def forward_and_sample(self, inputs: StepInputs) -> SampledTokens:
        """Compute the step's tokens, and sample a token for each row that samples."""
        return self.sample_rows(inputs, inputs.of_samples(self.forward(inputs)))

    def sample_rows(self, inputs: StepInputs, hidden: Tensor) -> SampledTokens:
        """Sample by each slot's parameters, in the order that sampler.py describes.

        Args:
            inputs: the step.
            hidden: `[samples, hidden]` of the rows that sample.
        """
        table, slots, positions = inputs.table, inputs.sampled_slots, inputs.sample_positions
        if not len(slots):
            return SampledTokens(NO_TOKENS)
        logits = self.logits(hidden, table.adapters_of(slots))
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

    def pack_adapter(self, adapter: "Adapter") -> "Adapter":
        """Return an adapter in host memory, in the form that `upload_adapter` copies.

        It takes the time of a few steps, in any thread, also while a step is computed.

        Raises:
            ModelError: the engine does not compute such an adapter.
        """
        return adapter

    def upload_adapter(self, packed: "Adapter") -> "Adapter":
        """Return a packed adapter in the device's memory, in the form that `set_adapter` takes.

        On a CPU that is the packed adapter itself. It may be called in any thread, also while a
        step is computed.

        Raises:
            ModelError: there is no memory for it.
        """
        return packed

    def set_adapter(self, index: int, adapter: "Adapter | None") -> None:  # noqa: ARG002
        """Let slots whose `SlotTable.adapters` has an index be computed with an adapter.

        It is called between steps, for an index that no held slot has.

        Args:
            index: from 0 on, below --max-loras.
            adapter: read for this model, or a result of `pack_adapter` or, so that nothing is left
                to do, of `upload_adapter`; None: nothing has the index from now on.

        Raises:
            ModelError: the engine computes no adapters.
        """
        raise ModelError(
            f"the engine {self.name} computes no adapters: start without them, or with"
            " --attention-backend torch on a model of the supported families"
        )

    def capture_graphs(self, table: SlotTable) -> None:  # noqa: B027 (most engines have none)
        """Prepare for steps on a table, before the first one that counts."""

    def kv_parts(self) -> Sequence[Tensor]:
        """Return the memory of the KV pages.

        Returns:
            Contiguous tensors `[pages, …]`. The rows of a page in all of them are what it holds; a
            copy of them in the rows of another page means the same.
        """
        raise NotImplementedError

    def kv_pools(self) -> Sequence[Tensor]:
        """Return the memory of the KV pages in as few tensors as there are, for copies on a GPU.

        Returns:
            Contiguous tensors `[pieces, pages, …]`: `kv_parts` in order, joined.
        """
        return [part.unsqueeze(0) for part in self.kv_parts()]

    def kv_numbers(self) -> Sequence[Tensor]:
        """Return the floating-point numbers of the KV pages, `[pages, …]` as in `kv_parts`."""
        return self.kv_parts()

    def prefault_pages(self, cpus: Cpus) -> None:  # noqa: B027 (most engines have written to all)
        """Let a thread write to the KV pages before steps do.

        Args:
            cpus: where the thread may run; empty: anywhere.
        """
