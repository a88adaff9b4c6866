"""The contract of an engine: a loaded model together with its KV pages, and a way to compute."""

from abc import ABC, abstractmethod

from torch import Tensor

from quadriga.runtime.cpu_affinity import Cpus
from quadriga.wire.messages.worker import StepPlan
from worker_proc.sampling.sampler import SamplingRows, sample
from worker_proc.step.inputs import StepInputs
from worker_proc.step.slot_table import SlotTable
from worker_proc.system.transfer import TokenIds, send_all


class Engine(ABC):
    """Computes steps, one at a time. Owns the weights and the KV pages.

    name: the value of --attention-backend that asks for it. jumps: a few more tokens in a row make
    a step hardly longer, so that those which a grammar forces are computed with the one before.
    """

    name: str
    jumps = True

    def prepare(self, table: SlotTable) -> None:  # noqa: B027 (most need nothing)
        """What is best done before the first step, for a table that all steps will have."""

    def take_memory_ahead(self, cpus: Cpus) -> None:  # noqa: B027 (most have taken it all)
        """Have a thread take the memory of pages before they are written to. cpus: where it runs;
        empty: anywhere."""

    @abstractmethod
    def forward(self, inputs: StepInputs) -> Tensor:
        """Compute the step's tokens, keeping their keys and values. Returns hidden states
        [tokens, hidden], which stand until the next call."""

    def forward_sampled(self, inputs: StepInputs) -> Tensor:
        """As `forward`, but of the rows that sample only: [samples, hidden]."""
        return inputs.of_samples(self.forward(inputs))

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden], rows of what `forward` returned. Returns [rows, vocab_size],
        which stand until the next call."""

    @abstractmethod
    def argmax(self, hidden: Tensor) -> Tensor:
        """The token of the greatest logit, the first of equals, for each row: [rows] int64."""

    def forward_argmax(self, inputs: StepInputs) -> TokenIds:
        """Compute the step's tokens; what `likeliest` says of the rows that sample [samples],
        which stands until the next call."""
        return self.argmax(self.forward_sampled(inputs))

    def forward_sample(self, inputs: StepInputs) -> TokenIds:
        """As `forward_argmax`, of rows that are greedy, or drawn by nothing but a temperature
        and a seed."""
        logits = self.logits(self.forward_sampled(inputs))
        table, slots = inputs.table, inputs.sampled_slots
        there = send_all(table.device, slots, inputs.sample_positions)
        return self.sample(logits, table.sampling.sampling_rows(slots, *there))

    def decode(self, plan: StepPlan, table: SlotTable) -> bytes | None:
        """A step from its plan to the tokens that it gave, packed as in StepResult, if each of its
        rows decodes one token, greedily, and this engine has a shorter way for that. None where
        not; then nothing has happened."""
        return None

    def note(self, inputs: StepInputs, token_ids: TokenIds) -> None:
        """Add what was chosen [samples] to what is known of its slots."""
        inputs.table.learn(inputs.sampled_slots, inputs.sample_positions, token_ids)

    def sample(self, logits: Tensor, rows: SamplingRows | None) -> Tensor:
        """As sampler.py's `sample`: logits [rows, vocab_size] to tokens [rows] int64."""
        return sample(logits, rows)
