"""Sample a token of each row in three launches, without a question to the host.

The searches over a whole row of logits come first, then the kernels, then `sample_tokens`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_proc.sampling import sampler
from worker_proc.sampling.sampler import SamplingState

# Weights, random fractions, and searches over a whole row of logits, for the sampling kernels.
#
# Weights are integers, in units of 2^-40 of the largest one. Integers have the same sum in every
# order, so a row has the same token however it is divided among programs.

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
        x: logits.
        highest: the largest logit of the row.
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
def _row_largest_with(
    row_logits, low, high, needed, highest, scale, vocab_size,
    COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the largest logit such that those from it on are enough.

    Args:
        row_logits: `[vocab_size]`.
        low: a logit of the row that is not above the result.
        high: a logit of the row that is not below the result.
        needed: how many are enough, or how much weight.
        highest: the largest logit.
        scale: see units.
        vocab_size: of the row.
        COUNTS: count; else add up weights.
        BLOCK: columns of a pass.
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
        low = _row_largest_with(
            row_logits, low, highest, top_k.to(tl.float32), highest, scale, vocab_size,
            True, BLOCK,
        )  # fmt: skip
        threshold = low
        count, whole, _ = _sums_above(row_logits, low, highest, scale, vocab_size, BLOCK)
        # Of equal logits at the end, top_k counts only some.
        whole += (top_k - count) * units(low, highest, scale)
    if top_p < 1:
        threshold = _row_largest_with(
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


# Sample a token of each row in three launches, without a question to the host.
#
# The rules are those of sampling/sampler.py. The first kernel finds the largest logit of each
# chunk of the vocabulary, and a greedy row needs no more. The second adds up the weights of
# longer spans, and lists the likely tokens of each: those with a logit near the largest one, as
# near as it takes to have no more of them than a list holds. In the third, a program takes a row:
# filters are thresholds of the logits, which are found among the likely tokens of the shortest
# distance by bisection, in registers. Where the filters keep less likely ones, the same search
# goes over the whole row (the functions above): ten passes, or more, of some 10 us each, with a
# vocabulary of 128,256 on an H100.
#
# A token depends neither on the other rows of a step nor on which of the two ways was taken.

BLOCK, CHUNK_WARPS = 4096, 8  # columns of a chunk, and warps of its program
SPAN, SPAN_BLOCK = 16_384, 2048  # columns of a span, and of those the ones computed at a time
ROW_WARPS = 16  # of the program of a row
MAX_LIKELY = 8192  # tokens in the lists of a row
# A likely token has 2^-14 of the largest weight, or more; 2^-11, 2^-8 or 2^-5 where those are too
# many.
LIKELY_BITS, BITS_STEP, NUM_DISTANCES = tl.constexpr(14), tl.constexpr(3), tl.constexpr(4)
NO_SAMPLE = tl.constexpr(sampler.NO_SAMPLE)
INDICES = ["slots", "positions"]


@triton.jit
def _chunk_maxima(
    logits, maxima, places, vocab_size, logits_stride, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Store the largest logit of a chunk, and its first place; infinity if there is a NaN."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    exists = column < vocab_size
    x = tl.load(logits + row * logits_stride + column, mask=exists, other=float("-inf"))
    x = x.to(tl.float32)
    highest = tl.max(tl.where(x < float("inf"), x, float("inf")), 0)
    place = tl.min(tl.where((x == highest) & exists, column, vocab_size - 1), 0)
    tl.store(maxima + row * CHUNKS + chunk, highest)
    tl.store(places + row * CHUNKS + chunk, place)


@triton.jit
def _of_row(values, row, count, OTHER: tl.constexpr, SIZE: tl.constexpr):
    """Load the value of each chunk, or span, of a row `[SIZE]`."""
    place = tl.arange(0, SIZE)
    return tl.load(values + row * SIZE + place, mask=place < count, other=OTHER)


@triton.jit
def _floor_of(min_ps, slot):
    """Return the log2 of the smallest weight that min_p keeps."""
    return tl.log2(tl.maximum(tl.load(min_ps + slot), 1e-37))


@triton.jit(do_not_specialize_on_alignment=INDICES)
def _weigh_spans(
    logits, maxima, slots, temperatures, min_ps, likely, num_likely, likely_bits, num_finite,
    weights, drawn, vocab_size, logits_stride, num_chunks,
    CHUNKS: tl.constexpr, SPANS: tl.constexpr, SPAN: tl.constexpr, LIKELY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store what is known of a span: its likely tokens, how likely they are, and sums."""
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + tl.maximum(slot, 0))
    if (slot >= 0) & (temperature > 0):
        scale, floor = LOG2_E / temperature, _floor_of(min_ps, slot)
        highest = tl.max(_of_row(maxima, row, num_chunks, float("-inf"), CHUNKS), 0)
        place, end = row * SPANS + span, tl.minimum(vocab_size, (span + 1) * SPAN)
        row_logits = logits + row * logits_stride
        finite = tl.zeros([BLOCK], tl.int32)
        all_units, kept_units = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
        bits_of = LIKELY_BITS - BITS_STEP * tl.arange(0, NUM_DISTANCES)
        near = tl.zeros([BLOCK, NUM_DISTANCES], tl.int32)
        for start in range(span * SPAN, end, BLOCK):
            x = scores(row_logits, start, vocab_size, BLOCK)
            distance = (x - highest) * scale
            near += (distance[:, None] >= -bits_of[None, :].to(tl.float32)).to(tl.int32)
            of_token = units(x, highest, scale)
            finite += (x > float("-inf")).to(tl.int32)
            all_units += of_token
            kept_units += tl.where(distance >= floor, of_token, 0)
        # -1: none are listed.
        bits = tl.max(tl.where(tl.sum(near, 0) <= LIKELY, bits_of, -1), 0)
        listed = span * 0
        for start in range(span * SPAN, end, BLOCK):
            x = scores(row_logits, start, vocab_size, BLOCK)
            is_likely = ((x - highest) * scale >= -bits.to(tl.float32)).to(tl.int32)
            index = listed + tl.cumsum(is_likely, 0) - 1
            column = start + tl.arange(0, BLOCK)
            tl.store(likely + place * LIKELY + index, column, mask=is_likely > 0)
            listed += tl.sum(is_likely, 0)
        tl.store(num_likely + place, listed)
        tl.store(likely_bits + place, bits)
        tl.store(num_finite + place, tl.sum(finite, 0))
        tl.store(weights + place, tl.sum(all_units, 0))
        tl.store(drawn + place, tl.sum(kept_units, 0))


