"""The product of few rows and a weight, with what comes before and after it in one kernel."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_proc.gpu.kernels.early import let_next_begin
from worker_proc.gpu.kernels.matmul import dot_add
from worker_proc.gpu.kernels.rows import activated, gated
from worker_proc.models.layers import (
    CLAMPED_SWIGLU_LIMIT,
    CLAMPED_SWIGLU_SLOPE,
    Activation,
    LayerNorm,
    RMSNorm,
)

# Such a product takes the time that reading its weight takes. So each multiprocessor must have some
# 40 KB on the way, which are copied ahead to shared memory: the compiler keeps no more than one or
# two loads to registers under way. One row is multiplied in registers, more by tensor cores.
#
# Where the outputs are too few for all multiprocessors, the inputs are split over several programs.
# The one that arrives last adds up their sums, always in the same order.


class FewRowsTile(NamedTuple):
    """What one program computes at a time, and how it is compiled.

    Attributes:
        rows: of x at most; 1, or a size of tensor core products.
        outputs, inputs: of the weight.
        stages: tiles that are on their way to shared memory, plus one.
        warps: of a program.
    """

    rows: int
    outputs: int
    inputs: int
    stages: int
    warps: int


MAX_ROWS = 64
TILES = (
    FewRowsTile(1, 4, 1024, stages=4, warps=4),
    FewRowsTile(1, 8, 512, stages=4, warps=4),
    FewRowsTile(1, 16, 512, stages=3, warps=8),
    FewRowsTile(16, 64, 128, stages=4, warps=4),
    FewRowsTile(16, 128, 64, stages=4, warps=4),
    FewRowsTile(MAX_ROWS, 128, 64, stages=4, warps=4),
)
LOADED = tl.constexpr(8)  # numbers of 16 bits in the widest load of a thread
LINE = tl.constexpr(64)  # numbers of 16 bits in a line of the cache
MAX_ARRIVALS = 4096  # counters of tiles whose inputs are split
MAX_SPLITS = 8


def tiles_of(rows: int, is_gated: bool) -> list[FewRowsTile]:
    """Return the tiles for a number of rows, none for more than MAX_ROWS.

    A tile of a gated product is of the gate and of up, which share the room in shared memory.
    """
    least = min((tile.rows for tile in TILES if tile.rows >= rows), default=0)
    fitting = [tile for tile in TILES if tile.rows == least]
    if not is_gated or least == 1:
        return fitting
    return [tile._replace(outputs=tile.outputs // 2) for tile in fitting]


@triton.jit
def _mean_and_scale(x, inputs, epsilon, BLOCK: tl.constexpr):
    """Return mean and 1 / deviation of a row."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, inputs, BLOCK):
        k = start + tl.arange(0, BLOCK)
        total += tl.load(x + k, mask=k < inputs, other=0.0)
    mean = tl.sum(total, 0) / inputs
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, inputs, BLOCK):
        k = start + tl.arange(0, BLOCK)
        centred = tl.load(x + k, mask=k < inputs, other=0.0) - mean
        squares += tl.where(k < inputs, centred * centred, 0.0)
    return mean, tl.rsqrt(tl.sum(squares, 0) / inputs + epsilon)


@triton.jit
def _load_weights(places, output, k, outputs, inputs):
    exists = (output < outputs)[:, None] & (k < inputs)[None, :]
    return tl.load(places + k[None, :], mask=exists, other=0.0, eviction_policy="evict_first")


@triton.jit
def _partly_summed(products):
    """Add up the columns `[rows, columns / LOADED]` that a thread has loaded at once."""
    rows: tl.constexpr = products.shape[0]
    columns: tl.constexpr = products.shape[1] // LOADED
    return tl.sum(tl.reshape(products, [rows, columns, LOADED]), 2)


@triton.jit
def _sum_of_parts(parts, place, splits, SIZE: tl.constexpr):
    """Add up what the programs of a tile have stored, in the order of their inputs."""
    total = tl.load(parts + place, cache_modifier=".cg")
    for split in range(1, splits):
        total += tl.load(parts + split * SIZE + place, cache_modifier=".cg")
    return total


