"""Sample a token of each row in two launches, without a question to the host.

The rules are those of sampling/sampler.py. The first kernel finds the largest logit of each chunk
of the vocabulary. In the second, a program takes a row: a greedy row has its token at once. For
the others, filters are thresholds of the logits, which are found by bisection: each pass over the
row counts, or weighs, what lies above the middle, and moves one bound to a logit of the row.

Weights are drawn from as integers, in units of 2^-40 of the largest one. Integers have the same sum
in every order, and a row is always added up by one program in blocks of one size, so a token does
not depend on the other rows of a step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_proc.sampling.slot_sampling import SamplingState

BLOCK = 4096  # columns
NUM_WARPS = 8
LOG2_E = tl.constexpr(1.4426950408889634)
WEIGHT_UNITS = tl.constexpr(float(2**40))
# Constants of splitmix64, see sampler.uniform, as signed numbers.
GOLDEN_GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB - 2**64)
INDICES = ["slots", "positions"]


@triton.jit
def _chunk_maxima(
    logits, maxima, places, vocab_size, logits_stride, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Store the largest logit of a chunk, and its first place."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    exists = column < vocab_size
    x = tl.load(logits + row * logits_stride + column, mask=exists, other=float("-inf"))
    x = x.to(tl.float32)
    highest = tl.max(x, 0)
    place = tl.min(tl.where((x == highest) & exists, column, vocab_size - 1), 0)
    tl.store(maxima + row * CHUNKS + chunk, highest)
    tl.store(places + row * CHUNKS + chunk, place)


@triton.jit
def _shift(z, BITS: tl.constexpr):
    """Shift right, as an unsigned number."""
    return (z >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _mix(z):
    z = (z ^ _shift(z, 30)) * FIRST_FACTOR
    z = (z ^ _shift(z, 27)) * SECOND_FACTOR
    return z ^ _shift(z, 31)


@triton.jit
def _fraction_of(total, seed, position):
    """Return floor(total * u), where u is the row's random number, a multiple of 2^-24 below 1."""
    start = _mix(seed + GOLDEN_GAMMA)
    u = _shift(_mix(start + (position + 1) * GOLDEN_GAMMA), 40)
    return _shift(total, 24) * u + _shift((total & ((1 << 24) - 1)) * u, 24)