@triton.jit
def _largest_with(x, amounts, low, high, needed):
    """Return the largest of some logits such that those from it on are enough.

    Args:
        x: logits, -inf for those that do not exist.
        amounts: what each counts.
        low: one of them that is not above the result.
        high: one of them that is not below the result.
        needed: how much is enough.
    """
    while low < high:
        middle = middle_of(low, high)
        is_above = x > middle
        is_enough = tl.sum(tl.where(is_above, amounts, 0), 0).to(tl.float32) >= needed
        above = tl.min(tl.where(is_above, x, float("inf")), 0)
        below = tl.max(tl.where(is_above, float("-inf"), x), 0)
        low, high = next_bounds(low, high, is_enough, above, below)
    return low


@triton.jit
def _threshold_of_likely(x, of_token, top_k, top_p, num_finite, whole, highest, scale):
    """Return the threshold as threshold_of_row does, and whether the likely tokens suffice."""
    exists = x > float("-inf")
    low = tl.minimum(tl.min(tl.where(exists, x, float("inf")), 0), highest)
    threshold = highest * 0.0 + float("-inf")
    suffices = num_finite >= 0
    if (top_k > 0) & (top_k < num_finite):
        ones = exists.to(tl.int64)
        suffices = tl.sum(ones, 0) >= top_k
        low = _largest_with(x, ones, low, highest, top_k.to(tl.float32))
        threshold = low
        is_above = x > low
        whole = tl.sum(tl.where(is_above, of_token, 0), 0)
        whole += (top_k - tl.sum(is_above.to(tl.int64), 0)) * units(low, highest, scale)
    if top_p < 1:
        needed = top_p * whole.to(tl.float32)
        suffices = suffices & (tl.sum(of_token, 0).to(tl.float32) >= needed)
        threshold = _largest_with(x, of_token, low, highest, needed)
    return threshold, suffices


