"""The contract of an engine: a loaded model together with its KV pages, and a way to compute."""

from abc import ABC, abstractmethod

from torch import Tensor

from worker_proc.inputs import StepInputs
from worker_proc.sampler import SamplingRows, sample


class Engine(ABC):
    """Computes steps, one at a time. Owns the weights and the KV pages.

    name: the value of --attention-backend that asks for it.
    """

    name: str

    @abstractmethod
    def forward(self, inputs: StepInputs) -> Tensor:
        """Compute the step's tokens, keeping their keys and values. Returns hidden states
        [tokens, hidden], which stand until the next call."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden], rows of what `forward` returned. Returns [rows, vocab_size],
        which stand until the next call."""

    @abstractmethod
    def likeliest(self, hidden: Tensor) -> Tensor:
        """The token of the greatest logit, the first of equals, for each row: [rows] int64."""

    def forward_and_choose(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """What `forward` returns, and what `likeliest` says of the rows that sample
        [samples] int64."""
        hidden = self.forward(inputs)
        last = inputs.last_tokens
        return hidden, self.likeliest(hidden if last is None else hidden.index_select(0, last))

    def sample(self, logits: Tensor, rows: SamplingRows | None) -> Tensor:
        """As sampler.py's `sample`: logits [rows, vocab_size] to tokens [rows] int64."""
        return sample(logits, rows)
