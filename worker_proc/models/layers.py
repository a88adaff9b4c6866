"""The layers of models: their weights, and functions of them in torch.

`Ops` (ops.py) defines what is computed with the layers.
"""

import enum
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker_proc.models.position_bias import PositionBias
from worker_proc.models.quantized_weights import CodedRows, PackedRows


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


class Activation(enum.Enum):
    """A function of an MLP, by the names of `DecoderConfig`."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU = "gelu"
    RELU = "relu"
    CLAMPED_SWIGLU = "clamped_swiglu"


class Linear(nn.Module):
    """A linear layer, or the part of it that this rank has.

    Attributes:
        weight: [outputs, inputs].
        bias: [outputs], or None.
        blocks: rows as a GGUF has them, if they stay packed; `weight` is then not filled.
        coded: likewise, of a quantized checkpoint.
        importance: [inputs] how much an error of an input's weights matters in 4 bits; None: the
            same for all inputs.
        product: returns x Wᵀ + b of rows x, on a GPU that keeps the weight in fewer bits; `weight`
            then has no storage.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = False,
        parallel: Parallel = Parallel.NONE,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight: Tensor = parameter(outputs, inputs)
        self.blocks: tuple[PackedRows, ...] = ()
        self.coded: tuple[CodedRows, ...] = ()
        self.importance: Tensor | None = None
        self.product: Callable[[Tensor], Tensor] | None = None
        self.bias: Tensor | None = parameter(outputs) if bias else None


class ClassifierHead(nn.Module):
    """Scores of a text: a layer with an activation over a hidden state, then a projection.

    It is no `Linear`, so that its few weights keep their precision where others are quantized.

    Attributes:
        dense_weight, dense_bias: [hidden_size, hidden_size], [hidden_size]; None: no bias.
        norm: of what the activation returns, or None.
        out_weight, out_bias: [labels, hidden_size], [labels].
        activation: of the layer, "tanh", "relu" or "gelu".
        reads_all: it reads the mean of all hidden states, instead of the first one.
    """

    def __init__(
        self,
        hidden_size: int,
        num_labels: int,
        activation: str,
        dense_bias: bool = True,
        norm: "LayerNorm | None" = None,
        reads_all: bool = False,
    ) -> None:
        super().__init__()
        self.dense_weight = parameter(hidden_size, hidden_size)
        self.dense_bias: Tensor | None = parameter(hidden_size) if dense_bias else None
        self.norm = norm
        self.out_weight = parameter(num_labels, hidden_size)
        self.out_bias = parameter(num_labels)
        self.activation = activation
        self.reads_all = reads_all