@triton.jit
def _row_sums(
    x, places, up_places, gain, shift, output, inputs, outputs, begin, end, mean, scale, offset,
    BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Multiply one row in registers, and return sums `[outputs, 1]`, of up too, and of squares."""
    sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_INPUTS // LOADED], tl.float32)
    up_sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_INPUTS // LOADED], tl.float32)
    squares = tl.zeros([BLOCK_INPUTS], tl.float32)
    for start in tl.range(begin, end, BLOCK_INPUTS, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_INPUTS)
        w = _load_weights(places, output, k, outputs, inputs).to(tl.float32)
        if GATED:
            up = _load_weights(up_places, output, k, outputs, inputs).to(tl.float32)
        numbers = tl.load(x + k, mask=k < inputs, other=0.0).to(tl.float32)
        if NORM != "":
            gains = tl.load(gain + k, mask=k < inputs, other=0.0).to(tl.float32)
            if NORM == "layer":
                shifts = tl.load(shift + k, mask=k < inputs, other=0.0).to(tl.float32)
                numbers = (numbers - mean) * scale * gains + shifts
            else:  # the scale follows when all squares are known
                squares += numbers * numbers
                numbers *= gains + offset
        sums += _partly_summed(w * numbers[None, :])
        if GATED:
            up_sums += _partly_summed(up * numbers[None, :])
    return tl.sum(sums, 1)[:, None], tl.sum(up_sums, 1)[:, None], tl.sum(squares, 0)


@triton.jit
def _tile_sums(
    x, places, up_places, output, row, rows, inputs, outputs, begin, end,
    ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    STAGES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Multiply rows by tensor cores, and return sums `[outputs, rows]`, of up too."""
    sums = tl.zeros([BLOCK_OUTPUTS, ROWS], tl.float32)
    up_sums = tl.zeros([BLOCK_OUTPUTS, ROWS], tl.float32)
    for start in tl.range(begin, end, BLOCK_INPUTS, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_INPUTS)
        w = _load_weights(places, output, k, outputs, inputs)
        exists = (row < rows)[:, None] & (k < inputs)[None, :]
        block = tl.load(x + row[:, None] * inputs + k[None, :], mask=exists, other=0.0)
        sums = dot_add(w, tl.trans(block), sums)
        if GATED:
            up = _load_weights(up_places, output, k, outputs, inputs)
            up_sums = dot_add(up, tl.trans(block), up_sums)
    return sums, up_sums


@triton.jit
def _finished(
    sums, up_sums, bias, output, outputs, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Add the bias, and apply the activation or the gate."""
    if HAS_BIAS:
        biases = tl.load(bias + output, mask=output < outputs, other=0.0)
        sums += biases.to(tl.float32)[:, None]
        if GATED:
            biases = tl.load(bias + outputs + output, mask=output < outputs, other=0.0)
            up_sums += biases.to(tl.float32)[:, None]
    if GATED:
        sums = gated(sums, up_sums, ACTIVATION, SLOPE, LIMIT)
    elif ACTIVATION != "":
        sums = activated(sums, ACTIVATION)
    return sums


@triton.jit
def _prefetch(places):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places.to(tl.int64)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _wait_for_inputs(
    weight, output, begin, inputs, outputs, BLOCK_INPUTS: tl.constexpr, GATED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """If the kernel before may still run, prefetch the first weights and wait for its end."""
    if EARLY:
        line = begin + LINE * tl.arange(0, 2 * BLOCK_INPUTS // LINE)
        row = tl.minimum(output, outputs - 1).to(tl.int64)
        places = weight + row[:, None] * inputs + tl.minimum(line, inputs - 1)[None, :]
        _prefetch(places)
        if GATED:
            _prefetch(places + outputs.to(tl.int64) * inputs)
        tl.extra.cuda.gdc_wait()
        let_next_begin(EARLY)


@triton.jit(do_not_specialize=["rows", "splits"])
def _multiply_few(
    x, weight, bias, gain, shift, out, parts, arrived, rows, inputs, outputs, splits, epsilon,
    offset, factor,
    ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    STAGES: tl.constexpr, IS_SPLIT: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, ADDS: tl.constexpr, SLOPE: tl.constexpr,
    LIMIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    output, row = tile * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS), tl.arange(0, ROWS)
    places = weight + output.to(tl.int64)[:, None] * inputs
    up_places = places + outputs.to(tl.int64) * inputs
    part = tl.cdiv(tl.cdiv(inputs, splits), BLOCK_INPUTS) * BLOCK_INPUTS
    begin = split * part
    end = tl.minimum(inputs, begin + part)
    _wait_for_inputs(weight, output, begin, inputs, outputs, BLOCK_INPUTS, GATED, EARLY)
    if ROWS == 1:
        mean, scale = 0.0, 1.0
        if NORM == "layer":
            mean, scale = _mean_and_scale(x, inputs, epsilon, BLOCK_INPUTS)
        sums, up_sums, squares = _row_sums(
            x, places, up_places, gain, shift, output, inputs, outputs, begin, end, mean, scale,
            offset, BLOCK_OUTPUTS, BLOCK_INPUTS, STAGES, NORM, GATED,
        )  # fmt: skip
        if NORM == "rms":
            scale = tl.rsqrt(squares / inputs + epsilon)
            sums *= scale
            up_sums *= scale
    else:
        sums, up_sums = _tile_sums(
            x, places, up_places, output, row, rows, inputs, outputs, begin, end,
            ROWS, BLOCK_OUTPUTS, BLOCK_INPUTS, STAGES, GATED,
        )  # fmt: skip
    is_last = True
    if IS_SPLIT:
        SIZE: tl.constexpr = BLOCK_OUTPUTS * ROWS
        of_tile = parts + tile * splits * (2 * SIZE if GATED else SIZE)
        up_parts = of_tile + splits * SIZE
        place = tl.arange(0, BLOCK_OUTPUTS)[:, None] * ROWS + row[None, :]
        tl.store(of_tile + split * SIZE + place, sums)
        if GATED:
            tl.store(up_parts + split * SIZE + place, up_sums)
        tl.debug_barrier()  # all threads have stored before one of them says so
        is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
        if is_last:
            tl.store(arrived + tile, 0)  # for the next product
            sums = _sum_of_parts(of_tile, place, splits, SIZE)
            if GATED:
                up_sums = _sum_of_parts(up_parts, place, splits, SIZE)
    if is_last:
        sums = _finished(
            sums, up_sums, bias, output, outputs, HAS_BIAS, GATED, ACTIVATION, SLOPE, LIMIT
        )
        exists = (output < outputs)[:, None] & (row < rows)[None, :]
        at = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
        if ADDS:
            sums = tl.load(at, mask=exists, other=0.0) + sums * factor
        tl.store(at, sums.to(out.dtype.element_ty), mask=exists)


def new_arrivals(device: torch.device) -> Tensor:
    """Return counters, which every product leaves as it found them: zero."""
    return torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=device)


def multiply_few(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: FewRowsTile,
    num_programs: int,
    arrivals: Tensor,
    norm: LayerNorm | RMSNorm | None = None,
    activation: Activation | None = None,
    is_gated: bool = False,
    residual: Tensor | None = None,
    factor: float = 1.0,
    begins_early: bool = False,
) -> Tensor:
    """Return x Wᵀ + b of few rows, with what surrounds it. Equal shapes give equal bits.

    Args:
        x: `[rows, inputs]`, in the dtype of the weight; with a norm, float32.
        weight: `[outputs, inputs]`, contiguous.
        bias: `[outputs]`.
        tile: a tile for so many rows.
        num_programs: that run at the same time; fewer tiles than those have their inputs split.
        arrivals: of `new_arrivals`; products that share it must not run at the same time.
        norm: x is normalized first. Only for one row.
        activation: of the result.
        is_gated: the result is activation(gate) * up of gate and up `[rows, outputs / 2]`.
        residual: `[rows, outputs]` float32, to which the product times `factor` is added in place.
        factor: see `residual`.
        begins_early: the kernel begins while the one before it still runs, and prefetches weights
            until that has ended. Needs compute capability 9.0.

    Returns:
        `[rows, outputs]`, or half as many columns if gated, in the dtype of the weight; or
        `residual`.
    """
    rows, inputs = x.shape
    assert rows <= tile.rows
    assert norm is None or tile.rows == 1
    outputs = len(weight) // 2 if is_gated else len(weight)
    out = weight.new_empty(rows, outputs) if residual is None else residual
    num_tiles, splits = triton.cdiv(outputs, tile.outputs), 1
    if norm is None:
        most = min(MAX_SPLITS, triton.cdiv(inputs, tile.inputs))
        splits = max(1, min(most, num_programs // num_tiles))
    parts = out
    if splits > 1:
        assert num_tiles <= len(arrivals)
        size = num_tiles * splits * tile.outputs * tile.rows * (2 if is_gated else 1)
        parts = torch.empty(size, device=x.device)
    _multiply_few[(num_tiles, splits)](
        x.contiguous(), weight, weight if bias is None else bias,
        weight if norm is None else norm.weight,
        norm.bias if isinstance(norm, LayerNorm) else weight, out, parts, arrivals, rows, inputs,
        outputs, splits, 0.0 if norm is None else norm.epsilon,
        norm.offset if isinstance(norm, RMSNorm) else 0.0, factor,
        ROWS=tile.rows, BLOCK_OUTPUTS=tile.outputs, BLOCK_INPUTS=tile.inputs, STAGES=tile.stages,
        IS_SPLIT=splits > 1, NORM=kind_of_norm(norm), HAS_BIAS=bias is not None, GATED=is_gated,
        ACTIVATION="" if activation is None else activation.value, ADDS=residual is not None,
        SLOPE=CLAMPED_SWIGLU_SLOPE, LIMIT=CLAMPED_SWIGLU_LIMIT, EARLY=begins_early,
        num_warps=tile.warps, **({"launch_pdl": True} if begins_early else {}),
    )  # fmt: skip
    return out


def kind_of_norm(norm: LayerNorm | RMSNorm | None) -> str:
    """Return the norm as the kernel names it."""
    if norm is None:
        return ""
    return "layer" if isinstance(norm, LayerNorm) else "rms"
