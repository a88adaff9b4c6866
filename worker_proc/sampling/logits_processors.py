"""Apply logits processors: bias, penalties and masks.

sampler.py documents their order. They have no state between steps: penalties and bad words are
computed from the known tokens of a slot, so a request that continues in another slot, or after a
restart, gets the same tokens. All rows of a step are processed together.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from quadriga.wire.worker import SlotSamplingParams, WantedLogprobs
from worker_proc.models.attention import Ints
from worker_proc.models.transfer import send
from worker_proc.sampling.grammar import (
    MASKED,
    Constrained,
    SlotConstraint,
    mask_by_grammar,
)

MaskByGrammar = Callable[[Tensor, Sequence[Constrained]], None]
ANY_TOKEN = -1  # pads the prefix of a bad word
NO_TOKEN = -2


class SlotLogits:
    """The logits processors of a slot, with lists on the device.

    Attributes:
        params: the parameters that they are made of.
        bad_word_prefixes: [words, longest - 1] all tokens but the last, left-padded with ANY_TOKEN.
        bad_word_ends: [words] the last token.
        num_top_logprobs: how many of the most likely tokens are returned with their logprobs; None:
            no logprobs.
        logprob_ids: ids whose logprobs are returned beside them.
        grammar: the slot's grammar, or the reasoning before it, if it has one.
        after_drafts: the state of the grammar after each draft of the running step.
    """

    def __init__(
        self,
        params: SlotSamplingParams,
        device: torch.device,
        grammar: SlotConstraint | None = None,
    ) -> None:
        self.params = params
        self.grammar = grammar
        self.after_drafts: list[SlotConstraint] = []
        self.penalises_generated = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        self.penalises = self.penalises_generated or params.repetition_penalty != 1.0
        self.bias_ids = _ids(params.bias_ids, device)
        self.bias = send(np.frombuffer(params.bias, dtype="<f4").copy(), device)
        self.allowed_ids = _ids(params.allowed_ids, device)
        self.stop_ids = _ids(params.stop_ids, device)
        wanted = params.logprobs
        if not isinstance(wanted, WantedLogprobs):
            wanted = None if wanted is None else WantedLogprobs(wanted, b"")
        self.num_top_logprobs = None if wanted is None else wanted.num_top
        self.logprob_ids = _ids(b"" if wanted is None else wanted.token_ids, device)
        self.bad_word_prefixes, self.bad_word_ends = _bad_words(params.bad_words, device)
        self._always_changes_logits = (
            self.penalises
            or params.min_new_tokens > 0
            or bool(params.bias_ids or params.allowed_ids or params.bad_words)
        )

    @property
    def only_filters(self) -> bool:
        """Whether the logits are taken as they are, and no logprobs are returned."""
        return not (self._always_changes_logits or self.grammar) and self.num_top_logprobs is None

    def changes_logits(self, grammar: SlotConstraint | None) -> bool:
        """Return whether the processors, in this state of the grammar, change the logits."""
        return self._always_changes_logits or (grammar is not None and grammar.masks)


class RowLogits(NamedTuple):
    """A sampling row of a step, its slot and the slot's logits processors.

    Attributes:
        grammar: the state of the slot's grammar at the token to be sampled, if it has one.
    """

    row: int
    slot: int
    rules: SlotLogits
    grammar: SlotConstraint | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether the processors change the row's logits."""
        return self.rules.changes_logits(self.grammar)


def apply_logits_processors(
    logits: Tensor,
    rows: Sequence[RowLogits],
    positions: Ints,
    tokens: Tensor,
    mask: MaskByGrammar = mask_by_grammar,
) -> Tensor:
    """Return a float32 copy of the logits with the processors of `rows` applied.

    Args:
        logits: [sampling rows, vocab_size].
        rows: the rows to process.
        positions: [sampling rows] on the host, the index of the token to be sampled.
        tokens: [slots, context + 1] on the device, the known tokens.
        mask: sets what grammars forbid to -inf.
    """
    scores = logits.to(torch.float32, copy=True)
    _add_bias(scores, [row for row in rows if row.rules.params.bias_ids])
    _penalise(scores, [row for row in rows if row.rules.penalises], positions, tokens)
    _mask_all_but_allowed(scores, [row for row in rows if row.rules.params.allowed_ids])
    mask(scores, constrained(rows))
    with_bad_words = [row for row in rows if row.rules.params.bad_words]
    _mask_bad_words(scores, with_bad_words, positions, tokens)
    _mask_stops(scores, [row for row in rows if _is_too_short(row, int(positions[row.row]))])
    return scores


def _add_bias(scores: Tensor, rows: Sequence[RowLogits]) -> None:
    if rows:
        ids = [row.rules.bias_ids for row in rows]
        bias = torch.cat([row.rules.bias for row in rows])
        scores.index_put_((_row_of_each(rows, ids), torch.cat(ids)), bias, accumulate=True)


