"""What changes logits before they are sampled from: bias, penalties, and tokens that are barred.

The order is written down in sampler.py. Nothing is kept from step to step: penalties and bad words
are worked out from the tokens that are known of a slot, so that a request goes on in another slot,
or after a restart, exactly as it would have. All rows of a step are changed together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from quadriga.wire.messages.worker import SlotSamplingParams
from worker_proc.attention.base import Ints
from worker_proc.sampling.grammar_mask import BARRED, Constrained, SlotGrammar, mask_by_grammar

ANY_TOKEN = -1
"""In the beginning of a bad word: the place before its first token."""
NO_TOKEN = -2


class SlotLogits:
    """SlotSamplingParams of one slot, their lists on the device.

    bad_word_beginnings: [words, longest - 1], filled up with ANY_TOKEN from the left;
    bad_word_ends: [words]. grammar: of the slot, where it has one.
    """

    def __init__(
        self, rules: SlotSamplingParams, device: torch.device, grammar: SlotGrammar | None = None
    ) -> None:
        self.grammar = grammar
        self.num_prompt = rules.num_prompt
        self.repetition_penalty = rules.repetition_penalty
        self.frequency_penalty = rules.frequency_penalty
        self.presence_penalty = rules.presence_penalty
        self.counts_generated = rules.frequency_penalty != 0.0 or rules.presence_penalty != 0.0
        self.penalises = self.counts_generated or rules.repetition_penalty != 1.0
        self.min_new_tokens = rules.min_new_tokens
        self.logprobs = rules.logprobs
        self.prompt_logprobs = rules.prompt_logprobs
        self.bias_ids = _ids(rules.bias_ids, device)
        self.bias = torch.from_numpy(np.frombuffer(rules.bias, dtype="<f4").copy()).to(device)
        self.allowed_ids = _ids(rules.allowed_ids, device)
        self.stop_ids = _ids(rules.stop_ids, device)
        self.bad_word_beginnings, self.bad_word_ends = _bad_words(rules.bad_words, device)
        self.changes_logits = (
            self.penalises
            or rules.min_new_tokens > 0
            or bool(rules.bias_ids or rules.allowed_ids or rules.bad_words or rules.grammar)
        )


class RowLogits(NamedTuple):
    """One row of a step: its place, its slot and its rules."""

    row: int
    slot: int
    rules: SlotLogits


def apply_logits_processors(
    logits: Tensor, rows: Sequence[RowLogits], positions: Ints, tokens: Tensor
) -> Tensor:
    """A float32 copy of logits [rows, vocab_size] with the rules of these rows applied.

    positions: [rows of the step], on the host: the index of the token to be sampled. tokens:
    [slots, context + 1], all that are known, on the device.
    """
    scores = logits.to(torch.float32, copy=True)
    _add_bias(scores, [one for one in rows if len(one.rules.bias_ids)])
    _penalise(scores, [one for one in rows if one.rules.penalises], positions, tokens)
    _bar_all_but_allowed(scores, [one for one in rows if len(one.rules.allowed_ids)])
    mask_by_grammar(scores, constrained(rows))
    _bar_bad_words(scores, [one for one in rows if len(one.rules.bad_word_ends)], positions, tokens)
    _bar_stops(scores, [one for one in rows if _is_too_short(one, int(positions[one.row]))])
    return scores


def _add_bias(scores: Tensor, rows: Sequence[RowLogits]) -> None:
    if rows:
        ids = [one.rules.bias_ids for one in rows]
        bias = torch.cat([one.rules.bias for one in rows])
        scores.index_put_((_row_of_each(rows, ids), torch.cat(ids)), bias, accumulate=True)


def _penalise(scores: Tensor, rows: Sequence[RowLogits], positions: Ints, tokens: Tensor) -> None:
    """Every place of a row's tokens reads, changes and writes the logit of its token; those of
    one token all write the same, and places past the end stand for the first token."""
    if not rows:
        return
    device = scores.device
    known = np.array([positions[one.row] for one in rows])
    slots = torch.tensor([one.slot for one in rows], device=device).unsqueeze(1)
    index = torch.tensor([one.row for one in rows], device=device).unsqueeze(1)
    places = torch.arange(int(known.max()), device=device)
    is_known = places < torch.from_numpy(known).to(device).unsqueeze(1)
    seen = tokens[slots, torch.where(is_known, places, 0)].long()
    there = scores[index, seen]
    factor = _column(rows, "repetition_penalty", device)
    there = torch.where(there < 0, there * factor, there / factor)
    if any(one.rules.counts_generated for one in rows):
        is_generated = is_known & (places >= _column(rows, "num_prompt", device))
        counts = torch.zeros(len(rows), scores.shape[1], device=device)
        times = counts.scatter_add_(1, seen, is_generated.float()).gather(1, seen)
        there -= _column(rows, "frequency_penalty", device) * times
        there -= _column(rows, "presence_penalty", device) * (times > 0)
    scores[index, seen] = there


def _bar_all_but_allowed(scores: Tensor, rows: Sequence[RowLogits]) -> None:
    if rows:
        ids = [one.rules.allowed_ids for one in rows]
        barred = torch.ones(len(rows), scores.shape[1], dtype=torch.bool, device=scores.device)
        barred[_repeated(range(len(rows)), ids), torch.cat(ids)] = False
        index = torch.tensor([one.row for one in rows], device=scores.device)
        scores[index] = scores[index].masked_fill_(barred, BARRED)


def constrained(rows: Sequence[RowLogits]) -> list[Constrained]:
    """Those that have a grammar."""
    return [Constrained(r, g) for r, _, rules in rows if (g := rules.grammar) is not None]


def _bar_bad_words(
    scores: Tensor, rows: Sequence[RowLogits], positions: Ints, tokens: Tensor
) -> None:
    """The last token of each word whose other tokens are the last ones of its row."""
    if not rows:
        return
    device = scores.device
    ends = [one.rules.bad_word_ends for one in rows]
    longest = max(one.rules.bad_word_beginnings.shape[1] for one in rows)
    beginnings = torch.cat([_widened(one.rules.bad_word_beginnings, longest) for one in rows])
    position = _repeated([int(positions[one.row]) for one in rows], ends).unsqueeze(1)
    slot = _repeated([one.slot for one in rows], ends).unsqueeze(1)
    places = position - longest + torch.arange(longest, device=device)
    seen = torch.where(places < 0, NO_TOKEN, tokens[slot, places.clamp(min=0)].long())
    fits = ((seen == beginnings) | (beginnings == ANY_TOKEN)).all(1)
    change = torch.where(fits, BARRED, 0.0)
    scores.index_put_((_row_of_each(rows, ends), torch.cat(ends)), change, accumulate=True)


def _is_too_short(one: RowLogits, position: int) -> bool:
    return position - one.rules.num_prompt < one.rules.min_new_tokens


def _bar_stops(scores: Tensor, rows: Sequence[RowLogits]) -> None:
    if rows:
        ids = [one.rules.stop_ids for one in rows]
        scores[_row_of_each(rows, ids), torch.cat(ids)] = BARRED


def _row_of_each(rows: Sequence[RowLogits], ids: Sequence[Tensor]) -> Tensor:
    return _repeated([one.row for one in rows], ids)


def _repeated(values: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
    """[elements of all parts] values[i] for each element of parts[i]."""
    counts = [len(part) for part in parts]
    return torch.from_numpy(np.repeat(np.array(values, dtype=np.int64), counts)).to(parts[0].device)


def _column(rows: Sequence[RowLogits], name: str, device: torch.device) -> Tensor:
    """[rows, 1]"""
    return torch.tensor([getattr(one.rules, name) for one in rows], device=device).unsqueeze(1)


def _ids(packed: bytes, device: torch.device) -> Tensor:
    return torch.from_numpy(np.frombuffer(packed, dtype="<i4").astype(np.int64)).to(device)


def _bad_words(words: Sequence[bytes], device: torch.device) -> tuple[Tensor, Tensor]:
    ids = [np.frombuffer(word, dtype="<i4").astype(np.int64) for word in words]
    longest = max((len(word) for word in ids), default=1) - 1
    beginnings = np.full((len(ids), longest), ANY_TOKEN, dtype=np.int64)
    for row, word in enumerate(ids):
        beginnings[row, longest - len(word) + 1 :] = word[:-1]
    ends = np.array([word[-1] for word in ids], dtype=np.int64)
    return torch.from_numpy(beginnings).to(device), torch.from_numpy(ends).to(device)


def _widened(beginnings: Tensor, width: int) -> Tensor:
    return pad(beginnings, (width - beginnings.shape[1], 0), value=ANY_TOKEN)
