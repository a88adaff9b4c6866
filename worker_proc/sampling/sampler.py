"""Sample one token per row by the sampling parameters of its slot.

`sample` draws; `SamplingState` keeps the parameters of all slots.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quadriga.sampling.params import GREEDY_BELOW_TEMPERATURE
from quadriga.wire.worker import NewSlot, SlotSamplingParams
from worker_proc.models.attention import Ints
from worker_proc.models.transfer import send_all
from worker_proc.sampling.grammar import CompiledGrammar, SlotConstraint
from worker_proc.sampling.logits_processors import RowLogits, SlotLogits

# Sample one token per row: a function of seed, position, logits and the request's own tokens.
#
# The token does not depend on the other rows of the batch. The steps have the order of
# transformers and vLLM:
#
# 1. Log-probabilities are taken from the model's own logits (step/outputs.py).
# 2. logit_bias is added.
# 3. repetition_penalty multiplies or divides, then frequency_penalty and presence_penalty are
#    subtracted. The first counts prompt and generated tokens, the others generated tokens only.
# 4. Tokens are masked: those not in allowed_token_ids or not allowed by the grammar, bad_words,
#    and stop tokens before min_new_tokens. If every token is masked, the request gets some token,
#    or with a grammar an error. (logits_processors.py does 2 to 4.) If the model's own logits have
#    NaN or infinity, or no finite number, there is no token, and the request ends with an error.
# 5. Greedy rows take the argmax, the first of equals. The other rows:
# 6. divide by the temperature;
# 7. filter by top_k, then top_p (of the rest), then min_p;
# 8. draw.
#
# A filter is a threshold of the logits, so tokens with equal logits are kept or dropped together,
# and the result does not depend on a sorting order. The random number of a row is a hash of
# (seed, position); the token is where the cumulated probabilities exceed it (inversion).

BLOCK = 512  # columns that are searched as one before a column is
LIKELY_TOKENS = 256  # top_p sorts a whole row only if it needs more tokens
NO_SAMPLE = -1  # in place of the token of a row that is not finite


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of the rows of a step, [rows] each.

    Attributes:
        greedy: take the argmax.
        temperature: positive unless `greedy` is set.
        top_k: 0 is off.
        top_p: 1 is off.
        seed: seed of the request.
        position: index of the token to be sampled in its request.
        min_p: 0 is off; None: off for all rows.
    """

    greedy: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    position: Tensor
    min_p: Tensor | None = None


def sample(logits: Tensor, rows: SamplingRows | None) -> Tensor:
    """Sample from logits [rows, vocab_size]; `rows` None: all are greedy.

    Returns:
        `[rows]` int64: a token, or NO_SAMPLE where a row has NaN or infinity, or no finite number.
    """
    if rows is None:
        return argmax(logits)
    highest = logits.amax(-1)
    scores = _scaled(logits, highest, rows.greedy, rows.temperature)
    threshold = _threshold(scores, rows)
    if threshold is not None:
        scores.masked_fill_(scores < threshold.unsqueeze(1), float("-inf"))
    drawn = _invert(scores, uniform(rows.seed, rows.position)).clamp_(max=logits.shape[1] - 1)
    drawn.masked_fill_(~highest.isfinite(), NO_SAMPLE)
    return torch.where(rows.greedy, argmax(logits), drawn) if rows.greedy.any() else drawn