def _penalise(scores: Tensor, rows: Sequence[RowLogits], positions: Ints, tokens: Tensor) -> None:
    """Divide or reduce the logits of tokens that the rows already have.

    Each index of a row reads, changes and writes the logit of its token. Indices with the same
    token write the same value; indices after the end of a row stand for its first token.
    """
    if not rows:
        return
    device = scores.device
    places = np.array([(row.slot, row.row, positions[row.row]) for row in rows])
    slots, score_rows, ends = send(places, device).T.unsqueeze(-1)
    indices = torch.arange(int(places[:, 2].max()), device=device)
    is_known = indices < ends
    seen = tokens[slots, torch.where(is_known, indices, 0)].long()
    seen_scores = scores[score_rows, seen]
    factor = _column(rows, "repetition_penalty", device)
    seen_scores = torch.where(seen_scores < 0, seen_scores * factor, seen_scores / factor)
    if any(row.rules.penalises_generated for row in rows):
        is_generated = is_known & (indices >= _column(rows, "num_prompt", device))
        counts = torch.zeros(len(rows), scores.shape[1], device=device)
        times = counts.scatter_add_(1, seen, is_generated.float()).gather(1, seen)
        seen_scores -= _column(rows, "frequency_penalty", device) * times
        seen_scores -= _column(rows, "presence_penalty", device) * (times > 0)
    scores[score_rows, seen] = seen_scores


def _mask_all_but_allowed(scores: Tensor, rows: Sequence[RowLogits]) -> None:
    if rows:
        ids = [row.rules.allowed_ids for row in rows]
        forbidden = torch.ones(len(rows), scores.shape[1], dtype=torch.bool, device=scores.device)
        forbidden[_repeated(range(len(rows)), ids), torch.cat(ids)] = False
        index = send(np.array([row.row for row in rows]), scores.device)
        scores[index] = scores[index].masked_fill_(forbidden, MASKED)


def constrained(rows: Sequence[RowLogits]) -> list[Constrained]:
    """Return the rows that have a grammar, or a reasoning that is not over."""
    return [
        Constrained(row, grammar)
        for row, _, _, grammar in rows
        if grammar is not None and not grammar.is_over
    ]


def _mask_bad_words(
    scores: Tensor, rows: Sequence[RowLogits], positions: Ints, tokens: Tensor
) -> None:
    """Mask the last token of each bad word whose other tokens are the last ones of its row."""
    if not rows:
        return
    device = scores.device
    ends = [row.rules.bad_word_ends for row in rows]
    prefixes = [row.rules.bad_word_prefixes for row in rows]
    longest = max(prefix.shape[1] for prefix in prefixes)
    padded = [pad(p, (longest - p.shape[1], 0), value=ANY_TOKEN) for p in prefixes]
    expected = torch.cat(padded)
    position = _repeated([int(positions[one.row]) for one in rows], ends).unsqueeze(1)
    slot = _repeated([row.slot for row in rows], ends).unsqueeze(1)
    indices = position - longest + torch.arange(longest, device=device)
    seen = torch.where(indices < 0, NO_TOKEN, tokens[slot, indices.clamp(min=0)].long())
    matches = ((seen == expected) | (expected == ANY_TOKEN)).all(1)
    change = torch.where(matches, MASKED, 0.0)
    scores.index_put_((_row_of_each(rows, ends), torch.cat(ends)), change, accumulate=True)


def _is_too_short(row: RowLogits, position: int) -> bool:
    return position - row.rules.params.num_prompt < row.rules.params.min_new_tokens


def _mask_stops(scores: Tensor, rows: Sequence[RowLogits]) -> None:
    if rows:
        ids = [row.rules.stop_ids for row in rows]
        scores[_row_of_each(rows, ids), torch.cat(ids)] = MASKED


def _row_of_each(rows: Sequence[RowLogits], ids: Sequence[Tensor]) -> Tensor:
    return _repeated([row.row for row in rows], ids)


def _repeated(values: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
    """Repeat values[i] for each element of parts[i]. Return [elements of all parts]."""
    counts = [len(part) for part in parts]
    return send(np.repeat(np.array(values, dtype=np.int64), counts), parts[0].device)


def _column(rows: Sequence[RowLogits], name: str, device: torch.device) -> Tensor:
    """Return a parameter of each row, [rows, 1]."""
    values = np.array([getattr(row.rules.params, name) for row in rows])
    if values.dtype == np.float64:
        values = values.astype(np.float32)
    return send(values, device).unsqueeze(1)


def _ids(packed: bytes, device: torch.device) -> Tensor:
    return send(np.frombuffer(packed, dtype="<i4").astype(np.int64), device)


def _bad_words(words: Sequence[bytes], device: torch.device) -> tuple[Tensor, Tensor]:
    ids = [np.frombuffer(word, dtype="<i4").astype(np.int64) for word in words]
    longest = max((len(word) for word in ids), default=1) - 1
    prefixes = np.full((len(ids), longest), ANY_TOKEN, dtype=np.int64)
    for row, word in enumerate(ids):
        prefixes[row, longest - len(word) + 1 :] = word[:-1]
    ends = np.array([word[-1] for word in ids], dtype=np.int64)
    return send(prefixes, device), send(ends, device)
