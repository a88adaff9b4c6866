"""A product of few rows by a large weight, which is limited by reading the weight."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_proc.gpu.kernels.matmul import dot


class WeightTile(NamedTuple):
    """The part of a weight that a program reads at a time, and how it is compiled."""

    columns: int
    depth: int
    stages: int
    warps: int


# By the rows of a tile of `x`.
TILES: dict[int, tuple[WeightTile, ...]] = {
    16: (
        WeightTile(16, 256, 4, 4),
        WeightTile(16, 512, 3, 4),
        WeightTile(32, 128, 5, 4),
        WeightTile(32, 256, 4, 4),
        WeightTile(64, 128, 4, 4),
        WeightTile(16, 256, 6, 2),
    ),
    64: (
        WeightTile(32, 128, 4, 4),
        WeightTile(64, 64, 5, 4),
        WeightTile(64, 128, 4, 4),
        WeightTile(128, 64, 4, 8),
    ),
}


def rows_of_tile(rows: int) -> int:
    """Return the rows of a tile for `rows` rows, at most 64."""
    return 16 if rows <= 16 else 64


@triton.jit(do_not_specialize=["rows"])
def _multiply_few(
    x, weight, out, rows, columns, depth,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_row, is_column = (row < rows)[:, None], (column < columns)[None, :]
    sums = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, depth, BLOCK_DEPTH):
        k = start + tl.arange(0, BLOCK_DEPTH)
        inputs = tl.load(x + row[:, None] * depth + k[None, :], mask=is_row, other=0.0)
        places = column.to(tl.int64)[None, :] * depth + k[:, None]
        sums += dot(inputs, tl.load(weight + places, mask=is_column, other=0.0))
    tl.store(
        out + row[:, None] * columns + column[None, :],
        sums.to(out.dtype.element_ty),
        mask=is_row & is_column,
    )


def multiply_few(x: Tensor, weight: Tensor, tile: WeightTile) -> Tensor:
    """Return `x [rows, inputs]` times `weight [outputs, inputs]`, at most 64 rows.

    Both are contiguous; `inputs` is a multiple of the tile's depth.
    """
    (rows, depth), columns = x.shape, len(weight)
    out = torch.empty(rows, columns, device=x.device, dtype=x.dtype)
    _multiply_few[(triton.cdiv(columns, tile.columns),)](
        x, weight, out, rows, columns, depth,
        BLOCK_ROWS=rows_of_tile(rows), BLOCK_COLUMNS=tile.columns, BLOCK_DEPTH=tile.depth,
        num_stages=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out