class Embedding(nn.Module):
    """A table of vectors: weight [entries, hidden_size]; the rest as in `Linear`.

    Attributes:
        first_row: the row of token or position 0.
    """

    def __init__(self, entries: int, hidden_size: int, first_row: int = 0) -> None:
        super().__init__()
        self.first_row = first_row
        self.weight: Tensor = parameter(entries, hidden_size)
        self.blocks: tuple[PackedRows, ...] = ()
        self.coded: tuple[CodedRows, ...] = ()
        self.importance: Tensor | None = None


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias over the last dimension.

    Attributes:
        has_bias: the checkpoint has biases; else they are zeros, which `finish_loading` writes.
    """

    def __init__(self, hidden_size: int, epsilon: float, has_bias: bool = True) -> None:
        super().__init__()
        self.weight: Tensor = parameter(hidden_size)
        self.bias: Tensor = parameter(hidden_size)
        self.epsilon = epsilon
        self.has_bias = has_bias


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + epsilon) * (weight + offset) over the last dimension.

    Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.

    Attributes:
        offset: 1 for checkpoints that store a norm's weight minus 1, such as Gemma's.
    """

    def __init__(self, hidden_size: int, epsilon: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight: Tensor = parameter(hidden_size)
        self.epsilon = epsilon
        self.offset = offset

    @property
    def gain(self) -> Tensor:
        """The factors [width]: `weight`, or in float32 `weight + offset`."""
        return self.weight.float() + self.offset if self.offset else self.weight


class QKNorms(nn.Module):
    """Norms of queries and keys, with the same epsilon.

    Each head is normalized by itself (weights [head_dim]), or all heads of a token together
    (weights [num_heads * head_dim] and [num_kv_heads * head_dim]).
    """

    def __init__(
        self, queries: int, keys: int, epsilon: float, offset: float = 0.0, whole: bool = False
    ) -> None:
        """Allocate norms of this many channels; `whole`: all heads are normalized together."""
        super().__init__()
        self.queries = RMSNorm(queries, epsilon, offset)
        self.keys = RMSNorm(keys, epsilon, offset)
        self.whole = whole


class Rope:
    """Rotary positions: pair (i, i + n) of a head turns by position * frequencies[i].

    n is the number of frequencies. Channels of a head after the first 2 n are not rotated.
    Su et al. 2021, https://arxiv.org/abs/2104.09864.

    Attributes:
        cosines, sines: [context_length, n] float32, times the attention factor.
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


class Attention(nn.Module):
    """How a layer attends.

    Attributes:
        scale: factor of the scores.
        norms: norms of queries and keys before they are rotated, or None.
        softcap: scores become `softcap * tanh(score / softcap)`, unless None.
        window: a token sees itself and the `window - 1` tokens before it, and of a model that is
            bidirectional those after it, too; None: all.
        sinks: [num_heads] scores that take part in each head's softmax without a value, or None.
        rope: rotary positions, which a model sets in `finish_loading`; None: nothing is rotated.
        position_bias: likewise, biases of the scores by distance; only of bidirectional models.
    """

    def __init__(
        self,
        scale: float,
        norms: QKNorms | None = None,
        softcap: float | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.norms = norms
        self.softcap = softcap
        self.window = window
        self.sinks: Tensor | None = sinks
        self.rope: Rope | None = None
        self.position_bias: PositionBias | None = None


class ExpertProduct(Protocol):
    """The product with one projection of all experts of a layer, in fewer bits.

    Attributes:
        orders: [num_experts, inputs] int32, the input that each column of an expert's rows is
            multiplied by; None: in order.
    """

    @property
    def orders(self) -> Tensor | None: ...

    def __call__(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Multiply rows [rows, inputs] to [rows, outputs].

        Args:
            rows: sorted by expert, their columns in the order of `orders`.
            starts: [num_experts + 1] int32, the first row of each expert; the last one: all rows.
        """
        ...


class Experts(nn.Module):
    """A mixture of experts: each token's router chooses the experts whose outputs are added.

    Shazeer et al. 2017, https://arxiv.org/abs/1701.06538.

    Attributes:
        router: [num_experts, hidden_size], whose outputs score the experts.
        gate_up: of each expert, [2 * intermediate_size, hidden_size]: gate rows, then up rows.
        down: of each expert, [hidden_size, intermediate_size].
        num_chosen: experts of a token.
        renormalize: the weights of the chosen experts add up to 1; else they are their part of
            the softmax over all experts.
        activation: of the gate.
        products: with `gate_up` and `down`, on a GPU that keeps their weights in fewer bits; their
            layers then have no storage.
        inner_orders: of each expert: which input of `down` each input of the second product is, and
            likewise gate and up of the first one. None: they are in order.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_chosen: int,
        renormalize: bool = True,
        activation: Activation = Activation.SILU,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.router = Linear(hidden_size, num_experts, bias)
        self.gate_up = nn.ModuleList(
            Linear(hidden_size, 2 * intermediate_size, bias, Parallel.COLUMN)
            for _ in range(num_experts)
        )
        self.down = nn.ModuleList(
            Linear(intermediate_size, hidden_size, bias, Parallel.ROW) for _ in range(num_experts)
        )
        self.num_chosen = num_chosen
        self.renormalize = renormalize
        self.activation = activation
        self.products: tuple[ExpertProduct, ExpertProduct] | None = None
        self.inner_orders: tuple[Tensor | None, ...] = (None,) * num_experts


# gpt-oss: https://arxiv.org/abs/2508.10925
CLAMPED_SWIGLU_SLOPE = 1.702
CLAMPED_SWIGLU_LIMIT = 7.0


def activate(activation: Activation, x: Tensor) -> Tensor:
    """Apply an activation, except CLAMPED_SWIGLU, which needs a gate."""
    if activation is Activation.SILU:
        return F.silu(x)
    if activation is Activation.RELU:
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation is Activation.GELU_TANH else "none")


def gate_up(activation: Activation, x: Tensor) -> Tensor:
    """Return activation(gate) * up `[rows, inner]` of [gate, up] `[rows, 2 * inner]`."""
    gate, up = x.chunk(2, -1)
    if activation is not Activation.CLAMPED_SWIGLU:
        return activate(activation, gate) * up
    gate = gate.clamp(max=CLAMPED_SWIGLU_LIMIT)
    up = up.clamp(-CLAMPED_SWIGLU_LIMIT, CLAMPED_SWIGLU_LIMIT)
    return gate * torch.sigmoid(CLAMPED_SWIGLU_SLOPE * gate) * (up + 1)


def gate_up_rows(order: Tensor) -> Tensor:
    """Return the rows `[2 * inner]` of [gate, up] whose results are in an order `[inner]`."""
    return torch.cat((order, order + len(order)))


def cap(x: Tensor, softcap: float | None) -> Tensor:
    """Return softcap * tanh(x / softcap); None: `x`."""
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def route(experts: Experts, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token: of equal scores, the first one is better.

    Args:
        experts: the experts.
        scores: `[tokens, num_experts]`.

    Returns:
        The weights of the chosen experts `[tokens, num_chosen]` in float32, and their numbers.
    """
    scores = scores.float()
    best, chosen = scores.sort(dim=-1, descending=True, stable=True)
    best, chosen = best[:, : experts.num_chosen], chosen[:, : experts.num_chosen]
    if experts.renormalize:
        return best.softmax(-1), chosen
    return scores.softmax(-1).gather(-1, chosen), chosen
