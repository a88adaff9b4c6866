"""Page tables in the form of other libraries."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _gather_page_tables(
    pages, slots, positions, out, columns, pages_stride, spare_page, PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    used = tl.where(slot < 0, 0, tl.load(positions + row) // PAGE_SIZE + 1)
    page = tl.load(pages + slot * pages_stride + column, mask=column < used, other=spare_page)
    tl.store(out + row * columns + column, page.to(tl.int32), mask=column < columns)


def gather_page_tables(
    pages: Tensor, slots: Tensor, positions: Tensor, page_size: int, spare_page: int
) -> Tensor:
    """Return the page table of each row as far as it is used; the rest is the spare page.

    Args:
        pages: `[slots, pages]` int64.
        slots: `[rows]` int64; a row with slot -1 has only the spare page.
        positions: `[rows]` int64, of the last token that is read.
        page_size: Tokens of a page.
        spare_page: A page without tokens of a request.

    Returns:
        `[rows, pages]` int32.
    """
    rows, columns = len(slots), pages.shape[1]
    out = torch.empty(rows, columns, dtype=torch.int32, device=pages.device)
    _gather_page_tables[(rows, triton.cdiv(columns, BLOCK))](
        pages, slots, positions, out, columns, pages.stride(0), spare_page, PAGE_SIZE=page_size,
        BLOCK=BLOCK,
    )  # fmt: skip
    return out
