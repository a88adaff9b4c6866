"""Draft the next tokens of requests from text that was there before.

A `TextIndex` finds where the last tokens of a text occurred before; `RecentAnswers` has one for
each group of requests; the `NgramDrafter` looks up both.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

import numpy as np

from quadriga.wire.packing import num_ids
from quadriga.wire.worker import StepPlan
from worker_proc.models.transfer import Fetch
from worker_proc.step.runner import Drafter
from worker_proc.step.slot_table import SlotTable, ints_of

NGRAM_SIZES = (4, 2)  # tokens that must match; the longer ones are looked for first
MAX_MATCH = 16  # tokens that are compared to tell how good a match is
END = -1  # stands between texts, and never matches
# A sequence is found by the sum of its tokens times these, which fits into 63 bits.
FACTORS = (0x4F1BBCDCBF, 0x35D54D6137, 0x2545F4914F, 0x61C8864681)
MIN_ARRAY_TOKENS = 32  # for fewer, numpy takes longer than Python


class Match(NamedTuple):
    """A place at which a text goes on as another one may.

    Attributes:
        position: of the token that followed there.
        length: number of tokens before it that are equal, at most MAX_MATCH.
    """

    position: int
    length: int


class TextIndex:
    """A growing text, and where each sequence of a few tokens occurred last.

    Attributes:
        tokens: the text.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._places: tuple[dict[int, int], ...] = tuple({} for _ in NGRAM_SIZES)
        self.extend(tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the text."""
        begin = len(self.tokens)
        self.tokens += token_ids
        tokens = self.tokens
        for size, places in zip(NGRAM_SIZES, self._places, strict=True):
            first = max(begin, size)
            keys = _keys(tokens[first - size : -1], size)
            places.update(zip(keys, range(first, len(tokens)), strict=True))

    def find(self, text: Sequence[int]) -> Match | None:
        """Return the last place where this text goes on after the end of another one.

        Args:
            text: the other text, or this one, whose own end is no match.
        """
        for size, places in zip(NGRAM_SIZES, self._places, strict=True):
            position = places.get(_key(text[-size:])) if len(text) >= size else None
            if position is None:
                continue
            length = self._match_length(position, text)
            if length >= size:
                return Match(position, length)
        return None

    def after(self, position: int, count: int, repeats: bool) -> list[int]:
        """Return at most `count` tokens from a position on, up to the end of a text.

        Args:
            position: of the first one.
            count: their largest number.
            repeats: go on after the last token with those from `position` on again.
        """
        token_ids = self.tokens[position : position + count]
        if repeats:
            token_ids = (token_ids * -(-count // len(token_ids)))[:count]
        return token_ids[: token_ids.index(END)] if END in token_ids else token_ids

    def _match_length(self, position: int, text: Sequence[int]) -> int:
        tokens, most = self.tokens, min(MAX_MATCH, position, len(text))
        for length in range(most):
            if tokens[position - 1 - length] != text[-1 - length]:
                return length
        return most


def _key(token_ids: Sequence[int]) -> int:
    return sum(map(mul, token_ids, FACTORS))


def _keys(token_ids: Sequence[int], size: int) -> list[int]:
    """Return the keys of all sequences of `size` tokens, in order."""
    count = len(token_ids) - size + 1
    if count < MIN_ARRAY_TOKENS:
        return [_key(token_ids[begin : begin + size]) for begin in range(count)]
    tokens = np.array(token_ids, dtype=np.int64)
    sums = sum(tokens[i : i + count] * FACTORS[i] for i in range(size))
    keys: list[int] = np.asarray(sums).tolist()
    return keys


MAX_GROUPS = 64
MAX_TOKENS = 8192  # of a group
MIN_ANSWER_TOKENS = 8  # a shorter one is no help


class RecentAnswers:
    """The last answers of some groups of requests, such as those of one tenant."""

    def __init__(self) -> None:
        self._groups: OrderedDict[bytes, TextIndex] = OrderedDict()

    def add(self, group: bytes, token_ids: Sequence[int]) -> None:
        """Keep an answer; of a group that has too many tokens, half of them are forgotten."""
        if len(token_ids) < MIN_ANSWER_TOKENS:
            return
        answers = self._groups.pop(group, None) or TextIndex()
        answers.extend([*token_ids[-MAX_TOKENS // 2 :], END])
        if len(answers.tokens) > MAX_TOKENS:
            answers = TextIndex(answers.tokens[-MAX_TOKENS // 2 :])
        self._groups[group] = answers
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)

    def of(self, group: bytes) -> TextIndex | None:
        """Return the answers of a group; None if there are none."""
        return self._groups.get(group)


# Draft the next tokens of requests from text that was there before.
#
# Answers repeat: the text that they edit or quote, the keys of a JSON object, the answer to a
# similar question. So the tokens are drafted that followed the last few ones before, in the
# request's own prompt and answer, or in recent answers of its group. The drafts are a function
# of the plans and of the tokens, so that every rank of a worker makes the same ones.

MAX_INDEXED_TOKENS = 16_384  # of a request: those before are not searched
DRAFTS_PER_MATCHED_TOKEN = 2  # a long match is more likely to go on
GOOD_MATCH = 4  # tokens; with fewer in the own text, recent answers may have a longer match


@dataclass(slots=True)
class SlotText:
    """What is drafted from for a slot.

    Attributes:
        group: name of the requests whose recent answers may be used.
        num_prompt: tokens of the slot that were there before its answer.
        own: the slot's tokens from `first` on; None before the first draft.
        source: the text that the last drafts came from.
        position: where `source` goes on if all that was sampled since equals it.
        length: length of the match before `position`.
    """

    group: bytes
    num_prompt: int
    first: int = 0
    own: TextIndex | None = None
    source: TextIndex | None = None
    position: int = 0
    length: int = 0

    def read(self, token_ids: list[int]) -> None:
        """Append tokens to the own text, and follow the match that was found before."""
        if self.own is None:
            self.own = TextIndex(token_ids)
            return
        self.own.extend(token_ids)
        if (source := self.source) is not None:
            end = self.position + len(token_ids)
            if end < len(source.tokens) and source.tokens[self.position : end] == token_ids:
                self.position, self.length = end, self.length + len(token_ids)
            else:
                self.source = None


class NgramDrafter(Drafter):
    """Draft tokens by looking them up in earlier text."""

    def __init__(self, table: SlotTable, max_samples: int = sys.maxsize) -> None:
        """Draft for the slots of a table.

        Args:
            table: the slots.
            max_samples: rows and drafts of a step that has drafts, together.
        """
        self._table = table
        self._max_samples = max_samples
        self._slots: dict[int, SlotText] = {}
        self._recent = RecentAnswers()
        self._ended: list[tuple[bytes, Fetch]] = []  # group and answer

    def begin(self, plan: StepPlan) -> None:
        """Keep the answers of the slots that a plan releases, before the table forgets them.

        On a GPU they are copied behind the step that runs, and taken in with a later plan, so that
        the host need not wait.
        """
        self._take_ended()
        for slot in ints_of(plan.released).tolist():
            text = self._slots.pop(slot, None)
            if text is not None and self._table.num_known[slot] > text.num_prompt:
                answer = self._table.fetch_known_tokens(slot, text.num_prompt)
                self._ended.append((text.group, answer))

    def _take_ended(self) -> None:
        for group, fetch in self._ended:
            self._recent.add(group, fetch().tolist())
        self._ended.clear()

    def draft(self, plan: StepPlan) -> None:
        """Write drafts into the table for the rows of a plan, which is applied."""
        for new, group in zip(plan.new, plan.groups, strict=False):
            self._slots[new.slot] = SlotText(group, num_ids(new.token_ids))
        if not plan.num_guesses:
            return
        rows = (ints_of(plan.slots), ints_of(plan.num_tokens), ints_of(plan.num_guesses))
        limits = {
            slot: most
            for slot, num_tokens, planned in zip(*(row.tolist() for row in rows), strict=True)
            if (most := min(planned, self._table.room_for_drafts(slot))) > 0
            and self._reaches_last_token(slot, num_tokens)
        }
        left = self._max_samples - len(rows[0])
        if not limits or left <= 0:
            return
        self._take_ended()
        self._read_new_tokens(limits)
        drafts = {}
        for slot, most in limits.items():
            if left > 0 and (token_ids := self._draft_slot(slot, min(most, left))):
                drafts[slot] = token_ids
                left -= len(token_ids)
        if drafts:
            self._table.draft(drafts)

    def _reaches_last_token(self, slot: int, num_tokens: int) -> bool:
        table = self._table
        known = int(table.num_known[slot])
        if table.has_forced[slot]:
            return known <= int(table.num_pages_of[slot]) * table.page_size
        return int(table.num_computed[slot]) + num_tokens == known

    def _draft_slot(self, slot: int, most: int) -> list[int]:
        """Return at most `limit` drafts for a slot whose new tokens were read."""
        text = self._slots.get(slot)
        if text is None or text.own is None:
            return []
        if text.source is None and not self._search(text, text.own):
            return []
        assert text.source is not None
        count = min(most, DRAFTS_PER_MATCHED_TOKEN * text.length)
        token_ids = text.source.after(text.position, count, repeats=text.source is text.own)
        return self._table.sampling.follow_drafts(slot, token_ids)

    def _read_new_tokens(self, slots: Iterable[int]) -> None:
        """Bring the slots' own texts up to date, and follow the matches that were found before."""
        texts = {slot: text for slot in slots if (text := self._slots.get(slot)) is not None}
        begins = {}
        for slot, text in texts.items():
            if text.own is None:
                text.first = max(0, int(self._table.num_known[slot]) - MAX_INDEXED_TOKENS)
            begins[slot] = text.first + (0 if text.own is None else len(text.own.tokens))
        for slot, token_ids in self._table.tokens_from(begins).items():
            texts[slot].read(token_ids)

    def _search(self, text: SlotText, own: TextIndex) -> bool:
        """Look for the last tokens in what was there before. Return whether they were found."""
        match, source = own.find(own.tokens), own
        if match is None or match.length < GOOD_MATCH:
            answers = self._recent.of(text.group)
            other = None if answers is None else answers.find(own.tokens)
            if answers and other and (match is None or other.length > match.length):
                match, source = other, answers
        if match is None:
            return False
        text.source, (text.position, text.length) = source, match
        return True
