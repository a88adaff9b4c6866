"""Attention over pages: a kernel that rotates and writes keys and values, and one that attends."""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_proc.gpu.kernels.early import can_begin_early, let_next_begin
from worker_proc.gpu.kernels.matmul import dot, dot_add
from worker_proc.models.layers import Attention


@triton.jit
def _mean(
    squares, head, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the mean squares of each head, or of all queries and all keys, `[heads, 1]`."""
    if WHOLE:
        is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
        of_queries = tl.sum(tl.where(is_query, squares, 0.0)) / HEADS
        of_keys = tl.sum(tl.where(is_query | is_value, 0.0, squares)) / KV_HEADS
        squares = tl.where(is_query, of_queries, of_keys)
    return squares / DIM


@triton.jit
def _normed(
    x, scale, query_gain, key_gain, offset, head, channel, exists,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GAIN_STRIDE: tl.constexpr,
):  # fmt: skip
    """Return x times scale and gains `[heads, channels]` where a head is of queries or keys."""
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    gains = head * GAIN_STRIDE + channel
    gain = tl.load(query_gain + gains, mask=exists & is_query, other=0.0)
    is_key = exists & (head >= HEADS) & (head < HEADS + KV_HEADS)
    of_keys = tl.load(key_gain + gains - HEADS * GAIN_STRIDE, mask=is_key, other=0.0)
    gain = tl.where(is_query, gain, of_keys).to(tl.float32) + offset
    return tl.where(is_value, x, (x.to(tl.float32) * scale * gain).to(x.dtype))


@triton.jit
def _store(
    x, pool_keys, pool_values, page_place, head, channel, exists,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Write the keys and values of x `[heads, channels]` to a place in a page.

    Returns:
        How many of them are NaN or infinite.
    """
    number = x.to(tl.float32)
    is_key = exists & (head >= HEADS) & (head < HEADS + KV_HEADS)
    key_place = page_place + (head - HEADS) * DIM + channel
    x = x.to(pool_keys.dtype.element_ty)
    tl.store(pool_keys + key_place, x, mask=is_key)
    is_value = exists & (head >= HEADS + KV_HEADS)
    tl.store(pool_values + key_place - KV_HEADS * DIM, x, mask=is_value)
    is_wrong = (is_key | is_value) & ~(tl.abs(number) < float("inf"))
    return tl.sum(tl.sum(is_wrong.to(tl.int32), 1), 0)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "nonfinite_from"])
