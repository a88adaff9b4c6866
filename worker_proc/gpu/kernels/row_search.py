"""Weights, random fractions, and searches over a whole row of logits, for the sampling kernels.

Weights are integers, in units of 2^-40 of the largest one. Integers have the same sum in every
order, so a row has the same token however it is divided among programs.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
WEIGHT_UNITS = tl.constexpr(float(2**40))
# Constants of splitmix64, see sampler.uniform, as signed numbers.
GOLDEN_GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB - 2**64)


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
def fraction_of(total, seed, position):
    """Return floor(total * u), where u is the row's random number, a multiple of 2^-24 below 1."""
    start = _mix(seed + GOLDEN_GAMMA)
    u = _shift(_mix(start + (position + 1) * GOLDEN_GAMMA), 40)
    return _shift(total, 24) * u + _shift((total & ((1 << 24) - 1)) * u, 24)


@triton.jit
def scores(row_logits, start, vocab_size, BLOCK: tl.constexpr):
    """Load a block of logits as float32, -inf beyond the vocabulary."""
    column = start + tl.arange(0, BLOCK)
    x = tl.load(row_logits + column, mask=column < vocab_size, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def units(x, highest, scale):
    """Return the weights of logits as integers; NaN has none.

    Args:
        x: Logits.
        highest: The largest logit of the row.
        scale: log2(e) / temperature.
    """
    distance = (x - highest) * scale
    return tl.where(distance <= 0, tl.exp2(distance) * WEIGHT_UNITS, 0.0).to(tl.int64)


@triton.jit
def next_bounds(low, high, is_enough, smallest_above, largest_below):
    """Return the bounds of a bisection after a pass, each a logit of the row."""
    return tl.where(is_enough, smallest_above, low), tl.where(is_enough, high, largest_below)


@triton.jit
def middle_of(low, high):
    """Return a number from `low` on that is below `high`."""
    middle = low + (high - low) * 0.5
    return tl.where(middle < high, middle, low)


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
        scale: See units.
        vocab_size: Of the row.
        COUNTS: Count; else add up weights.
        BLOCK: Columns of a pass.
    """
    while low < high:
        middle = middle_of(low, high)
        amounts = tl.zeros([BLOCK], tl.int64)
        above = tl.full([BLOCK], float("inf"), tl.float32)
        below = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            x = scores(row_logits, start, vocab_size, BLOCK)
            is_above = x > middle
            amount = is_above.to(tl.int64) if COUNTS else units(x, highest, scale)
            amounts += tl.where(is_above, amount, 0)
            above = tl.minimum(above, tl.where(is_above, x, float("inf")))
            below = tl.maximum(below, tl.where(is_above, float("-inf"), x))
        is_enough = tl.sum(amounts, 0).to(tl.float32) >= needed
        low, high = next_bounds(low, high, is_enough, tl.min(above, 0), tl.max(below, 0))
    return low


@triton.jit
def _sums_above(row_logits, threshold, highest, scale, vocab_size, BLOCK: tl.constexpr):
    """Return count and weight of the logits above a threshold, and the smallest finite logit."""
    counts, weights = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        x = scores(row_logits, start, vocab_size, BLOCK)
        is_above = x > threshold
        counts += is_above.to(tl.int64)
        weights += tl.where(is_above, units(x, highest, scale), 0)
        lowest = tl.minimum(lowest, tl.where(x > float("-inf"), x, float("inf")))
    return tl.sum(counts, 0), tl.sum(weights, 0), tl.min(lowest, 0)


@triton.jit
def threshold_of_row(row_logits, top_k, top_p, highest, scale, vocab_size, BLOCK: tl.constexpr):
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
        whole += (top_k - count) * units(low, highest, scale)
    if top_p < 1:
        threshold = _largest_with(
            row_logits, low, highest, top_p * whole.to(tl.float32), highest, scale, vocab_size,
            False, BLOCK,
        )  # fmt: skip
    return threshold


@triton.jit
def _kept_units(
    row_logits, start, threshold, floor, highest, scale, vocab_size, BLOCK: tl.constexpr
):
    """Return the weights of a block, 0 for what the filters drop."""
    x = scores(row_logits, start, vocab_size, BLOCK)
    kept = (x >= threshold) & ((x - highest) * scale >= floor)
    return tl.where(kept, units(x, highest, scale), 0)


@triton.jit
def draw_between(
    row_logits, begin, end, target, threshold, floor, highest, scale, vocab_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the first token from `begin` on with which there is more weight than `target`."""
    before, block_before, block_start = target * 0, target * 0, begin + 0
    for start in range(begin, end, BLOCK):
        after = before + tl.sum(
            _kept_units(row_logits, start, threshold, floor, highest, scale, vocab_size, BLOCK), 0
        )
        is_here = (before <= target) & (after > target)
        block_start = tl.where(is_here, start, block_start)
        block_before = tl.where(is_here, before, block_before)
        before = after
    of_block = _kept_units(
        row_logits, block_start, threshold, floor, highest, scale, vocab_size, BLOCK
    )
    passed = block_before + tl.cumsum(of_block, 0) <= target
    return block_start + tl.sum(passed.to(tl.int32), 0)


@triton.jit
def draw_from_row(
    row_logits, threshold, floor, seed, position, highest, scale, vocab_size, BLOCK: tl.constexpr
):
    """Return the first token whose cumulated weight exceeds the row's random fraction of it."""
    totals = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        totals += _kept_units(
            row_logits, start, threshold, floor, highest, scale, vocab_size, BLOCK
        )
    target = fraction_of(tl.sum(totals, 0), seed, position)
    return draw_between(
        row_logits, vocab_size * 0, vocab_size, target, threshold, floor, highest, scale,
        vocab_size, BLOCK,
    )  # fmt: skip
