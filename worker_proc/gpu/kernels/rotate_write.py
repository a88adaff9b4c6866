"""Head norms, rotary embedding, and the writing of keys and values into their pages."""

import triton
import triton.language as tl
from torch import Tensor

from worker_proc.models.layers import QKNorms, Rope


@triton.jit
def _rotate_write(
    qkv, pool_keys, pool_values, cosines, sines, query_gain, key_gain,
    slots, positions, page_table, qkv_stride, page_table_stride, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, ROTATED: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        position = tl.load(positions + token)
        head, dim = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_HALF)[None, :]
        is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
        exists = (head < HEADS + 2 * KV_HEADS) & (dim < HALF)
        if not ROTATED:
            exists = exists & (head >= HEADS)
        exists_second = exists & (dim + HALF < DIM)
        places = token * qkv_stride + head * DIM + dim
        first = tl.load(qkv + places, mask=exists, other=0.0)
        second = tl.load(qkv + places + HALF, mask=exists_second, other=0.0)
        if NORMED:
            squares = first.to(tl.float32) * first + second.to(tl.float32) * second
            scale = tl.rsqrt(tl.sum(squares, axis=1) / DIM + epsilon)[:, None]
            low, high = dim < HALF, dim + HALF < DIM
            of_queries = tl.load(query_gain + dim, mask=low, other=0.0)
            gain = tl.where(is_query, of_queries, tl.load(key_gain + dim, mask=low, other=0.0))
            normed = first * scale * gain
            first = tl.where(is_value, first, normed.to(first.dtype))
            of_queries = tl.load(query_gain + dim + HALF, mask=high, other=0.0)
            of_keys = tl.load(key_gain + dim + HALF, mask=high, other=0.0)
            normed = second * scale * tl.where(is_query, of_queries, of_keys)
            second = tl.where(is_value, second, normed.to(second.dtype))
        if ROTATED:
            cosine = tl.load(cosines + position * HALF + dim, mask=dim < HALF, other=0.0)
            sine = tl.load(sines + position * HALF + dim, mask=dim < HALF, other=0.0)
            turned = first * cosine - second * sine
            turned_second = second * cosine + first * sine
            first = tl.where(is_value, first, turned.to(first.dtype))
            second = tl.where(is_value, second, turned_second.to(second.dtype))
            tl.store(qkv + places, first, mask=exists & is_query)
            tl.store(qkv + places + HALF, second, mask=exists_second & is_query)
        page = tl.load(page_table + slot * page_table_stride + position // PAGE_SIZE)
        place = (page * PAGE_SIZE + position % PAGE_SIZE) * (KV_HEADS * DIM)
        kind = pool_keys.dtype.element_ty
        is_key = exists & (head >= HEADS) & (head < HEADS + KV_HEADS)
        key_place = place + (head - HEADS) * DIM + dim
        tl.store(pool_keys + key_place, first.to(kind), mask=is_key)
        tl.store(pool_keys + key_place + HALF, second.to(kind), mask=is_key & exists_second)
        value_place = key_place - KV_HEADS * DIM
        is_value = exists & is_value
        tl.store(pool_values + value_place, first.to(kind), mask=is_value)
        tl.store(pool_values + value_place + HALF, second.to(kind), mask=is_value & exists_second)


def rotate_and_write(
    qkv: Tensor, pool: Tensor, page_table: Tensor, slots: Tensor, positions: Tensor,
    rope: Rope | None, norms: QKNorms | None = None,
) -> None:  # fmt: skip
    """Normalise and rotate queries in place, and keys on their way to the pages.

    Args:
        qkv: `[tokens, heads + 2 * kv_heads, head_dim]`.
        pool: `[2, pages, page_size, kv_heads, head_dim]`.
        page_table: `[slots, pages]` int64.
        slots: `[tokens]` int64; a token with slot -1 is padding.
        positions: `[tokens]` int64.
        rope: None: nothing is rotated.
        norms: None: nothing is normalised.

    Raises:
        ValueError: There are norms without rope: queries that are not rotated are not read.
    """
    if norms is not None and rope is None:
        raise ValueError("heads are normalised only where they are rotated")
    tokens, all_heads, head_dim = qkv.shape
    _, _, page_size, kv_heads, _ = pool.shape
    half = -(-head_dim // 2)
    angles = (rope.cosines, rope.sines) if rope is not None else (qkv, qkv)
    gains = (norms.queries.weight, norms.keys.weight) if norms is not None else (qkv, qkv)
    _rotate_write[(tokens,)](
        qkv, pool[0], pool[1], *angles, *gains, slots, positions, page_table,
        qkv.stride(0), page_table.stride(0), norms.keys.epsilon if norms is not None else 0.0,
        HEADS=all_heads - 2 * kv_heads, KV_HEADS=kv_heads, DIM=head_dim, PAGE_SIZE=page_size,
        BLOCK_HEADS=triton.next_power_of_2(all_heads), HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half), ROTATED=rope is not None,
        NORMED=norms is not None,
    )  # fmt: skip
