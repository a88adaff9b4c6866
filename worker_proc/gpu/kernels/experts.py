"""A mixture of experts on a GPU: the kernels, then `GroupedExperts`, which computes a layer's."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_proc.gpu.kernels.adapters import StepAdapters
from worker_proc.gpu.kernels.matmul import dot
from worker_proc.gpu.kernels.rows import gate_up
from worker_proc.models.base import Model
from worker_proc.models.layers import Experts, Linear

# Products of a mixture of experts: rows that chose the same expert are multiplied together.
#
# The rows are sorted by expert and cut into blocks on the device, with shapes that depend on the
# number of tokens alone: nothing waits for the host, and a CUDA graph can contain all of it. A
# block has one size and each sum one order, so that a row's numbers do not depend on the others.

BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH = 32, 64, 64
BLOCK = 1024
ROUTED_PAIRS = 128  # of a program that routes
ROUTING_WARPS = 8  # so that a program's pairs fit into registers
COUNTED = 16  # programs whose counts are read at a time
# Arguments that are parts of one tensor, which begin at any place of it.
ROUTED = ("order", "chosen", "counts", "pairs", "places", "starts", "block_experts",
          "block_firsts", "block_lasts")  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """Which experts the tokens of a step have chosen, sorted by expert: `pairs` of both.

    Attributes:
        weights: `[tokens, num_chosen]` float32, of the chosen experts, the best one first.
        chosen: `[tokens, num_chosen]` int32, their numbers.
        places: `[tokens, num_chosen]` int32, where each pair is among the sorted ones.
        pairs: `[pairs]` int32, token * num_chosen + place among its chosen experts, sorted by
            expert and then in the order of the tokens.
        starts: `[num_experts + 1]` int32, the first pair of each expert; the last one: all pairs.
        block_experts: `[blocks]` int32, of each block; num_experts: the block is empty.
        block_firsts, block_lasts: `[blocks]` int32, its places in `pairs`, the last one excluded;
            undefined for empty blocks.
    """

    weights: Tensor
    chosen: Tensor
    places: Tensor
    pairs: Tensor
    starts: Tensor
    block_experts: Tensor
    block_firsts: Tensor
    block_lasts: Tensor


@triton.jit
def _tokens_of(order, tokens, TOKENS: tl.constexpr, HAS_ORDER: tl.constexpr):
    """Return the tokens of a program, and whether each exists."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < tokens
    if HAS_ORDER:
        token = tl.load(order + token, mask=is_token, other=0).to(tl.int32)
    return token, is_token


@triton.jit
def _best_experts(
    scores, weights, token, is_token,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, RENORMALIZE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_CHOSEN: tl.constexpr,
):  # fmt: skip
    """Store the weights of each token's best experts, and return their numbers.

    A key has the bits of a score, which are ordered like integers once those of negative numbers
    are inverted, and then the expert, so that of equal scores the first expert is better. NaN is
    the largest number, as in torch.
    """
    expert = tl.arange(0, BLOCK_EXPERTS)
    place = tl.arange(0, BLOCK_CHOSEN)
    wanted = is_token[:, None] & (expert < EXPERTS)[None, :]
    at = token.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    score = tl.load(scores + at, mask=wanted, other=float("-inf")).to(tl.float32)
    score = tl.where(is_token[:, None], score, 0.0)
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(score == 0.0, 0, bits)  # of -0
    bits = tl.where(score != score, 0x7FC00000, bits)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (bits.to(tl.int64) << 32) | (BLOCK_EXPERTS - 1 - expert)[None, :].to(tl.int64)
    numbers = tl.zeros([TOKENS, BLOCK_CHOSEN], tl.int32)
    best = tl.full([TOKENS, BLOCK_CHOSEN], float("-inf"), tl.float32)
    for i in tl.static_range(CHOSEN):
        key = tl.max(keys, 1)
        number = BLOCK_EXPERTS - 1 - (key & (BLOCK_EXPERTS - 1)).to(tl.int32)
        bits_of_best = (key >> 32).to(tl.int32)
        bits_of_best = bits_of_best ^ ((bits_of_best >> 31) & 0x7FFFFFFF)
        value = bits_of_best.to(tl.float32, bitcast=True)
        keys = tl.where(expert[None, :] == number[:, None], -0x7FFFFFFFFFFFFFFF, keys)
        numbers = tl.where((place == i)[None, :], number[:, None], numbers)
        best = tl.where((place == i)[None, :], value[:, None], best)
    highest = tl.max(score, 1)
    parts = tl.exp(best - highest[:, None])
    total = tl.sum(parts, 1) if RENORMALIZE else tl.sum(tl.exp(score - highest[:, None]), 1)
    at = token[:, None] * CHOSEN + place[None, :]
    exists = is_token[:, None] & (place < CHOSEN)[None, :]
    tl.store(weights + at, parts / total[:, None], mask=exists)
    return numbers


