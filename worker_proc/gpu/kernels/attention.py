"""Attention over pages: one kernel for prompts and for decode rows.

A program takes a block of queries of one row, together with all query heads that share a key head,
and walks over the row's keys, page by page, with a running softmax (Dao 2023,
https://arxiv.org/abs/2307.08691). Where a step has few rows their keys are split over several
programs, whose results `_combine` merges (Flash-Decoding).

With a window, a program begins at the block of the first key that its first query sees, and splits
are parts of what is left. A head's sink is a score without a value: its softmax begins with it, in
the first split only.

Blocks of keys begin at multiples of BLOCK_KEYS of the request, whatever is computed with them, and
rows of a product do not touch each other: so without splits a query's numbers depend neither on the
batch nor on how its prompt was cut.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_proc.gpu.kernels.dot import dot
from worker_proc.models.layers import Attention

LOG2_E = 1.4426950408889634
BLOCK_KEYS = 64
MIN_ROWS = 16  # of the smallest product of tensor cores


@triton.jit
def _attend(
    q, keys, values, out, weights, sinks, slots, positions, first_tokens, counts, page_table,
    scale, softcap, q_stride, page_table_stride, out_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    ONE_QUERY: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
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
    part = tl.cdiv(tl.cdiv(length - first_key, SPLITS), BLOCK_KEYS) * BLOCK_KEYS
    begin = first_key + split * part
    end = tl.minimum(length, begin + part)

    row = tl.arange(0, BLOCK_ROWS)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_DIM)
    in_dim = dim < DIM
    is_query = query < tl.minimum(count, BLOCK_ROWS // GROUP)
    q_places = (first_token + query)[:, None] * q_stride + head[:, None] * DIM + dim[None, :]
    q_block = tl.load(q + q_places, mask=is_query[:, None] & in_dim[None, :], other=0.0)

    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    if HAS_SINKS:
        has_sink = query < tl.where(split == 0, tl.minimum(count, BLOCK_ROWS // GROUP), 0)
        sink = tl.load(sinks + head, mask=has_sink, other=float("-inf"))
        highest = sink.to(tl.float32) * LOG2_E
        total += tl.where(has_sink, 1.0, 0.0)
    attended = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for start in range(begin, end, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        exists = key < length
        if WINDOW:  # pages before the window may belong to another request
            exists = exists & (key > first_position - WINDOW)
        page = tl.load(
            page_table + slot * page_table_stride + key // PAGE_SIZE, mask=exists, other=0
        )
        places = ((page * PAGE_SIZE + key % PAGE_SIZE) * KV_HEADS + kv_head) * DIM
        wanted = exists[:, None] & in_dim[None, :]
        k = tl.load(keys + places[:, None] + dim[None, :], mask=wanted, other=0.0)
        v = tl.load(values + places[:, None] + dim[None, :], mask=wanted, other=0.0)
        k, v = k.to(q_block.dtype), v.to(q_block.dtype)
        scores = dot(q_block, tl.trans(k)) * scale
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(scores) - 1)  # 2 sigmoid(2 u) - 1 = tanh(u)
        seen = (key[None, :] <= first_position + query[:, None]) & exists[None, :]
        if WINDOW:
            seen = seen & (key[None, :] > first_position + query[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        reference = tl.where(higher == float("-inf"), 0.0, higher)  # all keys are masked
        likelihood = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(highest - reference)
        total = total * shrink + tl.sum(likelihood, 1)
        attended = attended * shrink[:, None]
        attended += dot(likelihood.to(v.dtype), v)
        highest = higher

    attended = attended / tl.where(total > 0, total, 1.0)[:, None]
    row_out = (first_token + query) * (KV_HEADS * GROUP) + head
    is_out = is_query[:, None] & in_dim[None, :]
    if SPLITS == 1:
        places = (first_token + query)[:, None] * out_stride + head[:, None] * DIM + dim[None, :]
        tl.store(out + places, attended.to(out.dtype.element_ty), mask=is_out)
    else:
        row_out = row_out * SPLITS + split
        tl.store(out + row_out[:, None] * DIM + dim[None, :], attended, mask=is_out)
        tl.store(
            weights + row_out, highest + tl.log2(tl.where(total > 0, total, 1.0)), mask=is_query
        )


@triton.jit
def _combine(
    parts, weights, out, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, BLOCK_DIM)
    weight = tl.load(weights + row * SPLITS + split)
    highest = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weight, 0)
    places = (row * SPLITS + split)[:, None] * DIM + dim[None, :]
    part = tl.load(parts + places, mask=(dim < DIM)[None, :], other=0.0)
    combined = tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * DIM + dim, combined.to(out.dtype.element_ty), mask=dim < DIM)


def block_dim(head_dim: int) -> int:
    """Return head_dim rounded up to a size of tensor core products."""
    return max(MIN_ROWS, int(triton.next_power_of_2(head_dim)))


def rows_of_block(group: int, queries: int) -> int:
    """Return the rows of a program's products, for a block of one query or of several."""
    min_rows = max(MIN_ROWS, int(triton.next_power_of_2(group)))
    return min_rows if queries == 1 else max(min_rows, 64)


