"""The contract of a model architecture."""

from abc import abstractmethod
from collections.abc import Iterator

from torch import Tensor, nn

from quadriga.windows import common_window
from worker_proc.attention.base import AttentionShape
from worker_proc.models.checkpoint_parts import StoredTensor
from worker_proc.models.layers import Attention
from worker_proc.models.ops import Ops, Value


class Model(nn.Module):
    """A decoder over the concatenated tokens of a step, which may belong to many requests.

    The constructor allocates the weights; the loader fills the tensors of `checkpoint_tensors` and
    then calls `finish_loading`.

    Attributes:
        attention_shape: Layers, heads and head size of this rank.
        vocab_size: Number of columns of the logits.
    """

    attention_shape: AttentionShape
    vocab_size: int

    @property
    def window(self) -> int:
        """Tokens that every layer's attention is limited to; 0 if a layer sees all."""
        return common_window(m.window for m in self.modules() if isinstance(m, Attention))

    @abstractmethod
    def forward(self, ops: Ops[Value]) -> Value:
        """Return the hidden states [tokens, hidden_size] of the step's tokens."""

    @abstractmethod
    def compute_logits(self, ops: Ops[Value], hidden: Value) -> Value:
        """Return the logits [rows, vocab_size] of hidden states [rows, hidden_size]."""

    @abstractmethod
    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the view of a parameter that each tensor of the checkpoint fills, by its name.

        A view can be a row range of a fused weight.
        """

    def checkpoint_parts(
        self, name: str, tensor: StoredTensor
    ) -> Iterator[tuple[str, StoredTensor]]:
        """Yield the parts of a stored tensor by the names of `checkpoint_tensors`.

        A tensor that the model does not need has no parts.
        """
        yield name, tensor

    def finish_loading(self, context_length: int) -> None:
        """Compute the constants that no checkpoint has, for positions below `context_length`."""