def _scaled(logits: Tensor, highest: Tensor, greedy: Tensor, temperature: Tensor) -> Tensor:
    """Divide by the temperature. Return float32 scores, padded with -inf to a multiple of BLOCK.

    Logits whose quotient would be infinite are divided after `highest` [rows] is subtracted.
    """
    vocab_size = logits.shape[1]
    columns = -(-vocab_size // BLOCK) * BLOCK
    scores = torch.empty(len(logits), columns, device=logits.device)
    scores[:, vocab_size:] = float("-inf")
    temperature = torch.where(greedy, 1.0, temperature).unsqueeze(1)
    overflows = (highest / temperature.squeeze(1)).isinf()
    if bool(overflows.any()):
        logits = torch.where(overflows.unsqueeze(1), logits - highest.unsqueeze(1), logits)
    torch.div(logits, temperature, out=scores[:, :vocab_size])
    return scores


def argmax(logits: Tensor) -> Tensor:
    """Return the argmax [rows] of logits [rows, vocab_size], the first of equals, or NO_SAMPLE.

    torch's argmax is slow on a CPU, but its maximum is fast. So find the block with the maximum
    first, then the index in the block. The last block overlaps the one before it.
    """
    vocab_size = logits.shape[1]
    size = min(BLOCK, vocab_size)
    blocks = logits[:, : vocab_size // size * size].unflatten(1, (-1, size))
    maxima = torch.cat((blocks.amax(-1), logits[:, -size:].amax(-1, keepdim=True)), 1)
    starts = (maxima.argmax(-1, keepdim=True) * size).clamp(max=vocab_size - size)
    block = logits.gather(1, starts + torch.arange(size, device=logits.device))
    places = starts.squeeze(1) + block.argmax(-1)
    return places.masked_fill_(~maxima.amax(-1).isfinite(), NO_SAMPLE)


def _invert(scores: Tensor, draws: Tensor) -> Tensor:
    """Return the first token [rows] whose cumulated weight exceeds the fraction draws[row].

    Cumulating a whole row is slow on a CPU, so the block is found first, then the index in it. The
    clamps keep an index in range if a product is rounded up to the whole, or if the scores are NaN.

    Args:
        scores: [rows, a multiple of BLOCK], which are overwritten.
        draws: [rows] in [0, 1).
    """
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_().unflatten(1, (-1, BLOCK))
    cumulated = weights.sum(-1).cumsum(-1)
    whole = cumulated[:, -1:]
    targets = torch.minimum(draws.unsqueeze(1) * whole, whole.nextafter(torch.zeros_like(whole)))
    block = torch.searchsorted(cumulated, targets, right=True).clamp_(max=weights.shape[1] - 1)
    before = torch.where(block > 0, cumulated.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = weights[torch.arange(len(block), device=block.device), block.squeeze(1)].cumsum(-1)
    index = torch.searchsorted(inside, targets - before, right=True)
    last = torch.searchsorted(inside, inside[:, -1:].contiguous())  # the last one with a weight
    return (block * BLOCK + torch.minimum(index, last)).squeeze(1)


def _threshold(scores: Tensor, rows: SamplingRows) -> Tensor | None:
    """Return the smallest score [rows] that the filters keep; None if none is on."""
    threshold = _rank_threshold(scores, rows)
    if rows.min_p is None:
        return threshold
    by_min_p = scores.amax(-1) + rows.min_p.log()
    return by_min_p if threshold is None else torch.maximum(threshold, by_min_p)


def _rank_threshold(scores: Tensor, rows: SamplingRows) -> Tensor | None:
    """Return the smallest score [rows] that top_k and top_p keep; None if neither is on."""
    by_k, by_p = (rows.top_k > 0) & ~rows.greedy, (rows.top_p < 1) & ~rows.greedy
    if not bool((by_k | by_p).any()):
        return None
    vocab_size = scores.shape[1]
    top_k = torch.where(by_k, rows.top_k, vocab_size).clamp(max=vocab_size)
    num_top = int(torch.where(by_k, top_k, LIKELY_TOKENS).max())
    top = scores.topk(min(num_top, vocab_size), -1).values
    threshold = torch.full_like(rows.top_p, float("-inf"))
    kth = top.gather(1, (top_k.clamp(max=top.shape[1]) - 1).unsqueeze(1)).squeeze(1)
    threshold = torch.where(by_k, kth, threshold)
    if bool(by_p.any()):
        by_mass = _mass_threshold(scores, top, top_k, rows.top_p)
        threshold = torch.where(by_p, by_mass, threshold)
    return threshold


def _mass_threshold(scores: Tensor, top: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the score [rows] of the last token that top_p keeps among the top_k likeliest.

    Args:
        scores: [rows, columns].
        top: [rows, n] the largest scores in descending order. If a row needs more than n tokens,
            whole rows are sorted.
        top_k: [rows] between 1 and vocab_size.
        top_p: [rows].
    """
    maximum = top[:, :1]
    mass = _cumulate(top, maximum, top_k)
    unlimited = top_k >= scores.shape[1]
    whole = torch.where(unlimited, (scores - maximum).exp().sum(-1), mass[:, -1])
    needed = top_p * whole
    enough = mass[:, -1] >= needed
    if not bool(enough.all()) and top.shape[1] < scores.shape[1]:
        top = scores.sort(-1, descending=True).values
        mass = _cumulate(top, maximum, top_k)
    last = torch.searchsorted(mass, needed.unsqueeze(1)).clamp(max=top.shape[1] - 1)
    last = torch.minimum(last, top_k.unsqueeze(1) - 1)
    return top.gather(1, last).squeeze(1)


def _cumulate(top: Tensor, maximum: Tensor, top_k: Tensor) -> Tensor:
    weights = (top - maximum).exp_()
    outside = torch.arange(top.shape[1], device=top.device) >= top_k.unsqueeze(1)
    return weights.masked_fill_(outside, 0.0).cumsum(-1)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Hash [rows] int64 seeds and positions to [rows] float32 in [0, 1), multiples of 2^-24.

    splitmix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"). Its
    output function, applied to the seed, gives the start of the sequence of positions.
    """
    start = _mix(seed + GOLDEN_GAMMA)
    bits = _mix(start + (position + 1) * GOLDEN_GAMMA)
    return _shift(bits, 40).float() * 2.0**-24


GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, as a signed number


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ _shift(z, 27)) * (0x94D049BB133111EB - 2**64)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right, as an unsigned number."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


class SamplingState:
    """Sampling parameters of every slot.

    Attributes:
        temperature, top_k, top_p, min_p, seed: [slots] on the device; temperature 0 is greedy,
            top_k 0 is off.
        greedy: [slots] on the host.
        greedy_only: [slots] on the host: greedy, without logits processors and logprobs.
        unprocessed: [slots] on the host: without logits processors and logprobs. The token follows
            from the model's logits and the parameters above.
        uses_min_p: [slots] on the host.
        prompt_logprobs: parameters of the slots that ask for prompt logprobs.
        compiled: grammars that slots can have, by key.
        accept_tokens: waits until the grammars of all slots have accepted the tokens of the last
            step, in which some of them took part; None: they have.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self.temperature = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.top_p = torch.ones(num_slots, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.seed = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.greedy = np.zeros(num_slots, dtype=np.bool_)
        self.greedy_only = np.zeros(num_slots, dtype=np.bool_)
        self.unprocessed = np.zeros(num_slots, dtype=np.bool_)
        self.uses_min_p = np.zeros(num_slots, dtype=np.bool_)
        self.prompt_logprobs: dict[int, SlotSamplingParams] = {}
        self._logits: dict[int, SlotLogits] = {}
        self.compiled: Mapping[bytes, CompiledGrammar] = {}
        self.accept_tokens: Callable[[], object] | None = None

    def admit(self, new: Sequence[NewSlot]) -> None:
        """Store the parameters of new requests."""
        for request in new:
            slot, rules = request.slot, request.rules
            greedy = request.temperature < GREEDY_BELOW_TEMPERATURE or request.top_k == 1
            self.greedy[slot] = greedy
            self.greedy_only[slot] = greedy and rules is None
            self.unprocessed[slot] = True
            self.uses_min_p[slot] = rules is not None and rules.min_p > 0
            if rules is not None:
                grammar = self._grammar(request, rules) if rules.grammar else None
                self._logits[slot] = of_slot = SlotLogits(rules, self._device, grammar)
                self.unprocessed[slot] = of_slot.only_filters
                if rules.prompt_logprobs is not None:
                    self.prompt_logprobs[slot] = rules
        temperatures = [0.0 if self.greedy[one.slot] else one.temperature for one in new]
        slots, *values = send_all(
            self._device,
            np.array([request.slot for request in new], dtype=np.int64),
            np.array(temperatures, dtype=np.float32),
            np.array([max(request.top_k, 0) for request in new], dtype=np.int64),
            np.array([request.top_p for request in new], dtype=np.float32),
            np.array([r.rules.min_p if r.rules else 0.0 for r in new], dtype=np.float32),
            np.array([request.seed for request in new], dtype=np.int64),
        )
        tables = (self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
        for table, of_slots in zip(tables, values, strict=True):
            table[slots] = of_slots

    def _grammar(self, request: NewSlot, rules: SlotSamplingParams) -> SlotConstraint:
        if rules.grammar not in self.compiled:
            raise ValueError(f"slot {request.slot}: the plan names a grammar that is not compiled")
        generated = np.frombuffer(request.token_ids, dtype="<i4")[rules.num_prompt :]
        stop_ids = np.frombuffer(rules.stop_ids, dtype="<i4")
        return self.compiled[rules.grammar].begin(stop_ids, generated, rules.jumps)

    def release(self, slots: list[int]) -> None:
        """Forget the parameters of these slots."""
        if not self._logits:
            return
        for slot in slots:
            self._logits.pop(slot, None)
            self.prompt_logprobs.pop(slot, None)

    def sampling_rows(self, slots: Ints, positions: Ints) -> SamplingRows | None:
        """Return the sampler's parameters of these slots; None if all of them are greedy.

        Args:
            slots: [rows] on the host.
            positions: [rows] on the host, the index of the token to be sampled.
        """
        greedy = self.greedy[slots]
        if greedy.all():
            return None
        device_slots, device_positions, device_greedy = send_all(
            self._device, slots, positions, greedy
        )
        return SamplingRows(
            greedy=device_greedy,
            temperature=self.temperature[device_slots],
            top_k=self.top_k[device_slots],
            top_p=self.top_p[device_slots],
            min_p=self.min_p[device_slots] if self.uses_min_p[slots].any() else None,
            seed=self.seed[device_slots],
            position=device_positions,
        )

    def row_logits(self, slots: Ints) -> list[RowLogits]:
        """Return the rows that have logits processors or logprobs.

        Their grammars have accepted all tokens of earlier steps, which the host may have to wait
        for.

        Args:
            slots: [rows] of a slot with drafts, those after them follow the first one.
        """
        if not self._logits:
            return []
        rows = []
        before, place = -1, 0
        for row, slot in enumerate(slots.tolist()):
            place = place + 1 if slot == before else 0
            before = slot
            if rules := self._logits.get(slot):
                after = rules.after_drafts
                grammar = after[place - 1] if place and after else rules.grammar
                rows.append(RowLogits(row, slot, rules, grammar))
        if any(row.grammar is not None and not row.grammar.is_over for row in rows):
            self._catch_up()
        return rows

    def _catch_up(self) -> None:
        """Let the grammars accept the tokens of the last step."""
        if self.accept_tokens is not None:
            self.accept_tokens()
            self.accept_tokens = None

    def grammar_of(self, slot: int) -> SlotConstraint | None:
        """Return the state of a slot's grammar, or of the reasoning before it."""
        self._catch_up()
        rules = self._logits.get(slot)
        return None if rules is None else rules.grammar

    def follow_drafts(self, slot: int, token_ids: Sequence[int]) -> list[int]:
        """Note the states of a slot's grammar after drafts, for one step.

        Returns:
            The drafts as far as the grammar allows them, and before a token that ends the request.
        """
        rules = self._logits.get(slot)
        if rules is None or rules.grammar is None:
            return list(token_ids)
        self._catch_up()
        state, rules.after_drafts = rules.grammar, []
        for token in token_ids:
            state = state.copy()
            if state.ends_with(token) or state.advance(token):
                break
            rules.after_drafts.append(state)
        return list(token_ids[: len(rules.after_drafts)])
