"""A mixture of experts on a GPU: the kernels, then `GroupedExperts`, which computes a layer's."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_proc.gpu.kernels.matmul import dot
from worker_proc.gpu.kernels.rows import gate_up
from worker_proc.models.base import Model
from worker_proc.models.layers import Experts, Linear, route

# Products of a mixture of experts: rows that chose the same expert are multiplied together.
#
# The rows are sorted by expert and cut into blocks on the device, with shapes that depend on the
# number of tokens alone: nothing waits for the host, and a CUDA graph can contain all of it. A
# block has one size and each sum one order, so that a row's numbers do not depend on the others.

BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH = 32, 64, 64
BLOCK = 1024


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of one projection of every expert, where they are in memory.

    Attributes:
        addresses: `[num_experts]` int64, of contiguous weights `[outputs, inputs]`.
        bias_addresses: `[num_experts]` int64, of their biases `[outputs]`, or None.
        num_outputs: rows of a weight.
    """

    addresses: Tensor
    bias_addresses: Tensor | None
    num_outputs: int


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """Pairs of a token and an expert that it chose, sorted by expert, in blocks of one expert.

    Attributes:
        pairs: `[pairs]` int64: token * num_chosen + place among its chosen experts.
        experts: `[blocks]` int64: of each block; num_experts: the block is empty.
        first, last: `[blocks]` int64: its places in `pairs`, `last` excluded.
    """

    pairs: Tensor
    experts: Tensor
    first: Tensor
    last: Tensor


def expert_blocks(chosen: Tensor, num_experts: int) -> ExpertBlocks:
    """Sort the experts `[tokens, num_chosen]` that were chosen, and cut them into blocks."""
    experts, pairs = chosen.flatten().sort(stable=True)
    numbers = torch.arange(num_experts + 1, device=chosen.device)
    starts = torch.searchsorted(experts, numbers)
    ends = (starts.diff() + BLOCK_ROWS - 1).div(BLOCK_ROWS, rounding_mode="floor").cumsum(0)
    max_blocks = len(pairs) // BLOCK_ROWS + min(num_experts, len(pairs))
    block = torch.arange(max_blocks, device=chosen.device)
    expert = torch.searchsorted(ends, block, right=True)
    existing = expert.clamp(max=num_experts - 1)
    before = torch.where(existing > 0, ends[existing - 1], 0)
    first = starts[existing] + (block - before) * BLOCK_ROWS
    last = torch.minimum(first + BLOCK_ROWS, starts[existing + 1])
    return ExpertBlocks(pairs, expert, first, last)


@triton.jit(do_not_specialize_on_alignment=["pairs", "experts", "firsts", "lasts"])
def _multiply_experts(
    x, weights, biases, out, pairs, experts, firsts, lasts, columns, depth,
    CHOSEN: tl.constexpr, NUM_EXPERTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    SCATTERED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    expert = tl.load(experts + block)
    if expert < NUM_EXPERTS:
        place = tl.load(firsts + block) + tl.arange(0, BLOCK_ROWS)
        is_row = place < tl.load(lasts + block)
        pair = tl.load(pairs + place, mask=is_row, other=0)
        x_row, out_row = pair // CHOSEN, place
        if SCATTERED:
            x_row, out_row = place, pair
        kind = tl.pointer_type(x.dtype.element_ty)
        weight = tl.multiple_of(tl.load(weights + expert).to(kind), 16)
        column = (tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)).to(tl.int64)
        is_column = column < columns
        sums = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for start in range(0, depth, BLOCK_DEPTH):
            k = start + tl.arange(0, BLOCK_DEPTH)
            places = x_row[:, None] * depth + k[None, :]
            tile = tl.load(x + places, mask=is_row[:, None] & (k < depth)[None, :], other=0.0)
            places = column[None, :] * depth + k[:, None]
            wanted = is_column[None, :] & (k < depth)[:, None]
            sums += dot(tile, tl.load(weight + places, mask=wanted, other=0.0))
        if HAS_BIAS:
            bias = tl.load(biases + expert).to(kind)
            sums += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        places = out_row[:, None] * columns + column[None, :]
        wanted = is_row[:, None] & is_column[None, :]
        tl.store(out + places, sums.to(out.dtype.element_ty), mask=wanted)


