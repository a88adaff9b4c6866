"""Close the reasoning of an answer after its budget, and begin the grammar after it."""

from copy import copy
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from quadriga.wire.messages.grammar import ThinkingForm
from worker_proc.attention.base import Ints
from worker_proc.sampling.grammar_mask import SlotConstraint, SlotGrammar, barred_error
from worker_proc.sampling.mark_scanner import MarkScanner, MarkState

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


MAX_MARKS = 8  # a look at every token of a large vocabulary takes 0.2 s


class ThinkingMarks:
    """The marks of a reasoning in the tokens of a model, shared by all slots.

    Attributes:
        end: Searches for the text that ends the reasoning.
        start_ids: Tokens of the text that begins it.
        overshooting: Tokens that end the reasoning and go on, see `MarkScanner.overshooting`.
            Empty if no grammar follows.
    """

    def __init__(self, start: str, end: str, vocabulary: "LLTokenizer", has_grammar: bool) -> None:
        """Look the marks up.

        Raises:
            ValueError: The model's tokens cannot write the end.
        """
        self.end = MarkScanner(end.strip())
        self.start = start.strip().encode()
        self.start_ids = vocabulary.tokenize_str(start.strip()) if start else []
        self._vocabulary = vocabulary
        self._closings = self._tokenize_closings(end)
        self.overshooting: list[Ints] = []
        if has_grammar:
            tokens = map(self.bytes_of, range(vocabulary.vocab_size))
            self.overshooting = self.end.overshooting(tokens)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return bytes(self._vocabulary.decode_bytes([token]))

    def closing(self, num_matched: int) -> list[int]:
        """Return the tokens that close a reasoning that has `num_matched` bytes of the mark."""
        return self._closings[num_matched]

    def _tokenize_closings(self, end: str) -> list[list[int]]:
        """Return the tokens that end the reasoning for each part of the mark that stands there.

        A part after which the tokenizer cannot go on is followed by the whole mark.
        """
        whole = self._vocabulary.tokenize_str(end)
        if not self._closes(whole, 0):
            raise ValueError(f"the model's tokens cannot write {end!r}, which ends the reasoning")
        closings = [whole]
        text = end.lstrip().encode()
        for num_matched in range(1, len(self.end.mark)):
            rest = self._vocabulary.tokenize_bytes(text[num_matched:])
            closings.append(rest if self._closes(rest, num_matched) else whole)
        return closings

    def _closes(self, token_ids: list[int], num_matched: int) -> bool:
        data = self._vocabulary.decode_bytes(token_ids)
        return self.end.is_complete(self.end.scan(num_matched, data))


@lru_cache(maxsize=MAX_MARKS)
def thinking_marks(
    start: str, end: str, vocabulary: "LLTokenizer", has_grammar: bool
) -> ThinkingMarks:
    """Return the marks of a reasoning, kept from the last time if they were used lately."""
    return ThinkingMarks(start, end, vocabulary, has_grammar)


class Phase(Enum):
    """Where an answer stands.

    Attributes:
        START: It may begin with the reasoning.
        THINKING: It is in the reasoning.
        CLOSING: The end of the reasoning is written by force.
        ANSWER: The reasoning is over, or there was none.
    """

    START = "start"
    THINKING = "thinking"
    CLOSING = "closing"
    ANSWER = "answer"


