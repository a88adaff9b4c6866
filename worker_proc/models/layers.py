"""The weights of the layers that the architectures share; how they are multiplied is elsewhere."""

import enum

import torch
from torch import Tensor, nn

from worker_proc.loading.gguf_blocks import PackedRows


def parameter(*size: int) -> nn.Parameter:
    """Storage for a weight that is loaded, never trained."""
    return nn.Parameter(torch.empty(*size), requires_grad=False)


class Parallel(enum.Enum):
    """What of a layer a rank of a model has that is spread over several.

    OUTPUTS: some rows of its weight, and so a part of what comes out. INPUTS: some columns, for a
    part of what goes in; what comes out is to be added up over the ranks.
    """

    NOTHING = enum.auto()
    OUTPUTS = enum.auto()
    INPUTS = enum.auto()


class Linear(nn.Module):
    """weight [outputs, inputs], bias [outputs], of this rank. blocks: the rows as a GGUF has them,
    where they are kept packed; the weight is then not filled. fused: so many matrices of equal
    height are one in the checkpoint, and each of them is split."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = False,
        split: Parallel = Parallel.NOTHING,
        fused: int = 1,
    ) -> None:
        super().__init__()
        self.split = split
        self.fused = fused
        self.weight: Tensor = parameter(outputs, inputs)
        self.blocks: tuple[PackedRows, ...] = ()
        self.bias: Tensor | None = parameter(outputs) if bias else None


class Embedding(nn.Module):
    """weight [entries, hidden]. blocks: as a Linear's."""

    def __init__(self, entries: int, hidden: int) -> None:
        super().__init__()
        self.weight: Tensor = parameter(entries, hidden)
        self.blocks: tuple[PackedRows, ...] = ()


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias over the last dimension."""

    def __init__(self, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.weight: Tensor = parameter(hidden)
        self.bias: Tensor = parameter(hidden)
        self.epsilon = epsilon


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + epsilon) * weight over the last dimension
    (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

    def __init__(self, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.weight: Tensor = parameter(hidden)
        self.epsilon = epsilon


class HeadNorms(nn.Module):
    """Of each head of the queries, and of the keys, before they are turned by their positions:
    weights [head_dim], with one epsilon."""

    def __init__(self, queries: RMSNorm, keys: RMSNorm) -> None:
        super().__init__()
        self.queries, self.keys = queries, keys


class Rope:
    """Rotary positions (Su et al. 2021, https://arxiv.org/abs/2104.09864): pair
    (i, i + head_dim / 2) of a head turns by the angle position * frequencies[i].

    cosines, sines: [context, head_dim / 2] float32.
    """

    def __init__(self, frequencies: Tensor, context_length: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(context_length).float(), frequencies)
        self.cosines, self.sines = angles.cos().to(device), angles.sin().to(device)
