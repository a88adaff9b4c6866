"""One token per row: a function of (seed, position, logits, the request's own tokens), whatever
else is in the batch.

The order of what happens to a row's logits is that of transformers and vLLM:

1. log-probabilities are told of the model's own logits (logprobs.py), before anything changes them;
2. logit_bias is added;
3. repetition_penalty multiplies or divides, then frequency_penalty and presence_penalty are
   subtracted: the first counts prompt and generated tokens, the others generated ones only;
4. what may not come is barred: all but allowed_token_ids and what the grammar lets come, bad_words,
   and stop tokens before min_new_tokens (2 to 4: rules.py). A request that bars every token gets
   some token, or with a grammar an error;
5. greedy rows take the likeliest token, the first of equals. The others:
6. divide by the temperature;
7. keep what top_k, then top_p (of what top_k left), then min_p leave;
8. draw.

The filters are kept as a least logit, so that tokens of equal logits stand or fall together and no
sorting order shows. A row's one random number comes from hashing (seed, position); the token is
where the cumulated probabilities pass it (inversion).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 512
"""Columns that are looked at as one where a row is searched, before their places are."""
LIKELY_TOKENS = 256
"""top_p looks at so many of the likeliest tokens first, and sorts a whole row only if it must."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """[rows] each. temperature > 0 where `greedy` is not set; top_k: 0 is off; top_p: 1 is off;
    position: the index of the token to be sampled in its request; min_p: 0 is off, None: off for
    all."""

    greedy: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    position: Tensor
    min_p: Tensor | None = None


def sample(logits: Tensor, rows: SamplingRows | None) -> Tensor:
    """logits: [rows, vocab_size]; `rows` None: all are greedy. Returns token ids [rows] int64."""
    if rows is None or bool(rows.greedy.all()):
        return first_of_greatest(logits)
    scores = _scaled(logits, rows.greedy, rows.temperature)
    least = _least_kept(scores, rows)
    if least is not None:
        scores.masked_fill_(scores < least.unsqueeze(1), float("-inf"))
    drawn = _invert(scores, uniform(rows.seed, rows.position)).clamp_(max=logits.shape[1] - 1)
    return (
        torch.where(rows.greedy, first_of_greatest(logits), drawn) if rows.greedy.any() else drawn
    )


def draw(
    logits: Tensor, greedy: Tensor, temperature: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    """What `sample` gives to rows without filters, without asking the device for anything."""
    scores = _scaled(logits, greedy, temperature)
    drawn = _invert(scores, uniform(seed, position)).clamp_(max=logits.shape[1] - 1)
    return torch.where(greedy, first_of_greatest(logits), drawn)


def _scaled(logits: Tensor, greedy: Tensor, temperature: Tensor) -> Tensor:
    """[rows, a multiple of BLOCK] float32, filled up with -inf."""
    vocab_size = logits.shape[1]
    scores = torch.empty(len(logits), _whole_blocks(vocab_size), device=logits.device)
    scores[:, vocab_size:] = float("-inf")
    temperature = torch.where(greedy, 1.0, temperature).unsqueeze(1)
    torch.div(logits, temperature, out=scores[:, :vocab_size])
    return scores


def first_of_greatest(logits: Tensor) -> Tensor:
    """[rows, vocab_size] to [rows]: exactly argmax, which gives the first of equals, as the sampler
    promises, but is slow on a CPU, where a maximum alone is fast. So find the block that has the
    maximum first, then its place in there. The last block overlaps the one before it.
    """
    vocab_size = logits.shape[1]
    size = min(BLOCK, vocab_size)
    blocks = logits[:, : vocab_size // size * size].unflatten(1, (-1, size))
    maxima = torch.cat((blocks.amax(-1), logits[:, -size:].amax(-1, keepdim=True)), 1)
    starts = (maxima.argmax(-1, keepdim=True) * size).clamp(max=vocab_size - size)
    block = logits.gather(1, starts + torch.arange(size, device=logits.device))
    return starts.squeeze(1) + block.argmax(-1)


def _whole_blocks(columns: int) -> int:
    return -(-columns // BLOCK) * BLOCK


def _invert(scores: Tensor, draws: Tensor) -> Tensor:
    """The first token whose cumulated weight exceeds draws[row] of the whole. [rows]

    scores: [rows, a multiple of BLOCK]; they are overwritten. Cumulating a whole row is slow on a
    CPU: so find the block in which the draw falls first, then its place in there. A product that is
    rounded up to the whole would fall off the end; so would a NaN of a broken model, for which any
    token is as good as another.
    """
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_().unflatten(1, (-1, BLOCK))
    cumulated = weights.sum(-1).cumsum(-1)
    whole = cumulated[:, -1:]
    targets = torch.minimum(draws.unsqueeze(1) * whole, whole.nextafter(torch.zeros_like(whole)))
    block = torch.searchsorted(cumulated, targets, right=True).clamp_(max=weights.shape[1] - 1)
    before = torch.where(block > 0, cumulated.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = weights[torch.arange(len(block), device=block.device), block.squeeze(1)].cumsum(-1)
    place = torch.searchsorted(inside, targets - before, right=True)
    last = torch.searchsorted(inside, inside[:, -1:].contiguous())  # the last that has a weight
    return (block * BLOCK + torch.minimum(place, last)).squeeze(1)


def _least_kept(scores: Tensor, rows: SamplingRows) -> Tensor | None:
    """The least score [rows] that the filters leave; None where none is on."""
    least = _least_by_rank(scores, rows)
    if rows.min_p is None:
        return least
    by_min_p = scores.amax(-1) + rows.min_p.log()
    return by_min_p if least is None else torch.maximum(least, by_min_p)


def _least_by_rank(scores: Tensor, rows: SamplingRows) -> Tensor | None:
    """The least score [rows] that top_k and top_p leave; None where neither is on."""
    by_k, by_p = (rows.top_k > 0) & ~rows.greedy, (rows.top_p < 1) & ~rows.greedy
    if not bool((by_k | by_p).any()):
        return None
    vocab_size = scores.shape[1]
    top_k = torch.where(by_k, rows.top_k, vocab_size).clamp(max=vocab_size)
    most = int(torch.where(by_k, top_k, LIKELY_TOKENS).max())
    top = scores.topk(min(most, vocab_size), -1).values
    least = torch.full_like(rows.top_p, float("-inf"))
    kth = top.gather(1, (top_k.clamp(max=top.shape[1]) - 1).unsqueeze(1)).squeeze(1)
    least = torch.where(by_k, kth, least)
    if bool(by_p.any()):
        least = torch.where(by_p, _least_by_mass(scores, top, top_k, rows.top_p), least)
    return least


def _least_by_mass(scores: Tensor, top: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The score [rows] of the last token that top_p still needs among the top_k likeliest.

    top: [rows, n], the greatest scores in falling order. A row that needs more than n tokens is
    sorted as a whole.
    """
    greatest = top[:, :1]
    mass = _cumulated(top, greatest, top_k)
    unlimited = top_k >= scores.shape[1]
    whole = torch.where(unlimited, (scores - greatest).exp().sum(-1), mass[:, -1])
    needed = top_p * whole
    enough = mass[:, -1] >= needed
    if not bool(enough.all()) and top.shape[1] < scores.shape[1]:
        top = scores.sort(-1, descending=True).values
        mass = _cumulated(top, greatest, top_k)
    last = torch.searchsorted(mass, needed.unsqueeze(1)).clamp(max=top.shape[1] - 1)
    last = torch.minimum(last, top_k.unsqueeze(1) - 1)
    return top.gather(1, last).squeeze(1)


def _cumulated(top: Tensor, greatest: Tensor, top_k: Tensor) -> Tensor:
    weights = (top - greatest).exp_()
    outside = torch.arange(top.shape[1], device=top.device) >= top_k.unsqueeze(1)
    return weights.masked_fill_(outside, 0.0).cumsum(-1)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """[rows] int64 seeds and positions to [rows] float32 in [0, 1), multiples of 2^-24.

    splitmix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"):
    its output function, applied to the seed, is where the sequence of positions begins.
    """
    start = _mix(seed + GOLDEN_GAMMA)
    bits = _mix(start + (position + 1) * GOLDEN_GAMMA)
    return _shift(bits, 40).float() * 2.0**-24


GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64
"""2^64 divided by the golden ratio, as a signed number."""


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ _shift(z, 27)) * (0x94D049BB133111EB - 2**64)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Unsigned shift to the right."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