class GrammarAfterThinking(SlotConstraint):
    """State of an answer that may begin with reasoning: a function of the tokens so far.

    In the reasoning every token is allowed; its end is found in the text, in whatever tokens the
    model writes it. With a grammar no stop token and no token that goes on after the end is
    allowed there, so that the grammar applies to the very next byte. At the start the model may
    write the first token of the mark that begins the reasoning, or what the grammar allows.
    """

    def __init__(
        self,
        form: ThinkingForm,
        marks: ThinkingMarks,
        grammar: "LLMatcher | None",
        stop_ids: Ints,
        generated: Ints,
        jump_forward: bool,
    ) -> None:
        """Advance to the tokens generated so far.

        Args:
            form: The reasoning.
            marks: Its marks.
            grammar: A matcher in its initial state, which is copied; None: the answer is free.
            stop_ids: Tokens that end the request.
            generated: `[tokens]` generated before, if the request was retracted or resent.
            jump_forward: Append forced tokens without sampling them.
        """
        self._budget = form.budget
        self._marks = marks
        self._matcher = grammar
        self._stop_ids = stop_ids
        self._stop_set = frozenset(stop_ids.tolist())
        self._jump_forward = jump_forward
        self._num_thinking = 0
        self._scanned = MarkState(0)
        self._closing: list[int] = []
        self._text = b""
        self._num_start_tokens = 0
        self._grammar: SlotGrammar | None = None
        self._phase = Phase.START
        if form.is_inside:
            self._begin_thinking(b"")
        elif grammar is not None:
            self._grammar = self._new_grammar()
        for index, token in enumerate(generated.tolist()):
            if self._phase is Phase.ANSWER:
                if grammar is not None and self._grammar is not None:
                    self._grammar.consume(generated[index:])
                break
            self.advance(token)

    @property
    def is_over(self) -> bool:
        """Whether the answer proper has begun, and is free."""
        return self._phase is Phase.ANSWER and self._matcher is None

    @property
    def masks(self) -> bool:
        """Whether a grammar follows, or the end of the reasoning is being written."""
        return self._phase is Phase.CLOSING or self._matcher is not None

    def fill(self, mask: np.ndarray) -> None:
        """Set the bits of the tokens that are allowed in this phase."""
        match self._phase:
            case Phase.ANSWER:
                assert self._grammar is not None
                self._grammar.fill(mask)
            case Phase.CLOSING:
                mask[:] = 0
                _allow(mask, self._closing[0])
            case Phase.THINKING:
                mask[:] = 0xFF
                _bar(mask, self._stop_ids)
                _bar(mask, self._marks.overshooting[self._scanned.num_matched])
            case Phase.START:
                mask[:] = 0
                if self._grammar is not None:
                    self._grammar.fill(mask)
                if self._num_start_tokens < len(self._marks.start_ids):
                    _allow(mask, self._marks.start_ids[self._num_start_tokens])

    def advance(self, token: int) -> str:
        """Accept a sampled token. Return why the request cannot continue, or an empty string."""
        match self._phase:
            case Phase.ANSWER:
                return "" if self._grammar is None else self._grammar.advance(token)
            case Phase.CLOSING:
                if token != self._closing[0]:
                    return barred_error()
                self._take_closing(1)
                return ""
            case Phase.THINKING:
                return self._advance_thinking(token)
            case Phase.START:
                if self._matcher is None:
                    return self._advance_free_start(token)
                return self._advance_start(token)

    def take_forced(self, max_tokens: int) -> list[int]:
        """Accept and return the rest of the end of the reasoning, and what the grammar forces."""
        if not self._jump_forward:
            return []
        forced: list[int] = []
        if self._phase is Phase.CLOSING:
            forced = self._closing[:max_tokens]
            self._take_closing(len(forced))
        if self._phase is Phase.ANSWER and self._grammar is not None and len(forced) < max_tokens:
            forced += self._grammar.take_forced(max_tokens - len(forced))
        return forced

    def copy(self) -> "GrammarAfterThinking":
        """Return the same state, with a grammar of its own."""
        other = copy(self)
        other._grammar = self._grammar and self._grammar.copy()
        return other

    def ends_with(self, token: int) -> bool:
        """Return whether it is a stop token."""
        return token in self._stop_set

    def _advance_free_start(self, token: int) -> str:
        """Accept the first tokens of an answer without a grammar."""
        self._text = (self._text + self._marks.bytes_of(token)).lstrip()
        start = self._marks.start
        if self._text.startswith(start):
            self._begin_thinking(self._text[len(start) :])
        elif not start.startswith(self._text):
            self._phase = Phase.ANSWER
        return ""

    def _advance_start(self, token: int) -> str:
        """Accept the first tokens of an answer with a grammar, which may allow a part of a mark."""
        start_ids = self._marks.start_ids
        error = barred_error() if self._grammar is None else self._grammar.advance(token)
        if self._num_start_tokens < len(start_ids) and token == start_ids[self._num_start_tokens]:
            self._num_start_tokens += 1
            if error:
                self._grammar = None
            if self._num_start_tokens == len(start_ids):
                self._begin_thinking(b"")
            return ""
        self._phase = Phase.ANSWER
        return error

    def _begin_thinking(self, text: bytes) -> None:
        self._phase = Phase.THINKING
        self._scan(text)

    def _advance_thinking(self, token: int) -> str:
        if token in self._stop_set:
            return "" if self._matcher is None else barred_error()
        self._num_thinking += 1
        self._scan(self._marks.bytes_of(token))
        return ""

    def _scan(self, text: bytes) -> None:
        """Take in the text of the reasoning, and end it where its end or its budget is reached."""
        self._scanned = self._marks.end.scan(self._scanned.num_matched, text)
        if self._marks.end.is_complete(self._scanned):
            self._begin_answer()
        elif self._budget is not None and self._num_thinking >= self._budget:
            self._phase = Phase.CLOSING
            self._closing = self._marks.closing(self._scanned.num_matched)

    def _take_closing(self, count: int) -> None:
        self._closing = self._closing[count:]
        if not self._closing:
            self._begin_answer()

    def _begin_answer(self) -> None:
        self._phase = Phase.ANSWER
        self._grammar = None if self._matcher is None else self._new_grammar()

    def _new_grammar(self) -> SlotGrammar:
        assert self._matcher is not None
        nothing = np.empty(0, dtype=np.int64)
        return SlotGrammar(self._matcher.deep_copy(), self._stop_ids, nothing, self._jump_forward)


def _allow(mask: np.ndarray, token: int) -> None:
    mask[token >> 3] |= np.uint8(1 << (token & 7))


def _bar(mask: np.ndarray, ids: Ints) -> None:
    bits = (1 << (ids & 7)).astype(np.uint8)
    np.bitwise_and.at(mask, ids >> 3, ~bits)