def queries_of_block(group: int, queries: int) -> int:
    """Return the queries of a row that one program takes."""
    return rows_of_block(group, queries) // group


def attend_over_pages(
    q: Tensor,
    pool: Tensor,
    page_table: Tensor,
    blocks: Tensor,
    out: Tensor,
    attention: Attention,
    splits: int = 1,
) -> None:
    """Attend to the keys of each query's row, up to its own position.

    Args:
        q: `[tokens, heads, head_dim]`, which may be strided by token.
        pool: `[2, pages, page_size, kv_heads, head_dim]`, keys and values.
        page_table: `[slots, pages]` int64.
        blocks: `[2, blocks]` int64 slots and positions, where each token is a block, or
            `[4, blocks]` with the first token of each and their number, which is at most
            queries_of_block(group, 2). A block with slot -1 is padding: its output is zeros.
        out: Receives `[tokens, heads * head_dim]`.
        attention: Scale, soft cap, window and sinks of the layer.
        splits: Programs for the keys of a row: a power of two; 1 if a block may have more than
            one query.
    """
    tokens, heads, head_dim = q.shape
    _, _, page_size, kv_heads, _ = pool.shape
    group, one_query = heads // kv_heads, len(blocks) == 2
    rows = rows_of_block(group, 1 if one_query else 2)
    parts = weights = out
    if splits > 1:
        parts = q.new_empty(tokens * heads * splits, head_dim, dtype=torch.float32)
        weights = q.new_empty(tokens * heads * splits, dtype=torch.float32)
    softcap, sinks = attention.softcap, attention.sinks
    scale = attention.scale * (LOG2_E if softcap is None else 2 / softcap)
    _attend[(blocks.shape[1], kv_heads, splits)](
        q, pool[0], pool[1], parts, weights, out if sinks is None else sinks,
        blocks[0], blocks[1], blocks[-2], blocks[-1], page_table, scale,
        (softcap or 0.0) * LOG2_E, q.stride(0), page_table.stride(0), out.stride(0),
        KV_HEADS=kv_heads, GROUP=group, DIM=head_dim, PAGE_SIZE=page_size, BLOCK_ROWS=rows,
        BLOCK_KEYS=BLOCK_KEYS, BLOCK_DIM=block_dim(head_dim), ONE_QUERY=one_query, SPLITS=splits,
        WINDOW=attention.window or 0, CAPPED=softcap is not None, HAS_SINKS=sinks is not None,
        LOG2_E=LOG2_E,
    )  # fmt: skip
    if splits > 1:
        _combine[(tokens, heads)](
            parts, weights, out, HEADS=heads, DIM=head_dim, BLOCK_DIM=block_dim(head_dim),
            SPLITS=splits,
        )  # fmt: skip
