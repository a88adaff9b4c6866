"""What the architectures compute with: a small vocabulary, so that a model is written once.

`TorchOps` carries each out as it is called, in plain torch, on any device. The native kernels take
them down once as a list, and run the list at every step.
"""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from worker_proc.models.layers import Embedding, HeadNorms, LayerNorm, Linear, RMSNorm, Rope

Value = TypeVar("Value")
"""One row for each token: a tensor [tokens, width], or whatever stands for it."""


class Ops(ABC, Generic[Value]):
    """Operations on the tokens of one step."""

    @abstractmethod
    def embed(self, tokens: Embedding, positions: Embedding | None = None) -> Value:
        """The step's tokens as vectors, with their positions' vectors added where there are any:
        the residual stream."""

    @abstractmethod
    def norm(self, norm: LayerNorm | RMSNorm, x: Value) -> Value:
        """The residual stream, normalised."""

    @abstractmethod
    def linear(self, proj: Linear, x: Value) -> Value:
        """x Wᵀ + b."""

    @abstractmethod
    def linear_gelu(self, proj: Linear, x: Value) -> Value:
        """gelu(x Wᵀ + b), by the tanh approximation."""

    @abstractmethod
    def linear_swiglu(self, proj: Linear, x: Value) -> Value:
        """silu(gate) * up, of x Wᵀ + b = [gate, up] (Shazeer 2020,
        https://arxiv.org/abs/2002.05202)."""

    @abstractmethod
    def linear_add(self, residual: Value, proj: Linear, x: Value) -> Value:
        """residual + x Wᵀ + b; the residual given is not used again."""

    @abstractmethod
    def attend(
        self, layer: int, qkv: Value, rope: Rope | None, norms: HeadNorms | None = None
    ) -> Value:
        """Normalise and rotate queries and keys, write keys and values to the pages, attend.

        qkv: [tokens, (heads + 2 * kv_heads) * head_dim], queries, keys, values. Gives
        [tokens, heads * head_dim].
        """

    @abstractmethod
    def logits(self, head: Linear | Embedding, x: Value) -> Value:
        """x Wᵀ: [rows, vocab_size]."""
