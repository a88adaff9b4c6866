"""Head norms, rotary embedding, and the writing of keys and values into their pages."""

import triton
import triton.language as tl
from torch import Tensor

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
        attention: Its norms and rotary positions.
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
