"""Guess the next tokens of requests from text that was there before.

Answers repeat: the text that they edit or quote, the keys of a JSON object, the answer to a similar
question. So the tokens are guessed that followed the last few ones before, in the request's own
prompt and answer, or in recent answers of its group. The guesses are a function of the plans and of
the tokens, so that every rank of a worker makes the same ones.
"""

from dataclasses import dataclass

from quadriga.wire.messages.arrays import num_ids
from quadriga.wire.messages.worker import GuessingPlan
from worker_proc.speculation.guess_source import GuessSource
from worker_proc.speculation.recent_answers import RecentAnswers
from worker_proc.speculation.text_index import TextIndex
from worker_proc.step.slot_table import SlotTable, ints_of

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


class Guesser(GuessSource):
    """Guess tokens by looking them up in earlier text."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._slots: dict[int, SlotText] = {}
        self._recent = RecentAnswers()

    def begin(self, plan: GuessingPlan) -> None:
        """Keep the answers of the slots that a plan releases, before the table forgets them."""
        for slot in ints_of(plan.released).tolist():
            if (text := self._slots.pop(slot, None)) is not None:
                self._recent.add(text.group, self._table.known_tokens(slot, text.num_prompt))

    def guess(self, plan: GuessingPlan) -> None:
        """Write guesses into the table for the rows of a plan, which is applied."""
        for new, group in zip(plan.new, plan.groups, strict=False):
            self._slots[new.slot] = SlotText(group, num_ids(new.token_ids))
        if not plan.num_guesses:
            return
        rows = (ints_of(plan.slots), ints_of(plan.num_tokens), ints_of(plan.num_guesses))
        for slot, num_tokens, most in zip(*(row.tolist() for row in rows), strict=True):
            if most > 0 and self._reaches_last_token(slot, num_tokens):
                self._guess_slot(slot, most)

    def _reaches_last_token(self, slot: int, num_tokens: int) -> bool:
        table = self._table
        known = int(table.num_known[slot])
        if table.has_forced[slot]:
            return known <= int(table.num_pages_of[slot]) * table.page_size
        return int(table.num_computed[slot]) + num_tokens == known

    def _guess_slot(self, slot: int, most: int) -> None:
        text = self._slots.get(slot)
        most = min(most, self._table.room_for_guesses(slot))
        if text is None or most <= 0:
            return
        own = self._read_new_tokens(slot, text)
        if text.source is None and not self._search(text, own):
            return
        assert text.source is not None
        count = min(most, GUESSES_PER_MATCHED_TOKEN * text.length)
        token_ids = text.source.after(text.position, count, repeats=text.source is own)
        token_ids = self._table.sampling.follow_guesses(slot, token_ids)
        if token_ids:
            self._table.guess(slot, token_ids)

    def _read_new_tokens(self, slot: int, text: SlotText) -> TextIndex:
        """Bring the slot's own text up to date, and follow the match that was found before."""
        known = int(self._table.num_known[slot])
        if text.own is None:
            text.first = max(0, known - MAX_INDEXED_TOKENS)
            text.own = TextIndex(self._table.known_tokens(slot, text.first))
            return text.own
        token_ids = self._table.known_tokens(slot, text.first + len(text.own.tokens))
        text.own.extend(token_ids)
        if (source := text.source) is not None:
            end = text.position + len(token_ids)
            if end < len(source.tokens) and source.tokens[text.position : end] == token_ids:
                text.position, text.length = end, text.length + len(token_ids)
            else:
                text.source = None
        return text.own

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