@triton.jit
def _scores(row_logits, start, vocab_size, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    x = tl.load(row_logits + column, mask=column < vocab_size, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def _weights(x, highest, scale):
    """Return the weights relative to that of the largest logit; `scale` is log2(e) / T."""
    return tl.exp2((x - highest) * scale)


@triton.jit
def _sums_above(row_logits, threshold, highest, scale, vocab_size, BLOCK: tl.constexpr):
    """Return count and weight of the logits above a threshold, and the smallest finite logit."""
    counts, weights = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        x = _scores(row_logits, start, vocab_size, BLOCK)
        is_above = x > threshold
        counts += tl.where(is_above, 1.0, 0.0)
        weights += tl.where(is_above, _weights(x, highest, scale), 0.0)
        lowest = tl.minimum(lowest, tl.where(x > float("-inf"), x, float("inf")))
    return tl.sum(counts, 0), tl.sum(weights, 0), tl.min(lowest, 0)


@triton.jit
def _largest_with(
    row_logits, low, high, needed, highest, scale, vocab_size,
    COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the largest logit such that those from it on are enough.

    Args:
        row_logits: `[vocab_size]`.
        low: A logit of the row that is not above the result.
        high: A logit of the row that is not below the result.
        needed: How many are enough, or how much weight.
        highest: The largest logit.
        scale: See _weights.
        vocab_size: Of the row.
        COUNTS: Count; else add up weights.
        BLOCK: Columns of a pass.
    """
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle < high, middle, low)
        amounts = tl.zeros([BLOCK], tl.float32)
        above = tl.full([BLOCK], float("inf"), tl.float32)
        below = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            x = _scores(row_logits, start, vocab_size, BLOCK)
            is_above = x > middle
            amount = 1.0 if COUNTS else _weights(x, highest, scale)
            amounts += tl.where(is_above, amount, 0.0)
            above = tl.minimum(above, tl.where(is_above, x, float("inf")))
            below = tl.maximum(below, tl.where(is_above, float("-inf"), x))
        is_enough = tl.sum(amounts, 0) >= needed
        low, high = (
            tl.where(is_enough, tl.min(above, 0), low),
            tl.where(is_enough, high, tl.max(below, 0)),
        )
    return low


@triton.jit
def _threshold(row_logits, top_k, top_p, highest, scale, vocab_size, BLOCK: tl.constexpr):
    """Return the smallest logit that top_k, and top_p of the rest, keep."""
    threshold = highest * 0.0 + float("-inf")
    count, whole, lowest = _sums_above(row_logits, threshold, highest, scale, vocab_size, BLOCK)
    low = tl.minimum(lowest, highest)
    if (top_k > 0) & (top_k < count):
        low = _largest_with(
            row_logits, low, highest, top_k.to(tl.float32), highest, scale, vocab_size,
            True, BLOCK,
        )  # fmt: skip
        threshold = low
        count, whole, _ = _sums_above(row_logits, low, highest, scale, vocab_size, BLOCK)
        # Of equal logits at the end, top_k counts only some.
        whole += (top_k.to(tl.float32) - count) * _weights(low, highest, scale)
    if top_p < 1:
        threshold = _largest_with(
            row_logits, low, highest, top_p * whole, highest, scale, vocab_size, False, BLOCK
        )
    return threshold


@triton.jit
def _units(row_logits, start, threshold, floor, highest, scale, vocab_size, BLOCK: tl.constexpr):
    """Return the weights of a block as integers, 0 for what the filters drop."""
    x = _scores(row_logits, start, vocab_size, BLOCK)
    kept = (x >= threshold) & ((x - highest) * scale >= floor)
    return tl.where(kept, _weights(x, highest, scale) * WEIGHT_UNITS, 0.0).to(tl.int64)


@triton.jit
def _draw(
    row_logits, threshold, floor, seed, position, highest, scale, vocab_size, BLOCK: tl.constexpr
):
    """Return the first token whose cumulated weight exceeds the row's random fraction of it."""
    total = seed * 0
    for start in range(0, vocab_size, BLOCK):
        total += tl.sum(
            _units(row_logits, start, threshold, floor, highest, scale, vocab_size, BLOCK), 0
        )
    target = _fraction_of(total, seed, position)
    before, block_before, block_start = seed * 0, seed * 0, vocab_size * 0
    for start in range(0, vocab_size, BLOCK):
        after = before + tl.sum(
            _units(row_logits, start, threshold, floor, highest, scale, vocab_size, BLOCK), 0
        )
        is_here = (before <= target) & (after > target)
        block_start = tl.where(is_here, start, block_start)
        block_before = tl.where(is_here, before, block_before)
        before = after
    units = _units(row_logits, block_start, threshold, floor, highest, scale, vocab_size, BLOCK)
    passed = block_before + tl.cumsum(units, 0) <= target
    return block_start + tl.sum(passed.to(tl.int32), 0)


@triton.jit(do_not_specialize_on_alignment=INDICES)
def _sample(
    logits, maxima, places, slots, positions, temperatures, top_ks, top_ps, min_ps, seeds,
    token_ids, known, vocab_size, logits_stride, known_stride, num_chunks,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots + row), tl.load(positions + row) + 1
    chunk = tl.arange(0, CHUNKS)
    exists = chunk < num_chunks
    of_chunks = tl.load(maxima + row * CHUNKS + chunk, mask=exists, other=float("-inf"))
    place = tl.load(places + row * CHUNKS + chunk, mask=exists, other=0)
    highest = tl.max(of_chunks, 0)
    token = tl.min(tl.where((of_chunks == highest) & exists, place, vocab_size - 1), 0)
    existing = tl.maximum(slot, 0)
    temperature = tl.load(temperatures + existing)
    if (slot >= 0) & (temperature > 0):
        row_logits = logits + row * logits_stride
        scale = LOG2_E / temperature
        top_k, top_p = tl.load(top_ks + existing), tl.load(top_ps + existing)
        threshold = highest * 0.0 + float("-inf")
        if (top_k > 0) | (top_p < 1):
            threshold = _threshold(row_logits, top_k, top_p, highest, scale, vocab_size, BLOCK)
        floor = tl.log2(tl.maximum(tl.load(min_ps + existing), 1e-37))
        drawn = _draw(
            row_logits, threshold, floor, tl.load(seeds + existing), position, highest, scale,
            vocab_size, BLOCK,
        )  # fmt: skip
        token = tl.minimum(drawn, vocab_size - 1)  # logits that are NaN have no weights
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(known + existing * known_stride + position, token, mask=slot >= 0)


def sample_tokens(
    logits: Tensor, slots: Tensor, positions: Tensor, sampling: SamplingState, known: Tensor
) -> Tensor:
    """Sample the token behind a position of each slot, and write it to the known tokens.

    Args:
        logits: `[rows, vocab_size]`, which may be strided by row.
        slots: `[rows]` int64; a row with slot -1 is padding, whose token is of no use.
        positions: `[rows]` int64.
        sampling: Parameters of all slots.
        known: `[slots, context + 1]` int32, the tokens of every slot.

    Returns:
        `[rows]` int64.
    """
    rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, BLOCK)
    chunks = max(2, triton.next_power_of_2(num_chunks))
    maxima = torch.empty(rows, chunks, device=logits.device)
    places = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _chunk_maxima[(rows, num_chunks)](
        logits, maxima, places, vocab_size, logits.stride(0), CHUNKS=chunks, BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    _sample[(rows,)](
        logits, maxima, places, slots, positions, sampling.temperature, sampling.top_k,
        sampling.top_p, sampling.min_p, sampling.seed, token_ids, known, vocab_size,
        logits.stride(0), known.stride(0), num_chunks, CHUNKS=chunks, BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return token_ids
