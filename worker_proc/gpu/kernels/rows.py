"""Kernels that treat each token's row by itself: embedding, norms, activations, token storage."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_proc.models.layers import Embedding, LayerNorm, RMSNorm

BLOCK = 1024


@triton.jit
def _embed(
    tokens, vectors, position_vectors, slots, positions, out, tokens_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    exists = column < tl.where(slot >= 0, WIDTH, 0)
    token = tl.load(tokens + tl.maximum(slot, 0) * tokens_stride + position).to(tl.int64)
    x = tl.load(vectors + token * WIDTH + column, mask=exists, other=0.0).to(tl.float32)
    if HAS_POSITIONS:
        x += tl.load(position_vectors + position * WIDTH + column, mask=exists, other=0.0)
    tl.store(out + row * WIDTH + column, x, mask=column < WIDTH)


def embed(
    known: Tensor, slots: Tensor, positions: Tensor, tokens: Embedding, places: Embedding | None
) -> Tensor:
    """Look up the vectors of tokens and, if there are `places`, add those of their positions.

    Args:
        known: `[slots, context + 1]` int32, the tokens of every slot.
        slots: `[tokens]` int64; a token with slot -1 is padding.
        positions: `[tokens]` int64.
        tokens: Vectors of tokens.
        places: Vectors of positions.

    Returns:
        `[tokens, hidden]` float32.
    """
    width = tokens.weight.shape[1]
    out = torch.empty(len(slots), width, device=slots.device)
    _embed[(len(slots), triton.cdiv(width, BLOCK))](
        known, tokens.weight, tokens.weight if places is None else places.weight, slots, positions,
        out, known.stride(0), WIDTH=width, BLOCK=BLOCK, HAS_POSITIONS=places is not None,
    )  # fmt: skip
    return out


@triton.jit
def _add_norm(
    residual, added, weight, bias, out, epsilon,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_ADDED: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < WIDTH
    place = row * WIDTH + column
    x = tl.load(residual + place, mask=exists, other=0.0)
    if HAS_ADDED:
        x += tl.load(added + place, mask=exists, other=0.0).to(tl.float32)
        tl.store(residual + place, x, mask=exists)
    if CENTRED:
        x = tl.where(exists, x - tl.sum(x, 0) / WIDTH, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    x = x * tl.load(weight + column, mask=exists, other=0.0).to(tl.float32)
    if CENTRED:
        x += tl.load(bias + column, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + place, x.to(out.dtype.element_ty), mask=exists)


def add_and_norm(residual: Tensor, added: Tensor | None, norm: LayerNorm | RMSNorm) -> Tensor:
    """Add to the residual stream in place, and normalise it.

    Args:
        residual: `[rows, hidden]` float32.
        added: `[rows, hidden]`, of any dtype.
        norm: The norm.

    Returns:
        The norm, in the dtype of its weight.
    """
    rows, width = residual.shape
    out = torch.empty(rows, width, dtype=norm.weight.dtype, device=residual.device)
    centred = isinstance(norm, LayerNorm)
    _add_norm[(rows,)](
        residual, residual if added is None else added, norm.weight,
        norm.bias if isinstance(norm, LayerNorm) else norm.weight, out, norm.epsilon,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), HAS_ADDED=added is not None,
        CENTRED=centred,
    )  # fmt: skip
    return out


@triton.jit
def _swiglu(x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < WIDTH
    gate = tl.load(x + row * 2 * WIDTH + column, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * WIDTH + WIDTH + column, mask=exists, other=0.0).to(tl.float32)
    gated = gate * tl.sigmoid(gate) * up
    tl.store(out + row * WIDTH + column, gated.to(out.dtype.element_ty), mask=exists)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up `[rows, inner]` of gate and up `[rows, 2 * inner]`."""
    rows, inner = len(x), x.shape[1] // 2
    out = x.new_empty(rows, inner)
    _swiglu[(rows, triton.cdiv(inner, BLOCK))](x, out, WIDTH=inner, BLOCK=BLOCK)
    return out


@triton.jit
def _gelu(x, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = place < count
    value = tl.load(x + place, mask=exists, other=0.0).to(tl.float32)
    inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
    value = value * tl.sigmoid(2 * inner)  # 1 + tanh(u) = 2 sigmoid(2 u)
    tl.store(x + place, value.to(x.dtype.element_ty), mask=exists)


def gelu_(x: Tensor) -> Tensor:
    """Apply gelu, by its tanh approximation, to a contiguous tensor in place."""
    _gelu[(triton.cdiv(x.numel(), BLOCK),)](x, x.numel(), BLOCK=BLOCK)
    return x


@triton.jit
def _store_tokens(known, token_ids, slots, positions, known_stride, count, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < count
    slot = tl.load(slots + row, mask=exists, other=-1)
    position = tl.load(positions + row, mask=exists, other=0)
    token = tl.load(token_ids + row, mask=exists, other=0)
    tl.store(known + slot * known_stride + position + 1, token.to(tl.int32), mask=slot >= 0)


def store_tokens(known: Tensor, token_ids: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Write token_ids[i] behind positions[i] of slots[i]; a row with slot -1 is padding."""
    count = len(slots)
    _store_tokens[(triton.cdiv(count, BLOCK),)](
        known, token_ids, slots, positions, known.stride(0), count, BLOCK=BLOCK
    )
