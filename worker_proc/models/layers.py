"""The layers that the architectures share. Every projection goes through `Linear`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKED_FOR_ROWS = 32
"""oneDNN asks for a number of rows to lay weights out for; its choice is the same for 1 to 256."""


def parameter(*size: int) -> nn.Parameter:
    """Storage for a weight that is loaded, never trained."""
    return nn.Parameter(torch.empty(*size), requires_grad=False)


class Linear(nn.Module):
    """activation(x Wᵀ + b): x [tokens, inputs], weight [outputs, inputs], bias [outputs].

    After loading, `pack` lays a bfloat16 weight on a CPU out as oneDNN wants it, which is nearly
    twice as fast at few rows: the multiplication then reads memory as fast as it comes.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False, gelu: bool = False) -> None:
        """gelu: apply the tanh approximation of GELU to the result."""
        super().__init__()
        self.weight: Tensor = parameter(outputs, inputs)
        self.bias: Tensor | None = parameter(outputs) if bias else None
        self._gelu = gelu
        self._packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            fused = "gelu" if self._gelu else "none"
            return torch.ops.mkldnn._linear_pointwise(
                x, self._packed, self.bias, fused, [], "tanh" if self._gelu else ""
            )
        x = F.linear(x, self.weight, self.bias)
        return F.gelu(x, approximate="tanh") if self._gelu else x

    def pack(self) -> None:
        """Replace the weight by its packed form where that exists."""
        if can_pack(self.weight):
            self._packed = packed(self.weight)
            del self.weight


class TiedHead(nn.Module):
    """Logits from the embedding's own weight: hidden [rows, inputs] to [rows, vocab_size].

    Where packing pays, the head keeps a packed copy beside the embedding: it is the largest
    multiplication of a decode step.
    """

    def __init__(self, embedding: "Embedding") -> None:
        super().__init__()
        self._embedding = [embedding]  # in a list, so that it stays a module of its owner alone
        self._packed: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(hidden, self._packed, None, "none", [], "")
        return F.linear(hidden, self._embedding[0].weight)

    def pack(self) -> None:
        weight = self._embedding[0].weight
        if can_pack(weight):
            self._packed = packed(weight)


class Embedding(nn.Module):
    """weight [entries, hidden]; indexes [tokens] to [tokens, hidden]."""

    def __init__(self, entries: int, hidden: int) -> None:
        super().__init__()
        self.weight: Tensor = parameter(entries, hidden)

    def forward(self, indexes: Tensor) -> Tensor:
        return F.embedding(indexes, self.weight)


class LayerNorm(nn.Module):
    """Over the last dimension."""

    def __init__(self, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.weight: Tensor = parameter(hidden)
        self.bias: Tensor = parameter(hidden)
        self._epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self._epsilon)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + epsilon) * weight over the last dimension, inside in float32
    (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

    def __init__(self, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.weight: Tensor = parameter(hidden)
        self._epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self._epsilon)


def pack_all(model: nn.Module) -> None:
    """Pack every projection of a loaded model."""
    for module in model.modules():
        if isinstance(module, Linear | TiedHead):
            module.pack()


def can_pack(weight: Tensor) -> bool:
    """oneDNN's own layout exists for bfloat16 on CPUs that multiply it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR_ROWS)
