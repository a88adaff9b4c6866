"""Adapters (LoRA) on a GPU: two thin products for the rows of each adapter.

A row gets t = D x first (`_shrink`), then y = gain ∘ (y + U t) + shift (`_expand`), each in one
launch for all rows and adapters of a step. Rows are sorted by their adapter and cut into blocks, so
that a program reads the matrices of one adapter. The grids depend on the number of rows alone, and
what an adapter changes is looked up in a table on the device, so that both can be in a CUDA graph,
and an adapter can take the place of another one between its replays.

Rows of a mixture of experts are pairs of a token and an expert, sorted by expert and then by
adapter; the device cuts them into blocks (`_cut_pairs`), which the same two kernels take.

Sums are added up in one order, whatever the number of rows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from worker_proc.gpu.kernels.matmul import dot_add
from worker_proc.models.layers import Embedding, Linear

# Columns of the table, of what an adapter changes in a matrix: addresses, 0 for what there is not,
# and the number of rows of D and of columns of U.
DOWN, UP, SPANS, GAIN, SHIFT, EMBEDDING, RANKS, WIDTH = (tl.constexpr(i) for i in range(8))
NUM_FIELDS = tl.constexpr(8)

BLOCK_ROWS = 16  # the least that tensor cores multiply
BLOCK_RANKS = 16
BLOCK_INPUTS = 128  # of D
UP_COLUMNS = 16  # of U at a time
SAVED_COLUMNS = 64  # of the differences of a saved matrix, which has no D
TILE_OUTPUTS = 64  # rows of U that are multiplied by the same range of t
EMBEDDING_COLUMNS = 256
NUM_SPLITS = 8  # of the inputs of D
RANK_PROGRAMS = 4  # for a block of rows and a split
STAGES = 3
MAX_SPLIT_ROWS = 256  # of a step whose shrinking products are split over more programs
CUT_PAIRS = 128  # of a program that cuts pairs into blocks
CUT_WARPS = 8  # so that what it compares fits into registers
BLOCK_FIELDS = tl.constexpr(4)


class RowGroups(NamedTuple):
    """The rows of a step that have adapters.

    Attributes:
        order: `[rows]` int64, the numbers of the rows, those of one adapter side by side.
        blocks: `[blocks, 4]` int64: the adapter's index, the expert that computes the rows, or 0,
            the first place in `order`, and the number of rows up to BLOCK_ROWS. A block of index -1
            is padding.
        adapters: `[rows]` int64, the index of each row's adapter, or -1.
    """

    order: Tensor
    blocks: Tensor
    adapters: Tensor


class PairGroups(NamedTuple):
    """The pairs of a token and an expert whose tokens have adapters.

    Attributes:
        pairs: `[pairs]` int32, token * num_chosen + place among its chosen experts, sorted by
            expert and then by adapter.
        blocks: as those of RowGroups.
        num_chosen: experts of a token.
    """

    pairs: Tensor
    blocks: Tensor
    num_chosen: int


@triton.jit(
    do_not_specialize=["num_pairs"],
    do_not_specialize_on_alignment=["pairs", "chosen", "adapters", "last_block"],
)
def _cut_pairs(
    pairs, chosen, adapters, blocks, last_block, num_pairs,
    CHOSEN: tl.constexpr, PAIRS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Store the blocks of a program's pairs, in any order, behind those of other programs."""
    number = tl.arange(0, PAIRS)
    place = tl.program_id(0) * PAIRS + number
    exists = place < num_pairs
    pair = tl.load(pairs + place, mask=exists, other=0)
    adapter = tl.load(adapters + pair // CHOSEN, mask=exists, other=-1).to(tl.int32)
    expert = tl.load(chosen + pair, mask=exists, other=0)
    is_alike = (adapter[:, None] == adapter[None, :]) & (expert[:, None] == expert[None, :])
    is_earlier = number[None, :] < number[:, None]
    count = tl.sum(is_alike.to(tl.int32), 1)
    earlier = tl.sum((is_alike & is_earlier).to(tl.int32), 1)
    begins = (adapter >= 0) & (earlier % BLOCK_ROWS == 0)
    found = begins.to(tl.int64)
    first = tl.atomic_add(last_block, tl.sum(found, 0)) + 1
    block = blocks + (first + tl.cumsum(found, 0) - found) * BLOCK_FIELDS
    fields = (adapter, expert, place, tl.minimum(count - earlier, BLOCK_ROWS))
    for i in tl.static_range(4):
        tl.store(block + i, fields[i].to(tl.int64), mask=begins)


def group_pairs(
    pairs: Tensor, chosen: Tensor, adapters: Tensor, num_experts: int, max_adapters: int
) -> PairGroups:
    """Cut pairs into blocks, without synchronising with the host.

    Args:
        pairs: see PairGroups.
        chosen: `[tokens, num_chosen]` int32, the experts of each token.
        adapters: `[tokens]` int64, the index of each token's adapter, or -1.
        num_experts: of the layer.
        max_adapters: that there can be.
    """
    num_pairs, num_chosen = len(pairs), chosen.shape[1]
    programs = triton.cdiv(num_pairs, CUT_PAIRS)
    num_cuts = num_experts * max_adapters + programs
    num_blocks = min(num_pairs, num_pairs // BLOCK_ROWS + num_cuts)
    size = num_blocks * BLOCK_FIELDS.value
    memory = torch.full((size + 1,), -1, dtype=torch.int64, device=pairs.device)
    blocks, last_block = memory[:size].view(num_blocks, -1), memory[size:]
    _cut_pairs[(programs,)](
        pairs, chosen, adapters, blocks, last_block, num_pairs, CHOSEN=num_chosen,
        PAIRS=CUT_PAIRS, BLOCK_ROWS=BLOCK_ROWS, num_warps=CUT_WARPS,
    )  # fmt: skip
    return PairGroups(pairs, blocks, num_chosen)


@triton.jit
def _entry(table, block, number, num_matrices):
    """Return where the fields of the change are that a block gets."""
    matrix = number + tl.load(block + 1)
    return table + (tl.load(block) * num_matrices + matrix) * NUM_FIELDS


@triton.jit
def _rows_of(block, order, BLOCK_ROWS: tl.constexpr):
    """Return places in the order, whether there is a row, and its number."""
    lane = tl.arange(0, BLOCK_ROWS)
    place, is_row = tl.load(block + 2) + lane, lane < tl.load(block + 3)
    return place, is_row, tl.load(order + place, mask=is_row, other=0).to(tl.int64)


@triton.jit
def _numbers(entry, like):
    """Return an address in the table as a pointer to numbers of the type of another pointer."""
    return tl.multiple_of(tl.load(entry).to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit(
    do_not_specialize=["number", "split_stride"],
    do_not_specialize_on_alignment=["order", "blocks"],
)
def _shrink(
    x, table, order, blocks, thin, number, num_matrices, inputs, x_stride, thin_stride,
    split_stride, CHOSEN: tl.constexpr, X_SORTED: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    block = blocks + tl.program_id(0) * BLOCK_FIELDS
    if tl.load(block) >= 0:
        entry = _entry(table, block, number, num_matrices)
        ranks, first_rank = tl.load(entry + RANKS), tl.program_id(1) * BLOCK_RANKS
        if first_rank < ranks:
            down = _numbers(entry + DOWN, x)
            place, is_row, row = _rows_of(block, order, BLOCK_ROWS)
            rows = x + (place if X_SORTED else row // CHOSEN)[:, None] * x_stride
            size = tl.cdiv(tl.cdiv(inputs, NUM_SPLITS), BLOCK_INPUTS) * BLOCK_INPUTS
            first = tl.program_id(2) * SPLITS
            for begin in range(first_rank, ranks, PROGRAMS * BLOCK_RANKS):
                rank = begin + tl.arange(0, BLOCK_RANKS)
                is_rank = rank < ranks
                total = tl.zeros([BLOCK_ROWS, BLOCK_RANKS], tl.float32)
                for split in range(first, first + SPLITS):
                    sums = tl.zeros([BLOCK_ROWS, BLOCK_RANKS], tl.float32)
                    for start in range(split * size, tl.minimum(inputs, (split + 1) * size),
                                       BLOCK_INPUTS):  # fmt: skip
                        k = start + tl.arange(0, BLOCK_INPUTS)
                        is_input = (k < inputs)[None, :]
                        exists = is_row[:, None] & is_input
                        tile = tl.load(rows + k[None, :], mask=exists, other=0.0)
                        places = down + rank[:, None] * inputs + k[None, :]
                        weights = tl.load(places, mask=is_rank[:, None] & is_input, other=0.0)
                        sums = dot_add(tile, tl.trans(weights), sums)
                    total += sums
                to = thin + tl.program_id(2) * split_stride + place[:, None] * thin_stride
                tl.store(to + rank[None, :], total, mask=is_row[:, None] & is_rank[None, :])


@triton.jit
def _up_of_thin(
    rows, up, is_row, count, split_stride, sums, COLUMNS: tl.constexpr, NUM_PARTS: tl.constexpr
):  # fmt: skip
    """Add U t to sums, where t is the sum of what the splits of its inputs have stored."""
    for start in range(0, count, COLUMNS):
        k = start + tl.arange(0, COLUMNS)
        exists = (k < count)[None, :]
        t = tl.zeros([rows.shape[0], COLUMNS], tl.float32)
        for part in range(NUM_PARTS):
            places = rows + part * split_stride + k[None, :]
            t += tl.load(places, mask=is_row & exists, other=0.0)
        weights = tl.load(up + k[None, :], mask=exists, other=0.0)
        sums = dot_add(t.to(weights.dtype), tl.trans(weights), sums)
    return sums


@triton.jit
def _up_of_inputs(rows, up, is_row, count, sums, COLUMNS: tl.constexpr):
    """Add the product of the inputs and the differences of a saved matrix to sums."""
    for start in range(0, count, COLUMNS):
        k = start + tl.arange(0, COLUMNS)
        exists = (k < count)[None, :]
        x = tl.load(rows + k[None, :], mask=is_row & exists, other=0.0)
        weights = tl.load(up + k[None, :], mask=exists, other=0.0)
        sums = dot_add(x, tl.trans(weights), sums)
    return sums


@triton.jit(
    do_not_specialize=["number", "split_stride"],
    do_not_specialize_on_alignment=["order", "blocks"],
)
def _expand(
    x, y, bias, table, order, blocks, thin, number, num_matrices, outputs, x_stride, y_stride,
    thin_stride, split_stride, CHOSEN: tl.constexpr, X_SORTED: tl.constexpr,
    Y_SORTED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr, SAVED_COLUMNS: tl.constexpr, NUM_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    block = blocks + tl.program_id(0) * BLOCK_FIELDS
    if tl.load(block) >= 0:
        entry = _entry(table, block, number, num_matrices)
        has_up, has_down = tl.load(entry + UP) != 0, tl.load(entry + DOWN) != 0
        has_gain, has_shift = tl.load(entry + GAIN) != 0, tl.load(entry + SHIFT) != 0
        if has_up | has_gain | has_shift:
            place, is_place, row = _rows_of(block, order, BLOCK_ROWS)
            is_row = is_place[:, None]
            tile = tl.program_id(1)
            lanes = tl.arange(0, BLOCK_OUTPUTS)
            output = tile * BLOCK_OUTPUTS + lanes
            sums = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32)
            if has_up:
                span = tl.load(entry + SPANS).to(tl.pointer_type(tl.int64)) + tile * 3
                first, count = tl.load(span), tl.load(span + 1)
                width = tl.multiple_of(tl.load(entry + WIDTH), 16)
                up_rows = tl.load(span + 2) * BLOCK_OUTPUTS + lanes
                up = _numbers(entry + UP, x) + up_rows[:, None] * width
                if has_down:
                    rows = thin + place[:, None] * thin_stride + first
                    sums = _up_of_thin(
                        rows, up, is_row, count, split_stride, sums, COLUMNS, NUM_PARTS
                    )
                else:
                    rows_of_x = x + (place if X_SORTED else row // CHOSEN)[:, None] * x_stride
                    sums = _up_of_inputs(rows_of_x, up, is_row, count, sums, SAVED_COLUMNS)
            exists = is_row & (output < outputs)[None, :]
            at = y + (place if Y_SORTED else row)[:, None] * y_stride + output[None, :]
            value = tl.load(at, mask=exists, other=0.0).to(tl.float32)
            if has_gain:
                gain = tl.load(entry + GAIN).to(tl.pointer_type(tl.float32))
                gains = tl.load(gain + output, mask=output < outputs, other=0.0)[None, :]
                if HAS_BIAS:
                    biases = tl.load(bias + output, mask=output < outputs, other=0.0)
                    biases = biases.to(tl.float32)[None, :]
                    value = (value - biases + sums) * gains + biases
                else:
                    value = (value + sums) * gains
            else:
                value += sums
            if has_shift:
                shift = tl.load(entry + SHIFT).to(tl.pointer_type(tl.float32))
                value += tl.load(shift + output, mask=output < outputs, other=0.0)[None, :]
            tl.store(at, value.to(y.dtype.element_ty), mask=exists)


@triton.jit(
    do_not_specialize=["number"],
    do_not_specialize_on_alignment=["order", "blocks", "slots", "positions"],
)
def _add_embedding(
    known, slots, positions, like, table, order, blocks, out, number, num_matrices, known_stride,
    scale, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block = blocks + tl.program_id(0) * BLOCK_FIELDS
    if tl.load(block) >= 0:
        entry = _entry(table, block, number, num_matrices)
        if tl.load(entry + EMBEDDING) != 0:
            _, is_row, row = _rows_of(block, order, BLOCK_ROWS)
            slot = tl.load(slots + row, mask=is_row, other=0)
            position = tl.load(positions + row, mask=is_row, other=0)
            token = tl.load(known + slot * known_stride + position, mask=is_row, other=0)
            column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            exists = is_row[:, None] & (column < WIDTH)[None, :]
            vectors = _numbers(entry + EMBEDDING, like) + token.to(tl.int64)[:, None] * WIDTH
            change = tl.load(vectors + column[None, :], mask=exists, other=0.0).to(tl.float32)
            at = out + row[:, None] * WIDTH + column[None, :]
            tl.store(at, tl.load(at, mask=exists, other=0.0) + change * scale, mask=exists)


def adapt(
    x: Tensor,
    y: Tensor,
    bias: Tensor | None,
    table: Tensor,
    groups: RowGroups | PairGroups,
    number: int,
    max_ranks: int,
    is_split: bool,
    is_sorted: bool = False,
) -> None:
    """Change the rows of y = x Wᵀ + b that have an adapter, in place.

    Args:
        x: `[rows, inputs]`, in the type of D and U; its last dimension is contiguous. Of pairs:
            `[tokens, inputs]`, or, if `is_sorted`, `[pairs, inputs]` in the order of `pairs`.
        y: `[rows, outputs]`, as `x`. Of pairs: `[pairs, outputs]` in the order of `pairs`.
        bias: `[outputs]`. Of pairs: None; what has gains has no biases then.
        table: `[adapters, matrices, fields]` int64.
        groups: the rows, or the pairs.
        number: of the matrix; of pairs that of the first expert, which the others follow.
        max_ranks: at least the rows of D of each adapter.
        is_split: the inputs of D are split over several programs, as pays off with few rows. The
            bits are the same.
        is_sorted: see x.
    """
    num_blocks, num_matrices = len(groups.blocks), table.shape[1]
    if not num_blocks:
        return
    if isinstance(groups, PairGroups):
        order, num_chosen, of_pairs = groups.pairs, groups.num_chosen, True
    else:
        order, num_chosen, of_pairs = groups.order, 1, False
    parts = NUM_SPLITS if is_split else 1
    thin = torch.empty(parts, len(order), max_ranks, device=x.device)
    _shrink[(num_blocks, RANK_PROGRAMS, parts)](
        x, table, order, groups.blocks, thin, number, num_matrices, x.shape[1], x.stride(0),
        max_ranks, thin.stride(0), CHOSEN=num_chosen, X_SORTED=is_sorted, BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_RANKS=BLOCK_RANKS, BLOCK_INPUTS=BLOCK_INPUTS, NUM_SPLITS=NUM_SPLITS,
        SPLITS=NUM_SPLITS // parts, PROGRAMS=RANK_PROGRAMS, num_stages=STAGES,
    )  # fmt: skip
    outputs = y.shape[1]
    _expand[(num_blocks, triton.cdiv(outputs, TILE_OUTPUTS))](
        x, y, y if bias is None else bias, table, order, groups.blocks, thin, number,
        num_matrices, outputs, x.stride(0), y.stride(0), max_ranks, thin.stride(0),
        CHOSEN=num_chosen, X_SORTED=is_sorted, Y_SORTED=of_pairs, BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_OUTPUTS=TILE_OUTPUTS, COLUMNS=UP_COLUMNS, SAVED_COLUMNS=SAVED_COLUMNS,
        NUM_PARTS=parts, HAS_BIAS=bias is not None,
    )  # fmt: skip


def add_embedding(
    known: Tensor,
    slots: Tensor,
    positions: Tensor,
    embedding: Tensor,
    out: Tensor,
    table: Tensor,
    groups: RowGroups,
    number: int,
    scale: float,
) -> None:
    """Add the differences of embeddings to the rows of tokens that have an adapter, in place.

    Args:
        known: `[slots, context + 1]` int32, the tokens of every slot.
        slots: `[tokens]` int64.
        positions: `[tokens]` int64.
        embedding: in whose type the differences are.
        out: `[tokens, hidden]` float32, contiguous.
        table: `[adapters, matrices, fields]` int64.
        groups: the rows of the tokens.
        number: of the embedding among the matrices.
        scale: factor of the embeddings.
    """
    if len(groups.blocks):
        width = out.shape[1]
        _add_embedding[(len(groups.blocks), triton.cdiv(width, EMBEDDING_COLUMNS))](
            known, slots, positions, embedding, table, groups.order, groups.blocks, out, number,
            table.shape[1], known.stride(0), scale, WIDTH=width, BLOCK_ROWS=BLOCK_ROWS,
            COLUMNS=EMBEDDING_COLUMNS,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The rows of a step that have adapters, and the adapters.

    Attributes:
        table: `[adapters, matrices, fields]` int64.
        numbers: of the matrices.
        max_ranks: rows of the D of any adapter.
        groups: the rows.
        is_split: see `adapt`.
    """

    table: Tensor
    numbers: dict[nn.Module, int]
    max_ranks: int
    groups: RowGroups
    is_split: bool

    def adapt(self, matrix: Linear | Embedding, x: Tensor, y: Tensor, bias: Tensor | None) -> None:
        """Change y = x Wᵀ + b `[rows, outputs]` in place."""
        number = self.numbers[matrix]
        adapt(x, y, bias, self.table, self.groups, number, self.max_ranks, self.is_split)

    def of_pairs(self, pairs: Tensor, chosen: Tensor, num_experts: int) -> PairGroups:
        """Return the pairs of a token and an expert whose tokens have adapters.

        Args:
            pairs: `[pairs]`, sorted by expert and then in the order of `groups`.
            chosen: `[tokens, num_chosen]` the experts of each token.
            num_experts: of the layer.
        """
        return group_pairs(pairs, chosen, self.groups.adapters, num_experts, len(self.table))

    def adapt_pairs(
        self, projections: nn.ModuleList, x: Tensor, y: Tensor, groups: PairGroups, is_sorted: bool
    ) -> None:
        """Change the products of pairs in place, see `adapt`."""
        adapt(
            x, y, None, self.table, groups, self.numbers[projections[0]], self.max_ranks,
            self.is_split and len(y) <= MAX_SPLIT_ROWS, is_sorted,
        )  # fmt: skip

    def add_embedding(
        self,
        known: Tensor,
        slots: Tensor,
        positions: Tensor,
        tokens: Embedding,
        scale: float,
        out: Tensor,
    ) -> None:
        """Add to the embeddings `[tokens, hidden]` float32 in place."""
        add_embedding(
            known, slots, positions, tokens.weight, out, self.table, self.groups,
            self.numbers[tokens], scale,
        )  # fmt: skip
