"""Weights of the layers that the architectures share. `Ops` defines what is computed with them."""

import enum

import torch
from torch import Tensor, nn

from worker_proc.loading.gguf_blocks import PackedRows
from worker_proc.loading.quantised.coded_rows import CodedRows


def parameter(*size: int) -> nn.Parameter:
    """Allocate a weight that is loaded and never trained."""
    return nn.Parameter(torch.empty(*size), requires_grad=False)


class Parallel(enum.Enum):
    """How tensor parallelism splits a linear layer (Megatron-LM's terms).

    COLUMN: each rank has some of the outputs (rows of the weight). ROW: each rank has some of the
    inputs (columns of the weight), and the outputs are summed over the ranks.
    """

    NONE = enum.auto()
    COLUMN = enum.auto()
    ROW = enum.auto()


class Linear(nn.Module):
    """A linear layer, or the part of it that this rank has.

    Attributes:
        weight: [outputs, inputs].
        bias: [outputs], or None.
        blocks: Rows as a GGUF has them, if they stay packed; `weight` is then not filled.
        coded: Likewise, of a quantised checkpoint.
        fused: Number of matrices of equal height that the checkpoint keeps as one; each is split.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = False,
        parallel: Parallel = Parallel.NONE,
        fused: int = 1,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.fused = fused
        self.weight: Tensor = parameter(outputs, inputs)
        self.blocks: tuple[PackedRows, ...] = ()
        self.coded: tuple[CodedRows, ...] = ()
        self.bias: Tensor | None = parameter(outputs) if bias else None


class Embedding(nn.Module):
    """A table of vectors: weight [entries, hidden_size]; blocks and coded as in `Linear`."""

    def __init__(self, entries: int, hidden_size: int) -> None:
        super().__init__()
        self.weight: Tensor = parameter(entries, hidden_size)
        self.blocks: tuple[PackedRows, ...] = ()
        self.coded: tuple[CodedRows, ...] = ()


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias over the last dimension."""

    def __init__(self, hidden_size: int, epsilon: float) -> None:
        super().__init__()
        self.weight: Tensor = parameter(hidden_size)
        self.bias: Tensor = parameter(hidden_size)
        self.epsilon = epsilon


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + epsilon) * weight over the last dimension.

    Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """

    def __init__(self, hidden_size: int, epsilon: float) -> None:
        super().__init__()
        self.weight: Tensor = parameter(hidden_size)
        self.epsilon = epsilon


class HeadNorms(nn.Module):
    """Norms of each query head and each key head: weights [head_dim], the same epsilon."""

    def __init__(self, head_dim: int, epsilon: float) -> None:
        super().__init__()
        self.queries, self.keys = RMSNorm(head_dim, epsilon), RMSNorm(head_dim, epsilon)


class Rope:
    """Rotary positions: pair (i, i + head_dim / 2) of a head turns by position * frequencies[i].

    Su et al. 2021, https://arxiv.org/abs/2104.09864.

    Attributes:
        cosines, sines: [context_length, head_dim / 2] float32, times the attention factor.
    """

    def __init__(
        self,
        frequencies: Tensor,
        context_length: int,
        device: torch.device,
        attention_factor: float = 1.0,
    ) -> None:
        angles = torch.outer(torch.arange(context_length).float(), frequencies)
        self.cosines = (angles.cos() * attention_factor).to(device)
        self.sines = (angles.sin() * attention_factor).to(device)