@triton.jit
def _sort_pairs(
    expert_of, pair, total, before, pairs, places, starts, block_experts, block_firsts,
    block_lasts, num_pairs, num_blocks,
    EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Store the places of a program's pairs, where experts begin, and its part of the blocks.

    `expert_of` [PAIRS] is BLOCK_EXPERTS for pairs that do not exist, `total` [BLOCK_EXPERTS] counts
    the pairs of each expert, `before` those of earlier programs.
    """
    expert = tl.arange(0, BLOCK_EXPERTS)
    first = tl.cumsum(total, 0) - total
    is_of = expert_of[:, None] == expert[None, :]
    place = tl.sum(tl.where(is_of, (first + before)[None, :], 0), 1)
    number = tl.arange(0, PAIRS)
    is_alike = expert_of[:, None] == expert_of[None, :]
    is_earlier = number[None, :] < number[:, None]
    place += tl.sum((is_alike & is_earlier).to(tl.int32), 1)
    exists = expert_of < BLOCK_EXPERTS
    tl.store(pairs + place, pair, mask=exists)
    tl.store(places + pair, place, mask=exists)

    program, num_programs = tl.program_id(0), tl.num_programs(0)
    if program == 0:
        tl.store(starts + expert, first, mask=expert < EXPERTS)
        tl.store(starts + EXPERTS, num_pairs)
    blocks = (total + BLOCK_ROWS - 1) // BLOCK_ROWS
    first_block = tl.cumsum(blocks, 0) - blocks
    num_filled = tl.sum(blocks, 0)
    for start in range(program * BLOCK_EXPERTS, num_blocks, num_programs * BLOCK_EXPERTS):
        block = start + expert
        is_empty = (block >= num_filled) & (block < num_blocks)
        tl.store(block_experts + block, EXPERTS + expert * 0, mask=is_empty)
    for i in range(program, tl.max(blocks, 0), num_programs):
        is_block = i < blocks
        begin = first + i * BLOCK_ROWS
        end = tl.minimum(begin + BLOCK_ROWS, first + total)
        tl.store(block_experts + first_block + i, expert, mask=is_block)
        tl.store(block_firsts + first_block + i, begin, mask=is_block)
        tl.store(block_lasts + first_block + i, end, mask=is_block)


@triton.jit(do_not_specialize=["tokens", "num_blocks"], do_not_specialize_on_alignment=ROUTED)
def _route(
    scores, order, weights, chosen, counts, pairs, places, starts, block_experts, block_firsts,
    block_lasts, tokens, num_blocks,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, RENORMALIZE: tl.constexpr, ALONE: tl.constexpr,
    HAS_ORDER: tl.constexpr, TOKENS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    token, is_token = _tokens_of(order, tokens, TOKENS, HAS_ORDER)
    place = tl.arange(0, BLOCK_CHOSEN)
    numbers = _best_experts(
        scores, weights, token, is_token, EXPERTS, CHOSEN, RENORMALIZE, TOKENS, BLOCK_EXPERTS,
        BLOCK_CHOSEN,
    )  # fmt: skip
    exists = is_token[:, None] & (place < CHOSEN)[None, :]
    pair = token[:, None] * CHOSEN + place[None, :]
    tl.store(chosen + pair, numbers, mask=exists)
    PAIRS: tl.constexpr = TOKENS * BLOCK_CHOSEN
    expert_of = tl.reshape(tl.where(exists, numbers, BLOCK_EXPERTS), [PAIRS])
    expert = tl.arange(0, BLOCK_EXPERTS)
    count = tl.sum((expert_of[:, None] == expert[None, :]).to(tl.int32), 0)
    if ALONE:
        _sort_pairs(
            expert_of, tl.reshape(pair, [PAIRS]), count, count * 0, pairs, places, starts,
            block_experts, block_firsts, block_lasts, tokens * CHOSEN, num_blocks, EXPERTS,
            BLOCK_EXPERTS, PAIRS, BLOCK_ROWS,
        )  # fmt: skip
    else:
        tl.store(counts + program * BLOCK_EXPERTS + expert, count)


@triton.jit(do_not_specialize=["tokens", "num_blocks"], do_not_specialize_on_alignment=ROUTED)
def _sort(
    order, chosen, counts, pairs, places, starts, block_experts, block_firsts, block_lasts, tokens,
    num_blocks,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, HAS_ORDER: tl.constexpr, TOKENS: tl.constexpr,
    COUNTED: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_CHOSEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    expert = tl.arange(0, BLOCK_EXPERTS)
    total = tl.zeros([BLOCK_EXPERTS], tl.int32)
    before = tl.zeros([BLOCK_EXPERTS], tl.int32)
    for start in range(0, num_programs, COUNTED):
        other = start + tl.arange(0, COUNTED)
        at = other[:, None] * BLOCK_EXPERTS + expert[None, :]
        count = tl.load(counts + at, mask=(other < num_programs)[:, None], other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where((other < program)[:, None], count, 0), 0)
    token, is_token = _tokens_of(order, tokens, TOKENS, HAS_ORDER)
    place = tl.arange(0, BLOCK_CHOSEN)
    exists = is_token[:, None] & (place < CHOSEN)[None, :]
    pair = token[:, None] * CHOSEN + place[None, :]
    numbers = tl.load(chosen + pair, mask=exists, other=BLOCK_EXPERTS)
    PAIRS: tl.constexpr = TOKENS * BLOCK_CHOSEN
    _sort_pairs(
        tl.reshape(numbers, [PAIRS]), tl.reshape(pair, [PAIRS]), total, before, pairs, places,
        starts, block_experts, block_firsts, block_lasts, tokens * CHOSEN, num_blocks, EXPERTS,
        BLOCK_EXPERTS, PAIRS, BLOCK_ROWS,
    )  # fmt: skip


def route_pairs(
    scores: Tensor, num_chosen: int, renormalize: bool, order: Tensor | None = None
) -> ExpertRouting:
    """Choose the experts of each token as `layers.route` does, and sort the pairs by expert.

    One kernel for steps of few tokens, two for others.

    Args:
        scores: contiguous `[tokens, num_experts]`.
        num_chosen: experts of a token.
        renormalize: the weights of the chosen experts add up to 1.
        order: `[tokens]` the numbers of the tokens in the order that the pairs of an expert get;
            None: ascending.
    """
    tokens, num_experts = scores.shape
    num_pairs = tokens * num_chosen
    num_blocks = num_pairs // BLOCK_ROWS + min(num_experts, num_pairs)
    block_chosen = triton.next_power_of_2(num_chosen)
    block_tokens = max(1, ROUTED_PAIRS // block_chosen)
    block_experts = max(16, triton.next_power_of_2(num_experts))
    programs = triton.cdiv(tokens, block_tokens)
    ids = torch.empty(
        3 * num_pairs + num_experts + 1 + 3 * num_blocks, dtype=torch.int32, device=scores.device
    )
    sizes = [num_pairs] * 3 + [num_experts + 1] + [num_blocks] * 3
    chosen, places, pairs, starts, *blocks = ids.split(sizes)
    weights = torch.empty(tokens, num_chosen, device=scores.device)
    counts = chosen  # not written by a program that is alone
    if programs > 1:
        counts = ids.new_empty(programs, block_experts)
    shape = {
        "EXPERTS": num_experts, "CHOSEN": num_chosen, "TOKENS": block_tokens,
        "BLOCK_EXPERTS": block_experts, "BLOCK_CHOSEN": block_chosen, "BLOCK_ROWS": BLOCK_ROWS,
        "HAS_ORDER": order is not None,
    }  # fmt: skip
    order = chosen if order is None else order
    _route[(programs,)](
        scores, order, weights, chosen, counts, pairs, places, starts, *blocks, tokens, num_blocks,
        RENORMALIZE=renormalize, ALONE=programs == 1, num_warps=ROUTING_WARPS, **shape,
    )  # fmt: skip
    if programs > 1:
        _sort[(programs,)](
            order, chosen, counts, pairs, places, starts, *blocks, tokens, num_blocks,
            COUNTED=COUNTED, num_warps=ROUTING_WARPS, **shape,
        )  # fmt: skip
    by_token = (tokens, num_chosen)
    return ExpertRouting(
        weights, chosen.view(by_token), places.view(by_token), pairs, starts, *blocks
    )


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of one projection of every expert, where they are in memory.

    Attributes:
        addresses: `[num_experts]` int64, of contiguous weights `[outputs, inputs]`.
        bias_addresses: `[num_experts]` int64, of their biases `[outputs]`, or None.
        num_outputs: rows of a weight.
    """

    addresses: Tensor
    bias_addresses: Tensor | None
    num_outputs: int


@triton.jit(do_not_specialize_on_alignment=ROUTED)
def _multiply_experts(
    x, weights, biases, out, pairs, block_experts, block_firsts, block_lasts, columns, depth,
    CHOSEN: tl.constexpr, NUM_EXPERTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    SORTED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    expert = tl.load(block_experts + block)
    if expert < NUM_EXPERTS:
        place = tl.load(block_firsts + block) + tl.arange(0, BLOCK_ROWS)
        is_row = place < tl.load(block_lasts + block)
        x_row = place.to(tl.int64)
        if not SORTED:
            pair = tl.load(pairs + place, mask=is_row, other=0)
            x_row = (pair // CHOSEN).to(tl.int64)
        kind = tl.pointer_type(x.dtype.element_ty)
        weight = tl.multiple_of(tl.load(weights + expert).to(kind), 16)
        column = (tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)).to(tl.int64)
        is_column = column < columns
        sums = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for start in range(0, depth, BLOCK_DEPTH):
            k = start + tl.arange(0, BLOCK_DEPTH)
            places = x_row[:, None] * depth + k[None, :]
            tile = tl.load(x + places, mask=is_row[:, None] & (k < depth)[None, :], other=0.0)
            places = column[None, :] * depth + k[:, None]
            wanted = is_column[None, :] & (k < depth)[:, None]
            sums += dot(tile, tl.load(weight + places, mask=wanted, other=0.0))
        if HAS_BIAS:
            bias = tl.load(biases + expert).to(kind)
            sums += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        places = place.to(tl.int64)[:, None] * columns + column[None, :]
        wanted = is_row[:, None] & is_column[None, :]
        tl.store(out + places, sums.to(out.dtype.element_ty), mask=wanted)


def multiply_experts(
    x: Tensor, weights: ExpertWeights, routing: ExpertRouting, is_sorted: bool
) -> Tensor:
    """Multiply rows by the weights of their experts.

    Args:
        x: contiguous `[tokens, inputs]`, or, if `is_sorted`, `[pairs, inputs]` in the order of the
            sorted pairs.
        weights: the experts' weights, of x's dtype.
        routing: the sorted pairs.
        is_sorted: see x.

    Returns:
        `[pairs, outputs]` in x's dtype, in the order of the sorted pairs.
    """
    columns, num_chosen = weights.num_outputs, routing.chosen.shape[1]
    out = x.new_empty(len(routing.pairs), columns)
    biases = weights.bias_addresses
    _multiply_experts[(len(routing.block_experts), triton.cdiv(columns, BLOCK_COLUMNS))](
        x, weights.addresses, weights.addresses if biases is None else biases, out, routing.pairs,
        routing.block_experts, routing.block_firsts, routing.block_lasts, columns, x.shape[1],
        CHOSEN=num_chosen, NUM_EXPERTS=len(weights.addresses), HAS_BIAS=biases is not None,
        SORTED=is_sorted, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLUMNS=BLOCK_COLUMNS,
        BLOCK_DEPTH=BLOCK_DEPTH,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=ROUTED)
def _gather_rows(
    x, out, pairs, chosen, orders,
    WIDTH: tl.constexpr, CHOSEN: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < WIDTH
    pair = tl.load(pairs + place)
    source = column
    if HAS_ORDER:
        expert = tl.load(chosen + pair).to(tl.int64)
        source = tl.load(orders + expert * WIDTH + column, mask=exists, other=0)
    values = tl.load(x + (pair // CHOSEN).to(tl.int64) * WIDTH + source, mask=exists)
    tl.store(out + place * WIDTH + column, values, mask=exists)


def gather_rows(x: Tensor, routing: ExpertRouting, orders: Tensor | None = None) -> Tensor:
    """Return the row of the token of each sorted pair.

    Args:
        x: contiguous `[tokens, width]`.
        routing: the sorted pairs.
        orders: `[num_experts, width]` int32, the column of x that is each column of a row of an
            expert; None: in order.

    Returns:
        `[pairs, width]`.
    """
    width, num_pairs = x.shape[1], len(routing.pairs)
    out = x.new_empty(num_pairs, width)
    _gather_rows[(num_pairs, triton.cdiv(width, BLOCK))](
        x, out, routing.pairs, routing.chosen, routing.chosen if orders is None else orders,
        WIDTH=width, CHOSEN=routing.chosen.shape[1], HAS_ORDER=orders is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=ROUTED)
def _sum_experts(
    outputs, weights, places, out, WIDTH: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(CHOSEN):
        pair = row * CHOSEN + number
        place = tl.load(places + pair).to(tl.int64)
        output = tl.load(outputs + place * WIDTH + column, mask=exists, other=0.0)
        total += output.to(tl.float32) * tl.load(weights + pair)
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=exists)


def sum_experts(outputs: Tensor, routing: ExpertRouting) -> Tensor:
    """Return the weighted sums of the outputs of each token's experts.

    Args:
        outputs: contiguous `[pairs, hidden]`, in the order of the sorted pairs.
        routing: the sorted pairs.

    Returns:
        `[tokens, hidden]` in the dtype of `outputs`.
    """
    (tokens, num_chosen), width = routing.weights.shape, outputs.shape[1]
    out = outputs.new_empty(tokens, width)
    _sum_experts[(tokens, triton.cdiv(width, BLOCK))](
        outputs, routing.weights, routing.places, out, WIDTH=width, CHOSEN=num_chosen, BLOCK=BLOCK
    )
    return out


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """The experts of a layer, whose dense weights stay where they are.

    Attributes:
        experts: the layer.
        dense: the addresses of its gate and up weights, and of its down weights; None: it has
            products of weights in fewer bits.
    """

    experts: Experts
    dense: tuple[ExpertWeights, ExpertWeights] | None

    def output(self, x: Tensor, scores: Tensor, adapted: StepAdapters | None = None) -> Tensor:
        """Return the weighted sum of each token's experts, without synchronising with the host.

        Args:
            x: `[tokens, hidden]`.
            scores: `[tokens, num_experts]` the outputs of the router.
            adapted: the tokens that have adapters, if any do.

        Returns:
            `[tokens, hidden]`.
        """
        experts = self.experts
        routing = self._route(scores, None if adapted is None else adapted.groups.order)
        inner = self._gate_and_up(x, routing)
        if adapted is not None:
            groups = adapted.of_pairs(routing.pairs, routing.chosen, len(experts.gate_up))
            adapted.adapt_pairs(experts.gate_up, x, inner, groups, False)
        inner = gate_up(inner, experts.activation)
        outputs = self._down(inner, routing)
        if adapted is not None:
            adapted.adapt_pairs(experts.down, inner, outputs, groups, True)
        return sum_experts(outputs, routing)

    def compile_routing(
        self, dtype: torch.dtype, device: torch.device, with_adapters: bool
    ) -> None:
        """Compile what steps of few and of many tokens launch to choose experts."""
        num_experts = len(self.experts.gate_up)
        for tokens in (1, ROUTED_PAIRS + 1):
            scores = torch.zeros(tokens, num_experts, dtype=dtype, device=device)
            self._route(scores, None)
            if with_adapters:
                self._route(scores, torch.arange(tokens, device=device))

    def _route(self, scores: Tensor, order: Tensor | None) -> ExpertRouting:
        experts = self.experts
        return route_pairs(scores, experts.num_chosen, experts.renormalize, order)

    def _gate_and_up(self, x: Tensor, routing: ExpertRouting) -> Tensor:
        """Return [gate, up] of each pair, `[pairs, 2 * inner]`."""
        if self.dense is not None:
            return multiply_experts(x, self.dense[0], routing, False)
        assert self.experts.products is not None
        product = self.experts.products[0]
        return product(gather_rows(x, routing, product.orders), routing.starts)

    def _down(self, inner: Tensor, routing: ExpertRouting) -> Tensor:
        """Return the output of each pair, `[pairs, hidden]`."""
        if self.dense is not None:
            return multiply_experts(inner, self.dense[1], routing, True)
        assert self.experts.products is not None
        return self.experts.products[1](inner, routing.starts)


def grouped_experts(model: Model) -> dict[Experts, GroupedExperts]:
    """Note where the dense weights of all experts of a model are."""
    return {
        module: GroupedExperts(
            module,
            (
                _expert_weights(cast(Iterable[Linear], module.gate_up)),
                _expert_weights(cast(Iterable[Linear], module.down)),
            )
            if module.products is None
            else None,
        )
        for module in model.modules()
        if isinstance(module, Experts)
    }


def _expert_weights(projections: Iterable[Linear]) -> ExpertWeights:
    projections = list(projections)
    weights = [projection.weight for projection in projections]
    biases = [projection.bias for projection in projections if projection.bias is not None]
    for weight in weights:  # as the kernel reads it
        assert weight.is_contiguous()
        assert weight.data_ptr() % 16 == 0
    return ExpertWeights(
        _addresses(weights), _addresses(biases) if biases else None, len(weights[0])
    )


def _addresses(tensors: list[Tensor]) -> Tensor:
    addresses = [tensor.data_ptr() for tensor in tensors]
    return torch.tensor(addresses, dtype=torch.int64, device=tensors[0].device)