@triton.jit(do_not_specialize_on_alignment=INDICES)
def _sample(
    logits, maxima, places, likely, num_likely, likely_bits, num_finite, weights, drawn, slots,
    positions, temperatures, top_ks, top_ps, min_ps, seeds, token_ids, known, vocab_size,
    logits_stride, known_stride, num_chunks, num_spans,
    CHUNKS: tl.constexpr, SPANS: tl.constexpr, SPAN: tl.constexpr, LIKELY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots + row), tl.load(positions + row) + 1
    of_chunks = _of_row(maxima, row, num_chunks, float("-inf"), CHUNKS)
    place = _of_row(places, row, num_chunks, 0, CHUNKS)
    highest = tl.max(of_chunks, 0)
    is_first = (of_chunks == highest) & (tl.arange(0, CHUNKS) < num_chunks)
    token = tl.min(tl.where(is_first, place, vocab_size - 1), 0)
    existing = tl.maximum(slot, 0)
    temperature = tl.load(temperatures + existing)
    is_finite = (highest < float("inf")) & (highest > float("-inf"))
    if (slot >= 0) & (temperature > 0) & is_finite:
        row_logits = logits + row * logits_stride
        scale, seed = LOG2_E / temperature, tl.load(seeds + existing)
        top_k, top_p = tl.load(top_ks + existing), tl.load(top_ps + existing)
        floor = _floor_of(min_ps, existing)
        if (top_k > 0) | (top_p < 1):
            index = tl.arange(0, SPANS * LIKELY)
            listed = tl.load(num_likely + row * SPANS + index // LIKELY,
                             mask=index // LIKELY < num_spans, other=0)  # fmt: skip
            exists = index % LIKELY < listed
            of_row = likely + row * (SPANS * LIKELY)
            column = tl.load(of_row + index, mask=exists, other=0)
            x = tl.load(row_logits + column, mask=exists, other=float("-inf")).to(tl.float32)
            bits = tl.min(_of_row(likely_bits, row, num_spans, LIKELY_BITS, SPANS), 0)
            x = tl.where((x - highest) * scale >= -bits.to(tl.float32), x, float("-inf"))
            of_token = units(x, highest, scale)
            finite = tl.sum(_of_row(num_finite, row, num_spans, 0, SPANS), 0)
            whole = tl.sum(_of_row(weights, row, num_spans, 0, SPANS), 0)
            threshold, suffices = _threshold_of_likely(
                x, of_token, top_k, top_p, finite, whole, highest, scale
            )
            if suffices & (bits >= 0):
                kept = (x >= threshold) & ((x - highest) * scale >= floor)
                of_token = tl.where(kept, of_token, 0)
                target = fraction_of(tl.sum(of_token, 0), seed, position)
                passed = tl.sum((tl.cumsum(of_token, 0) <= target).to(tl.int32), 0)
                token = tl.load(of_row + passed, mask=passed < SPANS * LIKELY, other=vocab_size)
            else:
                threshold = threshold_of_row(
                    row_logits, top_k, top_p, highest, scale, vocab_size, BLOCK
                )
                token = draw_from_row(
                    row_logits, threshold, floor, seed, position, highest, scale, vocab_size, BLOCK
                )
        else:
            of_span = _of_row(drawn, row, num_spans, 0, SPANS)
            target = fraction_of(tl.sum(of_span, 0), seed, position)
            passed = tl.cumsum(of_span, 0) <= target
            before = tl.sum(tl.where(passed, of_span, 0), 0)
            begin = tl.sum(passed.to(tl.int32), 0) * SPAN
            token = draw_between(
                row_logits, begin, begin + SPAN, target - before, highest * 0.0 + float("-inf"),
                floor, highest, scale, vocab_size, BLOCK,
            )  # fmt: skip
    token = tl.where(is_finite & (token < vocab_size), token, NO_SAMPLE)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(known + existing * known_stride + position, tl.maximum(token, 0), mask=slot >= 0)


def sample_tokens(
    logits: Tensor, slots: Tensor, positions: Tensor, sampling: SamplingState, known: Tensor
) -> Tensor:
    """Sample the token behind a position of each slot, and write it to the known tokens.

    A row with NaN or infinity, or without a finite number, has no token: the known one is 0.

    Args:
        logits: `[rows, vocab_size]`, which may be strided by row.
        slots: `[rows]` int64; a row with slot -1 is padding, whose token is of no use.
        positions: `[rows]` int64.
        sampling: parameters of all slots.
        known: `[slots, context + 1]` int32, the tokens of every slot.

    Returns:
        `[rows]` int64; -1 for a row without a token.
    """
    rows, vocab_size = logits.shape
    num_chunks, num_spans = triton.cdiv(vocab_size, BLOCK), triton.cdiv(vocab_size, SPAN)
    # With four or more, the parts of one allocation begin at multiples of 16 bytes.
    chunks, spans = (max(4, triton.next_power_of_2(count)) for count in (num_chunks, num_spans))
    num_likely = likely_of_span(spans)
    maxima = torch.empty(rows, chunks, device=logits.device)
    places = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    # A fourth part is not used: with four, each begins at a multiple of 16 bytes.
    counts, bits, finite, _ = torch.empty(4, rows, spans, dtype=torch.int32, device=logits.device)
    weights, drawn = torch.empty(2, rows, spans, dtype=torch.int64, device=logits.device)
    likely = torch.empty(rows, spans, num_likely, dtype=torch.int32, device=logits.device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _chunk_maxima[(rows, num_chunks)](
        logits, maxima, places, vocab_size, logits.stride(0), CHUNKS=chunks, BLOCK=BLOCK,
        num_warps=CHUNK_WARPS,
    )  # fmt: skip
    _weigh_spans[(rows, num_spans)](
        logits, maxima, slots, sampling.temperature, sampling.min_p, likely, counts, bits, finite,
        weights, drawn, vocab_size, logits.stride(0), num_chunks, CHUNKS=chunks, SPANS=spans,
        SPAN=SPAN, LIKELY=num_likely, BLOCK=SPAN_BLOCK, num_warps=CHUNK_WARPS,
    )  # fmt: skip
    _sample[(rows,)](
        logits, maxima, places, likely, counts, bits, finite, weights, drawn, slots, positions,
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed,
        token_ids, known, vocab_size, logits.stride(0), known.stride(0), num_chunks, num_spans,
        CHUNKS=chunks, SPANS=spans, SPAN=SPAN, LIKELY=num_likely, BLOCK=BLOCK, num_warps=ROW_WARPS,
    )  # fmt: skip
    return token_ids


@triton.jit(do_not_specialize_on_alignment=["rows", "masks"])
def _mask_forbidden(
    scores, rows, masks, vocab_size, scores_stride, masks_stride, BLOCK: tl.constexpr
):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < vocab_size
    of_mask = masks + tl.program_id(0).to(tl.int64) * masks_stride
    bits = tl.load(of_mask + column // 8, mask=exists, other=255).to(tl.int32)
    is_forbidden = exists & (((bits >> (column % 8)) & 1) == 0)
    of_row = scores + tl.load(rows + tl.program_id(0)) * scores_stride
    tl.store(of_row + column, float("-inf"), mask=is_forbidden)


def mask_forbidden(scores: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set the scores of tokens that have no bit to -inf.

    Args:
        scores: `[…, vocab_size]`.
        rows: `[rows]` int64 of the scores.
        masks: `[rows, bytes]` uint8, a bit for each token, the lowest id in the lowest bit.
    """
    vocab_size = scores.shape[1]
    _mask_forbidden[(len(rows), triton.cdiv(vocab_size, BLOCK))](
        scores, rows, masks, vocab_size, scores.stride(0), masks.stride(0), BLOCK=BLOCK,
        num_warps=CHUNK_WARPS,
    )  # fmt: skip


def likely_of_span(spans: int) -> int:
    """Return how many likely tokens the list of a span holds, of so many spans in a row."""
    return max(1, MAX_LIKELY // spans)
