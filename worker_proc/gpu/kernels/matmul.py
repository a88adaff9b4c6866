"""Products of tiles, and a matrix product whose rows do not depend on their number."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Products of tiles, on a GPU and in Triton's interpreter.

# The interpreter multiplies the bits of bfloat16 as integers. A GPU accumulates its products in
# float32, which is what widened factors give.
WIDEN = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b):
    """Multiply [rows, depth] by [depth, columns] in float32, without rounding float32 factors."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_add(a, b, c):
    """Add the product of [rows, depth] and [depth, columns] to [rows, columns] float32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, c, input_precision="ieee")


# A matrix product whose rows do not depend on their number (--enable-deterministic-inference).
#
# Tiles have one size, and each sum is added up by one program in one order. cuBLAS chooses both
# by the number of rows.


class MatmulTile(NamedTuple):
    """What one program computes at a time, and how it is compiled."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int


# Tensor cores of compute capability 9 take 64 rows at a time.
HALF_TILE = MatmulTile(64, 64, 64, stages=4, warps=4)
FLOAT_TILE = MatmulTile(32, 64, 32, stages=2, warps=4)


def tile_of(dtype: torch.dtype) -> MatmulTile:
    """Return the tile of a product, which depends on nothing but the dtype."""
    return FLOAT_TILE if dtype == torch.float32 else HALF_TILE


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x, weight, bias, out, rows, columns, depth, x_stride, weight_stride, out_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_row, is_column = (row < rows)[:, None], column < columns
    x_rows, weight_rows = row.to(tl.int64)[:, None] * x_stride, column.to(tl.int64) * weight_stride
    sums = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, depth, BLOCK_DEPTH):
        k = start + tl.arange(0, BLOCK_DEPTH)
        tile = tl.load(x + x_rows + k[None, :], mask=is_row & (k < depth)[None, :], other=0.0)
        places = weight_rows[None, :] + k[:, None]
        wanted = is_column[None, :] & (k < depth)[:, None]
        sums += dot(tile, tl.load(weight + places, mask=wanted, other=0.0))
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    places = row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=is_row & is_column[None, :])


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return x Wᵀ + b as torch's linear does, each row as if it were alone.

    Args:
        x: `[rows, depth]`.
        weight: `[columns, depth]`.
        bias: `[columns]`.
        out: where the result is written; None: to new memory.

    Returns:
        `[rows, columns]` in x's dtype.
    """
    rows, columns = len(x), len(weight)
    if out is None:
        out = x.new_empty(rows, columns)
    tile = tile_of(x.dtype)
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns))
    _multiply[grid](
        x, weight, weight if bias is None else bias, out, rows, columns, x.shape[1],
        x.stride(0), weight.stride(0), out.stride(0), BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=tile.columns, BLOCK_DEPTH=tile.depth, HAS_BIAS=bias is not None,
        num_stages=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out