def _rotate_write(
    qkv, pool_keys, pool_values, cosines, sines, query_gain, key_gain,
    slots, positions, page_table, nonfinite_from, out, qkv_stride, page_table_stride, epsilon,
    offset, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, ROTATED: tl.constexpr,
    NORMED: tl.constexpr, WHOLE: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        position = tl.load(positions + token)
        head, dim = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_HALF)[None, :]
        is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
        is_head = head < HEADS + 2 * KV_HEADS
        if not (ROTATED or NORMED):
            is_head = is_head & (head >= HEADS)
        places = token * qkv_stride + head * DIM + dim
        exists = is_head & (dim < HALF)
        exists_second = exists & (dim + HALF < DIM)
        first = tl.load(qkv + places, mask=exists, other=0.0)
        second = tl.load(qkv + places + HALF, mask=exists_second, other=0.0)
        if BLOCK_REST:
            channel = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
            exists_rest = is_head & (channel < DIM)
            rest_places = token * qkv_stride + head * DIM + channel
            rest = tl.load(qkv + rest_places, mask=exists_rest, other=0.0)
        if NORMED:
            squares = first.to(tl.float32) * first + second.to(tl.float32) * second
            squares = tl.sum(squares, axis=1)[:, None]
            if BLOCK_REST:
                squares += tl.sum(rest.to(tl.float32) * rest, axis=1)[:, None]
            scale = tl.rsqrt(_mean(squares, head, HEADS, KV_HEADS, DIM, WHOLE) + epsilon)
            GAIN_STRIDE: tl.constexpr = DIM if WHOLE else 0
            first = _normed(first, scale, query_gain, key_gain, offset, head, dim, exists,
                            HEADS, KV_HEADS, GAIN_STRIDE)  # fmt: skip
            second = _normed(second, scale, query_gain, key_gain, offset, head, dim + HALF,
                             exists_second, HEADS, KV_HEADS, GAIN_STRIDE)  # fmt: skip
            if BLOCK_REST:
                rest = _normed(rest, scale, query_gain, key_gain, offset, head, channel,
                               exists_rest, HEADS, KV_HEADS, GAIN_STRIDE)  # fmt: skip
                tl.store(qkv + rest_places, rest, mask=exists_rest & is_query)
        if ROTATED:
            cosine = tl.load(cosines + position * HALF + dim, mask=dim < HALF, other=0.0)
            sine = tl.load(sines + position * HALF + dim, mask=dim < HALF, other=0.0)
            turned = first * cosine - second * sine
            turned_second = second * cosine + first * sine
            first = tl.where(is_value, first, turned.to(first.dtype))
            second = tl.where(is_value, second, turned_second.to(second.dtype))
        if ROTATED or NORMED:
            tl.store(qkv + places, first, mask=exists & is_query)
            tl.store(qkv + places + HALF, second, mask=exists_second & is_query)
        page = tl.load(page_table + slot * page_table_stride + position // PAGE_SIZE)
        place = (page * PAGE_SIZE + position % PAGE_SIZE) * (KV_HEADS * DIM)
        num_wrong = _store(first, pool_keys, pool_values, place, head, dim, exists,
                           HEADS, KV_HEADS, DIM)  # fmt: skip
        num_wrong += _store(second, pool_keys, pool_values, place, head, dim + HALF, exists_second,
                            HEADS, KV_HEADS, DIM)  # fmt: skip
        if BLOCK_REST:
            num_wrong += _store(rest, pool_keys, pool_values, place, head, channel, exists_rest,
                                HEADS, KV_HEADS, DIM)  # fmt: skip
        tl.atomic_min(nonfinite_from + slot, position, mask=num_wrong > 0)
    else:
        column = tl.arange(0, BLOCK_OUT)
        zeros = tl.zeros([BLOCK_OUT], tl.float32).to(out.dtype.element_ty)
        tl.store(out + token * (HEADS * DIM) + column, zeros, mask=column < HEADS * DIM)


def rotate_and_write(
    qkv: Tensor, pool: Tensor, page_table: Tensor, slots: Tensor, positions: Tensor,
    attention: Attention, nonfinite_from: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Normalize and rotate queries in place, and keys on their way to the pages.

    Padding gets zeros as its attention, which no other kernel writes in a step with prompts: a
    mixture of experts would choose experts by what was in the memory.

    Args:
        qkv: `[tokens, heads + 2 * kv_heads, head_dim]`.
        pool: `[2, pages, page_size, kv_heads, head_dim]`.
        page_table: `[slots, pages]` int64.
        slots: `[tokens]` int64; a token with slot -1 is padding.
        positions: `[tokens]` int64.
        attention: its norms and rotary positions.
        nonfinite_from: `[slots]` int64, lowered to the positions of keys or values that are NaN or
            infinite.
        out: `[tokens, heads * head_dim]`: the rows of padding are filled.
    """
    tokens, all_heads, head_dim = qkv.shape
    _, _, page_size, kv_heads, _ = pool.shape
    rope, norms = attention.rope, attention.norms
    half = -(-head_dim // 2) if rope is None else rope.cosines.shape[1]
    num_rest = max(0, head_dim - 2 * half)
    angles = (rope.cosines, rope.sines) if rope is not None else (qkv, qkv)
    gains = (norms.queries.weight, norms.keys.weight) if norms is not None else (qkv, qkv)
    _rotate_write[(tokens,)](
        qkv, pool[0], pool[1], *angles, *gains, slots, positions, page_table, nonfinite_from, out,
        qkv.stride(0), page_table.stride(0), norms.keys.epsilon if norms is not None else 0.0,
        norms.keys.offset if norms is not None else 0.0,
        HEADS=all_heads - 2 * kv_heads, KV_HEADS=kv_heads, DIM=head_dim, PAGE_SIZE=page_size,
        BLOCK_HEADS=triton.next_power_of_2(all_heads), HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(num_rest) if num_rest else 0,
        ROTATED=rope is not None, NORMED=norms is not None,
        WHOLE=norms is not None and norms.whole,
        BLOCK_OUT=triton.next_power_of_2(out.shape[1]),
    )  # fmt: skip


# Attention over pages: one kernel for prompts and for decode rows.
#
# A program takes a block of queries of one row, together with all query heads that share a key
# head, and walks over the row's keys, page by page, with a running softmax (Dao 2023,
# https://arxiv.org/abs/2307.08691). Where a step has few rows their keys are split over several
# programs, whose results `_combine` merges (Flash-Decoding).
#
# With a window, a program begins at the block of the first key that its first query sees, and
# splits are parts of what is left. A head's sink is a score without a value: its softmax begins
# with it, in the first split only.
#
# Blocks of keys begin at multiples of BLOCK_KEYS of the request, whatever is computed with them,
# and rows of a product do not touch each other: so without splits a query's numbers depend
# neither on the batch nor on how its prompt was cut.

LOG2_E = 1.4426950408889634
MIN_ROWS = 16  # of the smallest product of tensor cores
MAX_SPLITS = 32
REGISTERS = 65_536  # of a multiprocessor
# Arrays of numbers, read one at a time, whose places in memory change from step to step: a kernel
# compiled for each of their alignments would gain nothing.
INDICES = ["slots", "positions", "first_tokens", "counts"]


@triton.jit
def _load_pages(page_row, key, length, PAGE_SIZE: tl.constexpr):
    """Load the pages of keys, 0 for those that do not exist."""
    return tl.load(page_row + key // PAGE_SIZE, mask=key < length, other=0)


@triton.jit
def _walk(
    q_block, keys, values, page_row, highest, total, attended, begin, end, length, first_position,
    query, kv_head, scale, softcap,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, MASKED: tl.constexpr, AHEAD: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Attend to the keys [begin, end), which begin at a block, and return the running softmax.

    Without MASKED every query sees every one of them. With AHEAD the pages of a block are loaded
    while the block before is computed. A query's numbers are the same either way.
    """
    dim = tl.arange(0, BLOCK_DIM)
    in_dim = dim < DIM
    in_block = tl.arange(0, BLOCK_KEYS)
    if AHEAD:
        next_page = _load_pages(page_row, begin + in_block, length, PAGE_SIZE)
    for start in range(begin, end, BLOCK_KEYS):
        key = start + in_block
        exists = key < length
        if WINDOW:  # pages before the window may belong to another request
            exists = exists & (key > first_position - WINDOW)
        if AHEAD:
            page = next_page
            next_page = _load_pages(page_row, key + BLOCK_KEYS, length, PAGE_SIZE)
        else:
            page = _load_pages(page_row, key, length, PAGE_SIZE)
        places = ((page * PAGE_SIZE + key % PAGE_SIZE) * KV_HEADS + kv_head) * DIM
        key_places = (keys + places)[:, None] + dim[None, :]
        value_places = (values + places)[:, None] + dim[None, :]
        if MASKED or BLOCK_DIM > DIM:
            wanted = exists[:, None] & in_dim[None, :]
            k = tl.load(key_places, mask=wanted, other=0.0)
            v = tl.load(value_places, mask=wanted, other=0.0)
        else:
            k, v = tl.load(key_places), tl.load(value_places)
        k, v = k.to(q_block.dtype), v.to(q_block.dtype)
        scores = dot(q_block, tl.trans(k))
        if CAPPED:  # 2 sigmoid(2 u) - 1 = tanh(u)
            scores = softcap * (2 * tl.sigmoid(scores * scale) - 1)
        if MASKED:
            seen = (key[None, :] <= first_position + query[:, None]) & exists[None, :]
            if WINDOW:
                seen = seen & (key[None, :] > first_position + query[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        factor = 1.0 if CAPPED else scale  # multiplied and subtracted in one instruction
        higher = tl.maximum(highest, tl.max(scores, 1) * factor)
        reference = tl.where(higher == float("-inf"), 0.0, higher)  # all keys are masked
        likelihood = tl.exp2(scores * factor - reference[:, None])
        shrink = tl.exp2(highest - reference)
        total = total * shrink + tl.sum(likelihood, 1)
        attended = dot_add(likelihood.to(v.dtype), v, attended * shrink[:, None])
        highest = higher
    return highest, total, attended


@triton.jit
def _turned(
    heads, dim, exists, gain, cosines, sines, position, epsilon, offset,
    DIM: tl.constexpr, HALF: tl.constexpr, ROTATED: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Load heads `[heads, channels]` of a token from their places, normalize and rotate them."""
    x = tl.load(heads + dim, mask=exists, other=0.0)
    is_first = dim < HALF
    other = tl.where(is_first, dim + HALF, dim - HALF)
    has_other = exists & (dim < 2 * HALF) & (other < DIM)
    if ROTATED:
        y = tl.load(heads + other, mask=has_other, other=0.0)
    if NORMED:
        squares = tl.sum(x.to(tl.float32) * x, 1)[:, None]
        scale = tl.rsqrt(squares / DIM + epsilon)
        gains = tl.load(gain + dim, mask=dim < DIM, other=0.0).to(tl.float32) + offset
        x = (x.to(tl.float32) * scale * gains).to(x.dtype)
        if ROTATED:
            gains = tl.load(gain + other, mask=(dim < 2 * HALF) & (other < DIM), other=0.0)
            y = (y.to(tl.float32) * scale * (gains.to(tl.float32) + offset)).to(x.dtype)
    if ROTATED:
        angle = position * HALF + tl.where(is_first, dim, dim - HALF)
        cosine = tl.load(cosines + angle, mask=dim < 2 * HALF, other=1.0)
        sine = tl.load(sines + angle, mask=dim < 2 * HALF, other=0.0)
        y = y.to(tl.float32)
        turned = x.to(tl.float32) * cosine + tl.where(is_first, -y, y) * sine
        x = tl.where(has_other, turned.to(x.dtype), x)
    return x


@triton.jit
def _write_new(
    k, v, keys, values, page_row, position, kv_head, dim, nonfinite,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Write key and value `[1, channels]` of the token at a position to its page."""
    page = tl.load(page_row + position // PAGE_SIZE)
    place = ((page * PAGE_SIZE + position % PAGE_SIZE) * KV_HEADS + kv_head) * DIM + dim
    tl.store(keys + place, k.to(keys.dtype.element_ty), mask=dim < DIM)
    tl.store(values + place, v.to(values.dtype.element_ty), mask=dim < DIM)
    is_finite = (tl.abs(k.to(tl.float32)) < float("inf")) & (
        tl.abs(v.to(tl.float32)) < float("inf")
    )
    num_wrong = tl.sum(tl.sum(((dim < DIM) & ~is_finite).to(tl.int32), 1), 0)
    tl.atomic_min(nonfinite, position, mask=num_wrong > 0)


@triton.jit(
    do_not_specialize=["splits"], do_not_specialize_on_alignment=[*INDICES, "nonfinite_from"]
)
def _attend(
    q, keys, values, out, weights, sinks, slots, positions, first_tokens, counts, page_table,
    cosines, sines, query_gain, key_gain, nonfinite_from, scale, softcap, epsilon, offset,
    q_stride, page_table_stride, out_stride, splits,
    WRITES: tl.constexpr, HALF: tl.constexpr, ROTATED: tl.constexpr, NORMED: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    ONE_QUERY: tl.constexpr, IS_SPLIT: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr, LOG2_E: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + block)
    first_position = tl.load(positions + block)
    if ONE_QUERY:
        first_token, count = block.to(tl.int64), 1
    else:
        first_token, count = tl.load(first_tokens + block), tl.load(counts + block)
    length = tl.where(slot < 0, 0, first_position + count)
    first_key = length * 0
    if WINDOW:
        first_key = tl.maximum(first_position + 1 - WINDOW, 0) // BLOCK_KEYS * BLOCK_KEYS
    part = tl.cdiv(tl.cdiv(length - first_key, splits), BLOCK_KEYS) * BLOCK_KEYS
    begin = first_key + split * part
    end = tl.minimum(length, begin + part)

    row = tl.arange(0, BLOCK_ROWS)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_DIM)
    in_dim = dim < DIM
    is_query = query < tl.minimum(count, BLOCK_ROWS // GROUP)
    q_heads = q + (first_token + query)[:, None] * q_stride + head[:, None] * DIM
    is_q = is_query[:, None] & in_dim[None, :]
    page_row = page_table + slot * page_table_stride
    if WRITES:  # the query of the only token, and its key and value, as _rotate_write does
        q_block = _turned(q_heads, dim[None, :], is_q, query_gain, cosines, sines, first_position,
                          epsilon, offset, DIM, HALF, ROTATED, NORMED)  # fmt: skip
        if (begin < length) & (end == length):
            k_head = q + first_token * q_stride + (KV_HEADS * GROUP + kv_head) * DIM
            k_head += tl.zeros([1, 1], tl.int32)
            k = _turned(k_head, dim[None, :], in_dim[None, :], key_gain, cosines, sines,
                        first_position, epsilon, offset, DIM, HALF, ROTATED, NORMED)  # fmt: skip
            v = tl.load(k_head + KV_HEADS * DIM + dim[None, :], mask=in_dim[None, :], other=0.0)
            _write_new(k, v, keys, values, page_row, first_position, kv_head, dim[None, :],
                       nonfinite_from + slot, KV_HEADS, DIM, PAGE_SIZE)  # fmt: skip
        tl.debug_barrier()  # this program reads what its threads have written
    else:
        q_block = tl.load(q_heads + dim[None, :], mask=is_q, other=0.0)

    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    if HAS_SINKS:
        has_sink = query < tl.where(split == 0, tl.minimum(count, BLOCK_ROWS // GROUP), 0)
        sink = tl.load(sinks + head, mask=has_sink, other=float("-inf"))
        highest = sink.to(tl.float32) * LOG2_E
        total += tl.where(has_sink, 1.0, 0.0)
    attended = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    if not ONE_QUERY and WINDOW == 0:
        # Every query sees the blocks of keys before the first query.
        all_see = tl.minimum(end, (first_position + 1) // BLOCK_KEYS * BLOCK_KEYS)
        highest, total, attended = _walk(
            q_block, keys, values, page_row, highest, total, attended, begin, all_see, length,
            first_position, query, kv_head, scale, softcap,
            KV_HEADS, DIM, PAGE_SIZE, BLOCK_KEYS, BLOCK_DIM, False, not ONE_QUERY, WINDOW, CAPPED,
        )  # fmt: skip
        begin = tl.maximum(begin, all_see)
    highest, total, attended = _walk(
        q_block, keys, values, page_row, highest, total, attended, begin, end, length,
        first_position, query, kv_head, scale, softcap,
        KV_HEADS, DIM, PAGE_SIZE, BLOCK_KEYS, BLOCK_DIM, True, not ONE_QUERY, WINDOW, CAPPED,
    )  # fmt: skip

    attended = attended / tl.where(total > 0, total, 1.0)[:, None]
    row_out = (first_token + query) * (KV_HEADS * GROUP) + head
    is_out = is_query[:, None] & in_dim[None, :]
    if not IS_SPLIT:
        places = (first_token + query)[:, None] * out_stride + head[:, None] * DIM + dim[None, :]
        tl.store(out + places, attended.to(out.dtype.element_ty), mask=is_out)
    else:
        row_out = row_out * splits + split
        tl.store(out + row_out[:, None] * DIM + dim[None, :], attended, mask=is_out)
        tl.store(
            weights + row_out, highest + tl.log2(tl.where(total > 0, total, 1.0)), mask=is_query
        )


@triton.jit(do_not_specialize=["splits"])
def _combine(
    parts, weights, out, splits, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    split, dim = tl.arange(0, MAX_SPLITS), tl.arange(0, BLOCK_DIM)
    exists = split < splits
    weight = tl.load(weights + row * splits + split, mask=exists, other=float("-inf"))
    highest = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weight, 0)
    places = (row * splits + split)[:, None] * DIM + dim[None, :]
    wanted = exists[:, None] & (dim < DIM)[None, :]
    part = tl.load(parts + places, mask=wanted, other=0.0)
    combined = tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * DIM + dim, combined.to(out.dtype.element_ty), mask=dim < DIM)


def block_dim(head_dim: int) -> int:
    """Return head_dim rounded up to a size of tensor core products."""
    return max(MIN_ROWS, int(triton.next_power_of_2(head_dim)))


class AttentionTile(NamedTuple):
    """What one program computes at a time, and how it is compiled.

    Attributes:
        rows: rows of its products: queries times the heads of a group.
        keys: keys of a block.
        stages: blocks of keys that are loaded ahead, plus one.
        warps: warps of a program.
    """

    rows: int
    keys: int
    stages: int
    warps: int


@cache
def tile_of(group: int, one_query: bool, head_dim: int, dtype: torch.dtype) -> AttentionTile:
    """Return the tile of a program, which fits shared memory and registers.

    Products of float32 have no tensor cores: every thread keeps its part of both factors in
    registers, so their tiles are small. How many keys a block has does not depend on `one_query`.

    Args:
        group: query heads for each key head.
        one_query: each block is one query.
        head_dim: of queries, keys and values.
        dtype: of the queries.
    """
    min_rows = max(MIN_ROWS, int(triton.next_power_of_2(group)))
    if dtype == torch.float32:
        rows = min_rows if one_query else max(min_rows, 32)
        keys = 32 if head_dim <= 128 else 16
        return AttentionTile(rows, keys, stages=1, warps=4 if head_dim <= 64 else 8)
    if head_dim > 128:
        rows = min_rows if one_query else max(min_rows, 64)
        return AttentionTile(rows, 32, stages=2, warps=4 if one_query else 8)
    if one_query:
        return AttentionTile(min_rows, 64, stages=3, warps=2 if head_dim <= 64 else 4)
    return AttentionTile(max(min_rows, 128), 64, stages=3, warps=4 if head_dim <= 64 else 8)


def max_registers(tile: AttentionTile, writes: bool) -> int | None:
    """Return the registers of a thread that let as many programs run as without the writing."""
    return REGISTERS // (4 * 32 * tile.warps) if writes and tile.warps == 4 else None


def queries_of_block(group: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the queries of a row that one program takes."""
    return tile_of(group, False, head_dim, dtype).rows // group


def attend_over_pages(
    q: Tensor,
    pool: Tensor,
    page_table: Tensor,
    blocks: Tensor,
    out: Tensor,
    attention: Attention,
    splits: int = 1,
    nonfinite_from: Tensor | None = None,
) -> None:
    """Attend to the keys of each query's row, up to its own position.

    Args:
        q: `[tokens, heads, head_dim]`, which may be strided by token. With `nonfinite_from`, a
            token's keys and values lie behind its queries.
        pool: `[2, pages, page_size, kv_heads, head_dim]`, keys and values.
        page_table: `[slots, pages]` int64.
        blocks: `[2, blocks]` int64 slots and positions, where each token is a block, or
            `[4, blocks]` with the first token of each and their number, which is at most
            `queries_of_block`. A block with slot -1 is padding: its output is zeros.
        out: receives `[tokens, heads * head_dim]`.
        attention: scale, soft cap, window and sinks of the layer.
        splits: programs for the keys of a block, at most MAX_SPLITS.
        nonfinite_from: if given, each token is a block, and the kernel does for it what
            `rotate_and_write` does. Not with norms of all heads together.
    """
    tokens, heads, head_dim = q.shape
    _, _, page_size, kv_heads, _ = pool.shape
    group, one_query = heads // kv_heads, len(blocks) == 2
    tile = tile_of(group, one_query, head_dim, q.dtype)
    parts = weights = out
    if splits > 1:
        parts = q.new_empty(tokens * heads * splits, head_dim, dtype=torch.float32)
        weights = q.new_empty(tokens * heads * splits, dtype=torch.float32)
    softcap, sinks = attention.softcap, attention.sinks
    scale = attention.scale * (LOG2_E if softcap is None else 2 / softcap)
    writes = nonfinite_from is not None
    rope = attention.rope if writes else None
    norms = attention.norms if writes else None
    assert one_query or not writes
    assert norms is None or not norms.whole
    _attend[(blocks.shape[1], kv_heads, splits)](
        q, pool[0], pool[1], parts, weights, out if sinks is None else sinks,
        blocks[0], blocks[1], blocks[-2], blocks[-1], page_table,
        q if rope is None else rope.cosines, q if rope is None else rope.sines,
        q if norms is None else norms.queries.weight, q if norms is None else norms.keys.weight,
        blocks[0] if nonfinite_from is None else nonfinite_from, scale,
        (softcap or 0.0) * LOG2_E, 0.0 if norms is None else norms.keys.epsilon,
        0.0 if norms is None else norms.keys.offset, q.stride(0), page_table.stride(0),
        out.stride(0), splits, WRITES=writes,
        HALF=1 if rope is None else rope.cosines.shape[1], ROTATED=rope is not None,
        NORMED=norms is not None,
        KV_HEADS=kv_heads, GROUP=group, DIM=head_dim, PAGE_SIZE=page_size, BLOCK_ROWS=tile.rows,
        BLOCK_KEYS=tile.keys, BLOCK_DIM=block_dim(head_dim), ONE_QUERY=one_query,
        IS_SPLIT=splits > 1,
        WINDOW=attention.window or 0, CAPPED=softcap is not None, HAS_SINKS=sinks is not None,
        LOG2_E=LOG2_E, EARLY=one_query and can_begin_early(q.device),
        num_stages=tile.stages, num_warps=tile.warps,
        maxnreg=max_registers(tile, writes),
    )  # fmt: skip
    if splits > 1:
        _combine[(tokens, heads)](
            parts, weights, out, splits, HEADS=heads, DIM=head_dim,
            BLOCK_DIM=block_dim(head_dim), MAX_SPLITS=MAX_SPLITS,
            EARLY=can_begin_early(q.device),
        )  # fmt: skip
