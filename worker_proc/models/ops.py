"""The operations that model files are written in, so that each architecture is written once.

`TorchOps` and `TritonOps` execute an operation when it is called. The CPU engine's `Recorder`
records them once as a list, and the native kernels run that list in every step.
"""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from worker_proc.models.layers import Embedding, HeadNorms, LayerNorm, Linear, RMSNorm, Rope

# One row for each token: a tensor [tokens, width], or what stands for it in an implementation.
Value = TypeVar("Value")


class Ops(ABC, Generic[Value]):
    """Operations on the tokens of one step.

    An implementation may change the residual stream in place: the values that `embed` and
    `linear_add` return are the residual stream, and a model uses only the latest one.
    """

    @abstractmethod
    def embed(self, tokens: Embedding, positions: Embedding | None = None) -> Value:
        """Return the residual stream [tokens, hidden_size]: the embeddings of the step's tokens.

        If `positions` is given, the embeddings of the tokens' positions are added.
        """

    @abstractmethod
    def norm(self, norm: LayerNorm | RMSNorm, x: Value) -> Value:
        """Normalise the residual stream `x` into a new value."""

    @abstractmethod
    def linear(self, proj: Linear, x: Value) -> Value:
        """Return x Wᵀ + b."""

    @abstractmethod
    def linear_gelu(self, proj: Linear, x: Value) -> Value:
        """Return gelu(x Wᵀ + b), with the tanh approximation."""

    @abstractmethod
    def linear_swiglu(self, proj: Linear, x: Value) -> Value:
        """Return silu(gate) * up, where [gate, up] = x Wᵀ + b.

        Shazeer 2020, https://arxiv.org/abs/2002.05202.
        """

    @abstractmethod
    def linear_add(self, residual: Value, proj: Linear, x: Value) -> Value:
        """Return residual + x Wᵀ + b; the `residual` passed in is invalid afterwards.

        If `proj` is split by rows, x Wᵀ + b is summed over the ranks.
        """

    @abstractmethod
    def attend(
        self, layer: int, qkv: Value, rope: Rope | None, norms: HeadNorms | None = None
    ) -> Value:
        """Normalise and rotate queries and keys, write keys and values to the KV pages, attend.

        Args:
            layer: Index of the layer, which selects its pages.
            qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys, values.
            rope: Rotary positions, if the model has them.
            norms: Norms of query and key heads, applied before the rotation.

        Returns:
            [tokens, num_heads * head_dim].
        """

    @abstractmethod
    def logits(self, head: Linear | Embedding, x: Value) -> Value:
        """Return x Wᵀ: [rows, vocab_size]."""
