"""Kernels that treat each token's row by itself: embedding, norms and activations."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_proc.gpu.kernels.early import can_begin_early, let_next_begin
from worker_proc.models.layers import (
    CLAMPED_SWIGLU_LIMIT,
    CLAMPED_SWIGLU_SLOPE,
    Activation,
    Embedding,
    LayerNorm,
    RMSNorm,
)

BLOCK = 1024
MIN_WARPS, MAX_WARPS = 4, 16
COLUMNS_OF_WARP = 512  # 16 numbers a thread


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _embed(
    tokens, vectors, position_vectors, slots, positions, out, tokens_stride, scale, first_row,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    exists = column < tl.where(slot >= 0, WIDTH, 0)
    token = tl.load(tokens + tl.maximum(slot, 0) * tokens_stride + position).to(tl.int64)
    x = tl.load(vectors + token * WIDTH + column, mask=exists, other=0.0).to(tl.float32) * scale
    if HAS_POSITIONS:
        place = (position + first_row) * WIDTH + column
        x += tl.load(position_vectors + place, mask=exists, other=0.0)
    tl.store(out + row * WIDTH + column, x, mask=column < WIDTH)


def embed(
    known: Tensor,
    slots: Tensor,
    positions: Tensor,
    tokens: Embedding,
    places: Embedding | None,
    scale: float = 1.0,
) -> Tensor:
    """Look up the vectors of tokens and, if there are `places`, add those of their positions.

    Args:
        known: `[slots, context + 1]` int32, the tokens of every slot.
        slots: `[tokens]` int64; a token with slot -1 is padding.
        positions: `[tokens]` int64.
        tokens: vectors of tokens.
        places: vectors of positions.
        scale: factor of the tokens' vectors.

    Returns:
        `[tokens, hidden]` float32.
    """
    width = tokens.weight.shape[1]
    out = torch.empty(len(slots), width, device=slots.device)
    _embed[(len(slots), triton.cdiv(width, BLOCK))](
        known, tokens.weight, tokens.weight if places is None else places.weight, slots, positions,
        out, known.stride(0), scale, 0 if places is None else places.first_row,
        WIDTH=width, BLOCK=BLOCK, HAS_POSITIONS=places is not None,
    )  # fmt: skip
    return out


@triton.jit
def _add_norm(
    residual, added, weight, bias, out, epsilon, offset, factor,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_ADDED: tl.constexpr, CENTRED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < WIDTH
    place = row * WIDTH + column
    x = tl.load(residual + place, mask=exists, other=0.0)
    if HAS_ADDED:
        x += tl.load(added + place, mask=exists, other=0.0).to(tl.float32) * factor
        tl.store(residual + place, x, mask=exists)
    if CENTRED:
        x = tl.where(exists, x - tl.sum(x, 0) / WIDTH, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    x = x * (tl.load(weight + column, mask=exists, other=0.0).to(tl.float32) + offset)
    if CENTRED:
        x += tl.load(bias + column, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + place, x.to(out.dtype.element_ty), mask=exists)


def num_warps_of(block: int) -> int:
    """Return the warps of a program for a row of `columns` columns: wide rows have more of them."""
    return min(MAX_WARPS, max(MIN_WARPS, block // COLUMNS_OF_WARP))


def add_and_norm(
    residual: Tensor, added: Tensor | None, norm: LayerNorm | RMSNorm, factor: float = 1.0
) -> Tensor:
    """Add to the residual stream in place, and normalize it.

    Args:
        residual: `[rows, hidden]` float32.
        added: `[rows, hidden]`, of any dtype.
        norm: the norm.
        factor: of what is added.

    Returns:
        The norm, in the dtype of its weight.
    """
    rows, width = residual.shape
    block = triton.next_power_of_2(width)
    out = torch.empty(rows, width, dtype=norm.weight.dtype, device=residual.device)
    centred = isinstance(norm, LayerNorm)
    _add_norm[(rows,)](
        residual, residual if added is None else added, norm.weight,
        norm.bias if isinstance(norm, LayerNorm) else norm.weight, out, norm.epsilon,
        norm.offset if isinstance(norm, RMSNorm) else 0.0, factor,
        WIDTH=width, BLOCK=block, HAS_ADDED=added is not None, CENTRED=centred,
        EARLY=can_begin_early(residual.device), num_warps=num_warps_of(block),
    )  # fmt: skip
    return out


@triton.jit
def _norm_add(
    residual, x, weight, epsilon, offset, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < WIDTH
    place = row * WIDTH + column
    value = tl.load(x + place, mask=exists, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + epsilon)
    gain = tl.load(weight + column, mask=exists, other=0.0).to(tl.float32) + offset
    total = tl.load(residual + place, mask=exists, other=0.0) + value * gain
    tl.store(residual + place, total, mask=exists)


def norm_and_add(residual: Tensor, norm: RMSNorm, x: Tensor) -> None:
    """Add norm(x) to the residual stream in place.

    Args:
        residual: `[rows, hidden]` float32.
        norm: the norm.
        x: `[rows, hidden]`, of any dtype.
    """
    rows, width = residual.shape
    block = triton.next_power_of_2(width)
    _norm_add[(rows,)](
        residual, x, norm.weight, norm.epsilon, norm.offset, WIDTH=width, BLOCK=block,
        num_warps=num_warps_of(block),
    )  # fmt: skip


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Apply an activation, by its value in `Activation`, to float32 numbers."""
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x * tl.sigmoid(2 * inner)  # 1 + tanh(u) = 2 sigmoid(2 u)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "relu")
        y = tl.maximum(x, 0.0)
    return y


@triton.jit
def gated(
    gate, up, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """Return activation(gate) * up of float32 numbers, or the function of gpt-oss."""
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        result = gate * tl.sigmoid(SLOPE * gate) * (up + 1)
    else:
        result = activated(gate, ACTIVATION) * up
    return result


@triton.jit
def _gate(
    x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < WIDTH
    gate = tl.load(x + row * 2 * WIDTH + column, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * WIDTH + WIDTH + column, mask=exists, other=0.0).to(tl.float32)
    result = gated(gate, up, ACTIVATION, SLOPE, LIMIT)
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=exists)


def gate_up(x: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up `[rows, inner]` of gate and up `[rows, 2 * inner]`."""
    rows, inner = len(x), x.shape[1] // 2
    out = x.new_empty(rows, inner)
    _gate[(rows, triton.cdiv(inner, BLOCK))](
        x, out, WIDTH=inner, BLOCK=BLOCK, ACTIVATION=activation.value,
        SLOPE=CLAMPED_SWIGLU_SLOPE, LIMIT=CLAMPED_SWIGLU_LIMIT,
    )  # fmt: skip
    return out


@triton.jit
def _activate(x, count, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = place < count
    value = tl.load(x + place, mask=exists, other=0.0).to(tl.float32)
    value = activated(value, ACTIVATION)
    tl.store(x + place, value.to(x.dtype.element_ty), mask=exists)


def activate_(x: Tensor, activation: Activation) -> Tensor:
    """Apply an activation without a gate to a contiguous tensor in place."""
    _activate[(triton.cdiv(x.numel(), BLOCK),)](
        x, x.numel(), BLOCK=BLOCK, ACTIVATION=activation.value
    )
    return x
