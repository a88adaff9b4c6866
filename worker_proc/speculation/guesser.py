"""Guess the next tokens of requests from text that was there before.

Answers repeat: the text that they edit or quote, the keys of a JSON object, the answer to a similar
question. So the tokens are guessed that followed the last few ones before, in the request's own
prompt and answer, or in recent answers of its group. The guesses are a function of the plans and of
the tokens, so that every rank of a worker makes the same ones.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from quadriga.wire.messages.arrays import num_ids
from quadriga.wire.messages.worker import StepPlan
from worker_proc.speculation.guess_source import GuessSource
from worker_proc.speculation.recent_answers import RecentAnswers
from worker_proc.speculation.text_index import TextIndex
from worker_proc.step.slot_table import SlotTable, ints_of
from worker_proc.system.transfer import Fetch

MAX_INDEXED_TOKENS = 16_384  # of a request: those before are not searched
GUESSES_PER_MATCHED_TOKEN = 2  # a long match is more likely to go on
GOOD_MATCH = 4  # tokens; with fewer in the own text, recent answers may have a longer match


@dataclass(slots=True)
class SlotText:
    """What is guessed from for a slot.

    Attributes:
        group: Name of the requests whose recent answers may be used.
        num_prompt: Tokens of the slot that were there before its answer.
        own: The slot's tokens from `first` on; None before the first guess.
        source: The text that the last guesses came from.
        position: Where `source` goes on if all that was sampled since equals it.
        length: Length of the match before `position`.
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


class Guesser(GuessSource):
    """Guess tokens by looking them up in earlier text."""

    def __init__(self, table: SlotTable, max_samples: int = sys.maxsize) -> None:
        """Guess for the slots of a table.

        Args:
            table: The slots.
            max_samples: Rows and guesses of a step that has guesses, together.
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

    def guess(self, plan: StepPlan) -> None:
        """Write guesses into the table for the rows of a plan, which is applied."""
        for new, group in zip(plan.new, plan.groups, strict=False):
            self._slots[new.slot] = SlotText(group, num_ids(new.token_ids))
        if not plan.num_guesses:
            return
        rows = (ints_of(plan.slots), ints_of(plan.num_tokens), ints_of(plan.num_guesses))
        limits = {
            slot: most
            for slot, num_tokens, planned in zip(*(row.tolist() for row in rows), strict=True)
            if (most := min(planned, self._table.room_for_guesses(slot))) > 0
            and self._reaches_last_token(slot, num_tokens)
        }
        left = self._max_samples - len(rows[0])
        if not limits or left <= 0:
            return
        self._take_ended()
        self._read_new_tokens(limits)
        guesses = {}
        for slot, most in limits.items():
            if left > 0 and (token_ids := self._guess_slot(slot, min(most, left))):
                guesses[slot] = token_ids
                left -= len(token_ids)
        if guesses:
            self._table.guess(guesses)

    def _reaches_last_token(self, slot: int, num_tokens: int) -> bool:
        table = self._table
        known = int(table.num_known[slot])
        if table.has_forced[slot]:
            return known <= int(table.num_pages_of[slot]) * table.page_size
        return int(table.num_computed[slot]) + num_tokens == known

    def _guess_slot(self, slot: int, most: int) -> list[int]:
        """Return at most so many guesses for a slot whose new tokens were read."""
        text = self._slots.get(slot)
        if text is None or text.own is None:
            return []
        if text.source is None and not self._search(text, text.own):
            return []
        assert text.source is not None
        count = min(most, GUESSES_PER_MATCHED_TOKEN * text.length)
        token_ids = text.source.after(text.position, count, repeats=text.source is text.own)
        return self._table.sampling.follow_guesses(slot, token_ids)

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