def multiply_experts(
    x: Tensor, weights: ExpertWeights, blocks: ExpertBlocks, num_chosen: int, scattered: bool
) -> Tensor:
    """Multiply rows by the weights of their experts.

    Args:
        x: contiguous `[tokens, inputs]`, or, if `scattered`, `[pairs, inputs]` in sorted order.
        weights: the experts' weights, of x's dtype.
        blocks: the sorted pairs.
        num_chosen: experts of a token.
        scattered: the result is in the order of the tokens, not sorted by expert.

    Returns:
        `[pairs, outputs]` in x's dtype.
    """
    columns, pairs = weights.num_outputs, blocks.pairs
    out = x.new_empty(len(pairs), columns)
    biases = weights.bias_addresses
    _multiply_experts[(len(blocks.experts), triton.cdiv(columns, BLOCK_COLUMNS))](
        x, weights.addresses, weights.addresses if biases is None else biases, out, pairs,
        blocks.experts, blocks.first, blocks.last, columns, x.shape[1], CHOSEN=num_chosen,
        NUM_EXPERTS=len(weights.addresses), HAS_BIAS=biases is not None, SCATTERED=scattered,
        BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLUMNS=BLOCK_COLUMNS, BLOCK_DEPTH=BLOCK_DEPTH,
    )  # fmt: skip
    return out


@triton.jit
def _sum_experts(
    outputs, weights, out, WIDTH: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(CHOSEN):
        pair = row * CHOSEN + place
        output = tl.load(outputs + pair * WIDTH + column, mask=exists, other=0.0)
        total += output.to(tl.float32) * tl.load(weights + pair)
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=exists)


def sum_experts(outputs: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums of the outputs of each token's experts.

    Args:
        outputs: `[tokens * num_chosen, hidden]`.
        weights: contiguous `[tokens, num_chosen]` float32.

    Returns:
        `[tokens, hidden]` in the dtype of `outputs`.
    """
    (tokens, num_chosen), width = weights.shape, outputs.shape[1]
    out = outputs.new_empty(tokens, width)
    _sum_experts[(tokens, triton.cdiv(width, BLOCK))](
        outputs, weights, out, WIDTH=width, CHOSEN=num_chosen, BLOCK=BLOCK
    )
    return out


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """The experts of a layer, whose weights stay where they are.

    Attributes:
        experts: the layer.
        gate_up, down: the addresses of its weights.
    """

    experts: Experts
    gate_up: ExpertWeights
    down: ExpertWeights

    def output(self, x: Tensor, scores: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, without synchronising with the host.

        Args:
            x: `[tokens, hidden]`.
            scores: `[tokens, num_experts]` the outputs of the router.

        Returns:
            `[tokens, hidden]`.
        """
        weights, chosen = route(self.experts, scores)
        num_chosen = self.experts.num_chosen
        blocks = expert_blocks(chosen, scores.shape[1])
        inner = multiply_experts(x, self.gate_up, blocks, num_chosen, scattered=False)
        inner = gate_up(inner, self.experts.activation)
        outputs = multiply_experts(inner, self.down, blocks, num_chosen, scattered=True)
        return sum_experts(outputs, weights.contiguous())


def grouped_experts(model: Model) -> dict[Experts, GroupedExperts]:
    """Note where the weights of all experts of a model are."""
    return {
        module: GroupedExperts(
            module,
            _expert_weights(cast(Iterable[Linear], module.gate_up)),
            _expert_weights(cast(Iterable[Linear], module.down)),
        )
        for module in model.modules()
        if isinstance(module, Experts)
    }


def _expert_weights(projections: Iterable[Linear]) -> ExpertWeights:
    projections = list(projections)
    weights = [projection.weight for projection in projections]
    biases = [projection.bias for projection in projections if projection.bias is not None]
    for weight in weights:  # as the kernel reads it
        assert weight.is_contiguous()
        assert weight.data_ptr() % 16 == 0
    return ExpertWeights(
        _addresses(weights), _addresses(biases) if biases else None, len(weights[0])
    )


def _addresses(tensors: list[Tensor]) -> Tensor:
    addresses = [tensor.data_ptr() for tensor in tensors]
    return torch.tensor(addresses, dtype=torch.int64, device=tensors[0].device)
