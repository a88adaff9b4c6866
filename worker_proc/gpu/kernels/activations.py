"""Kernels of the activations of an MLP, with and without a gate."""

import triton
import triton.language as tl
from torch import Tensor

from worker_proc.models.layers import Activation
from worker_proc.models.torch_functions import CLAMPED_SWIGLU_LIMIT, CLAMPED_SWIGLU_SLOPE

BLOCK = 1024


@triton.jit
def _function(x, ACTIVATION: tl.constexpr):
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
def _gate(
    x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < WIDTH
    gate = tl.load(x + row * 2 * WIDTH + column, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * WIDTH + WIDTH + column, mask=exists, other=0.0).to(tl.float32)
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        gated = gate * tl.sigmoid(SLOPE * gate) * (up + 1)
    else:
        gated = _function(gate, ACTIVATION) * up
    tl.store(out + row * WIDTH + column, gated.to(out.dtype.element_ty), mask=exists)


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
    value = _function(value, ACTIVATION)
    tl.store(x + place, value.to(x.dtype.element_ty), mask=exists)


def activate_(x: Tensor, activation: Activation) -> Tensor:
    """Apply an activation without a gate to a contiguous tensor in place."""
    _activate[(triton.cdiv(x.numel(), BLOCK),)](
        x, x.numel(), BLOCK=BLOCK, ACTIVATION=activation.value
    )
    return x
