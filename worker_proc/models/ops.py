"""The operations that model files are written in, so that each architecture is written once.

`TorchOps` and `TritonOps` execute an operation when it is called. The CPU engine's `Recorder`
records them once as a list, and the native kernels run that list in every step.
"""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor

from worker_proc.models.layers import (
    Activation,
    Attention,
    Embedding,
    Experts,
    LayerNorm,
    Linear,
    RMSNorm,
)

# One row for each token: a tensor [tokens, width], or what stands for it in an implementation.
Value = TypeVar("Value")


class Ops(ABC, Generic[Value]):
    """Operations on the tokens of one step.

    An implementation may change the residual stream in place: the values that `embed`,
    `linear_add`, `norm_add`, `norm_residual` and `experts_add` return are the residual stream, and
    a model uses only the latest one. Of the results of the other operations it uses only the latest
    of each.
    """

    @abstractmethod
    def embed(
        self,
        tokens: Embedding,
        positions: Embedding | None = None,
        scale: float = 1.0,
        second_type: Tensor | None = None,
    ) -> Value:
        """Return the residual stream [tokens, hidden_size]: the scaled embeddings of the tokens.

        If `positions` is given, the embeddings of the tokens' positions are added. `second_type`
        [hidden_size] float32 is added to the tokens of a pair's second text.
        """

    @abstractmethod
    def norm(self, norm: LayerNorm | RMSNorm, x: Value) -> Value:
        """Normalize the residual stream `x` into a new value."""

    @abstractmethod
    def norm_residual(self, norm: LayerNorm | RMSNorm, residual: Value) -> Value:
        """Return the normalized residual stream, which takes the place of `residual`."""

    @abstractmethod
    def norm_add(self, residual: Value, norm: RMSNorm, x: Value) -> Value:
        """Return residual + norm(x), where `x` is a result of `linear`.

        The `residual` passed in is invalid afterwards.
        """

    @abstractmethod
    def linear(self, proj: Linear, x: Value) -> Value:
        """Return x Wᵀ + b; if `proj` is split by rows, its sum over the ranks."""

    @abstractmethod
    def linear_activation(self, proj: Linear, x: Value, activation: Activation) -> Value:
        """Return activation(x Wᵀ + b)."""

    @abstractmethod
    def linear_gated(self, proj: Linear, x: Value, activation: Activation) -> Value:
        """Return activation(gate) * up, where [gate, up] = x Wᵀ + b.

        Shazeer 2020, https://arxiv.org/abs/2002.05202. CLAMPED_SWIGLU is the function of gpt-oss:
        gate * sigmoid(1.702 gate) * (up + 1), with gate at most 7 and up between -7 and 7.
        """

    @abstractmethod
    def linear_add(self, residual: Value, proj: Linear, x: Value, scale: float = 1.0) -> Value:
        """Return residual + scale * (x Wᵀ + b); the `residual` passed in is invalid afterwards.

        If `proj` is split by rows, x Wᵀ + b is summed over the ranks.
        """

    @abstractmethod
    def experts_add(self, residual: Value, experts: Experts, x: Value, scale: float = 1.0) -> Value:
        """Return residual + scale * the weighted sum of the outputs of each token's experts.

        The `residual` passed in is invalid afterwards.
        """

    @abstractmethod
    def attend(self, layer: int, qkv: Value, attention: Attention) -> Value:
        """Normalize and rotate queries and keys, write keys and values to the KV pages, attend.

        Args:
            layer: index of the layer, which selects its pages.
            qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys, values.
            attention: what the layer does with them.

        Returns:
            [tokens, num_heads * head_dim].
        """

    @abstractmethod
    def logits(
        self,
        head: Linear | Embedding,
        x: Value,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> Value:
        """Return scale * x Wᵀ: [rows, vocab_size].

        With a `softcap`, each logit becomes `softcap * tanh(logit / softcap)`.
        """
