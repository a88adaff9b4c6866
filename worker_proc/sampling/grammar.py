"""What the next token of a slot may be: its grammar, and the reasoning before it.

`SlotConstraint` is the contract and `SlotGrammar` the state of a grammar; then the masks of a
step's rows. A `MarkScanner` finds the marks of the reasoning, `GrammarAfterThinking` is the state
of a slot that reasons before it answers, and a `CompiledGrammar` begins either for a slot.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quadriga.server.grammars.grammar import compile_grammar
from quadriga.wire.grammar import GrammarForm, ThinkingForm
from quadriga.wire.worker import FailedRow
from worker_proc.models.attention import Ints
from worker_proc.models.transfer import send_all

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MASKED = float("-inf")
# `[bytes]` uint8, or `[rows, bytes]`: a bit for each token, the lowest id in the lowest bit.
Mask = npt.NDArray[np.uint8]
# Matchers, and the row of a mask that each computes; of no two rows are they the same one.
Matchers = list[tuple["LLMatcher", int]]
ComputeMasks = Callable[[Matchers, Mask], None]


class SlotConstraint(ABC):
    """What the next token of a slot may be: a function of the tokens generated so far."""

    @property
    def is_over(self) -> bool:
        """Whether every token is allowed from now on, and none is forced."""
        return False

    @property
    def masks(self) -> bool:
        """Whether some tokens are forbidden now."""
        return True

    @property
    @abstractmethod
    def matcher(self) -> "LLMatcher | None":
        """What computes the mask that `adjust` takes; None: that is 0 everywhere."""

    @abstractmethod
    def adjust(self, mask: Mask) -> None:
        """Let a mask have the bits of the allowed tokens, and no others.

        Args:
            mask: as `matcher` has computed it.
        """

    @abstractmethod
    def advance(self, token: int) -> str:
        """Accept a sampled token. Return why the request cannot continue, or an empty string."""

    @abstractmethod
    def take_forced(self, max_tokens: int) -> list[int]:
        """Accept and return the tokens that must follow, at most `max_tokens`."""

    @abstractmethod
    def copy(self) -> "SlotConstraint":
        """Return the same state, which can go on by itself: to see what follows a draft."""

    @abstractmethod
    def ends_with(self, token: int) -> bool:
        """Return whether the token ends the request, so that nothing follows it."""


class SlotGrammar(SlotConstraint):
    """State of a slot's grammar."""

    def __init__(
        self, matcher: "LLMatcher", stop_ids: Ints, generated: Ints, jump_forward: bool
    ) -> None:
        """Advance a matcher to the tokens generated so far.

        Args:
            matcher: in the grammar's initial state, used only by this object.
            stop_ids: tokens that end the request. They are allowed where the text can end, and
                the matcher does not see them.
            generated: [tokens] given with the request, or generated before, if the request was
                retracted or resent.
            jump_forward: append forced tokens without sampling them.
        """
        self._matcher = matcher
        self._begins_wrong = False
        self._jump_forward = jump_forward
        self._stop_ids = stop_ids
        self._stop_set = frozenset(stop_ids.tolist())
        self.consume(generated)

    def consume(self, token_ids: Ints) -> None:
        """Accept tokens `[tokens]` that were given, or generated before."""
        self._begins_wrong = not self._matcher.consume_tokens(token_ids.tolist())

    @property
    def matcher(self) -> "LLMatcher | None":
        """The grammar's own; None if the library has given up."""
        return None if self._matcher.is_error() else self._matcher

    def adjust(self, mask: Mask) -> None:
        """Allow the stop tokens where the text can end, and only there."""
        change = _allow if self._matcher.is_accepting() else _bar
        for token in self._stop_set:
            change(mask, token)

    def advance(self, token: int) -> str:
        """Accept a sampled token. Return why the request cannot continue, or an empty string."""
        matcher = self._matcher
        if token in self._stop_set and matcher.is_accepting():
            return ""
        if not matcher.is_error() and token not in self._stop_set and matcher.consume_token(token):
            return ""
        if self._begins_wrong:  # no grammar of its own lets a request generate what it refuses
            return "the text of first_token_ids does not match the grammar: loosen it, or keep less"
        return barred_error(matcher.get_error().removesuffix("\n<non-verbose/>"))

    def take_forced(self, max_tokens: int) -> list[int]:
        """Accept and return the tokens into which the tokenizer would split the forced text."""
        if not self._jump_forward or self._matcher.is_error():
            return []
        forced = self._matcher.compute_ff_tokens()[:max_tokens]
        token_ids = list(takewhile(lambda token: token not in self._stop_set, forced))
        self._matcher.consume_tokens(token_ids)
        return token_ids

    def copy(self) -> "SlotGrammar":
        """Return the same state, with a matcher of its own."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def ends_with(self, token: int) -> bool:
        """Return whether it is a stop token."""
        return token in self._stop_set


def barred_error(reason: str = "") -> str:
    """Return why a request cannot continue whose token was not allowed."""
    return (
        "no token is left that the grammar and the request's other rules allow"
        f" ({reason or 'all are barred'}); loosen one of them"
    )


class Constrained(NamedTuple):
    """A row of a step and what its slot's next token may be."""

    row: int
    grammar: SlotConstraint


def compute_in_turn(matchers: Matchers, masks: Mask) -> None:
    """Compute the mask of each matcher into a row of `masks`."""
    for matcher, row in matchers:
        matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks.shape[1])


def compute_in_parallel(matchers: Matchers, masks: Mask) -> None:
    """Compute masks as `compute_in_turn` does, in the library's threads if there are several."""
    if len(matchers) < 2:
        compute_in_turn(matchers, masks)
    else:
        _executor().unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.shape[1], len(masks))


@cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor()


def all_allowed(num_rows: int, vocab_size: int) -> Mask:
    """Return masks `[rows, bytes]` that allow every token."""
    return np.full((num_rows, -(-vocab_size // 32) * 4), 0xFF, dtype=np.uint8)


def masks_of(
    rows: Sequence[Constrained], vocab_size: int, compute: ComputeMasks = compute_in_turn
) -> tuple[Ints, Mask]:
    """Return the rows in which some tokens are forbidden, and their masks `[rows, bytes]`."""
    rows = [row for row in rows if row.grammar.masks]
    masks = np.zeros((len(rows), -(-vocab_size // 32) * 4), dtype=np.uint8)
    begun = ((row.grammar.matcher, number) for number, row in enumerate(rows))
    compute([(matcher, number) for matcher, number in begun if matcher is not None], masks)
    for mask, row in zip(masks, rows, strict=True):
        row.grammar.adjust(mask)
    return np.array([row.row for row in rows], dtype=np.int64), masks


def mask_by_grammar(scores: Tensor, rows: Sequence[Constrained]) -> None:
    """Set the tokens that the rows' grammars forbid to -inf, in scores [rows, vocab_size]."""
    vocab_size = scores.shape[1]
    numbers, masks = masks_of(rows, vocab_size)
    if not len(numbers):
        return
    if scores.device.type != "cpu":
        mask_packed(scores, *send_all(scores.device, numbers, masks))
        return
    bits = np.unpackbits(~masks, axis=1, count=vocab_size, bitorder="little")
    for row, forbidden in zip(numbers.tolist(), torch.from_numpy(bits.view(np.bool_)), strict=True):
        scores[row].masked_fill_(forbidden, MASKED)


def mask_packed(scores: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Mask on the device what has no bit, so that an eighth of the bytes go there.

    Args:
        scores: `[…, vocab_size]`.
        rows: `[rows]` of the scores.
        masks: `[rows, bytes]`, see Mask.
    """
    bits = masks.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=masks.device)
    forbidden = (bits & 1).flatten(1)[:, : scores.shape[1]] == 0
    scores[rows] = scores[rows].masked_fill_(forbidden, MASKED)


def advance(rows: Sequence[Constrained], token_ids: Ints, plan_rows: Ints) -> list[FailedRow]:
    """Advance each grammar by the token of its row. Return the rows that had no allowed token.

    Args:
        rows: the rows with a grammar.
        token_ids: [sampling rows] the sampled tokens.
        plan_rows: [sampling rows] the index of each row in the plan.
    """
    errors = [(row, grammar.advance(int(token_ids[row]))) for row, grammar in rows]
    return [FailedRow(int(plan_rows[row]), error) for row, error in errors if error]


class MarkState(NamedTuple):
    """Where a scan stands after a token.

    Attributes:
        num_matched: bytes of the mark at the end of the text; all of them where the mark is
            complete.
        num_after: bytes of the token after the complete mark.
    """

    num_matched: int
    num_after: int = 0


class MarkScanner:
    """Searches for a mark, token by token (Knuth, Morris and Pratt 1977).

    Its state is one number, so that the scan continues from the tokens of a request alone.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark.encode()
        self._fallbacks = _fallbacks(self.mark)

    def scan(self, num_matched: int, data: bytes) -> MarkState:
        """Return the state after the bytes of a token.

        Args:
            num_matched: bytes of the mark at the end of the text before the token.
            data: the token's bytes.
        """
        mark, fallbacks = self.mark, self._fallbacks
        for index, byte in enumerate(data):
            while num_matched and mark[num_matched] != byte:
                num_matched = fallbacks[num_matched]
            if mark[num_matched] == byte:
                num_matched += 1
                if num_matched == len(mark):
                    return MarkState(num_matched, len(data) - index - 1)
        return MarkState(num_matched)

    def is_complete(self, scanned: MarkState) -> bool:
        """Return whether the mark is complete."""
        return scanned.num_matched == len(self.mark)

    def overshooting(self, tokens: Iterable[bytes]) -> list[Ints]:
        """Return the ids of tokens that have bytes after the end of the mark.

        Args:
            tokens: bytes of each token id.

        Returns:
            An array for each number of bytes that are matched before the token.
        """
        mark, last = self.mark, self.mark[-1:]
        suffixes = {mark[start:]: start for start in range(1, len(mark))}
        ids: list[list[int]] = [[] for _ in mark]  # by the part of the mark before the token
        for token, data in enumerate(tokens):
            if last not in data[:-1]:
                continue
            if mark in data[:-1]:
                ids[0].append(token)
            for length in range(1, min(len(data), len(mark))):
                start = suffixes.get(data[:length])
                if start is not None:
                    ids[start].append(token)
        return [
            np.unique(np.array([i for part in self._parts(n) for i in ids[part]], dtype=np.int64))
            for n in range(len(mark))
        ]

    def _parts(self, num_matched: int) -> list[int]:
        """Return the lengths of all parts of the mark that end where the longest one does."""
        parts = [num_matched]
        while parts[-1]:
            parts.append(self._fallbacks[parts[-1]])
        return parts


def _fallbacks(mark: bytes) -> list[int]:
    """Return how much of the mark still matches where the byte after its first i differs."""
    fallbacks, matched = [0, 0], 0
    for byte in mark[1:]:
        while matched and mark[matched] != byte:
            matched = fallbacks[matched]
        matched += mark[matched] == byte
        fallbacks.append(matched)
    return fallbacks


MAX_MARKS = 8  # a look at every token of a large vocabulary takes 0.2 s


class ThinkingMarks:
    """The marks of a reasoning in the tokens of a model, shared by all slots.

    Attributes:
        end: searches for the text that ends the reasoning.
        start_ids: tokens of the text that begins it.
        overshooting: tokens that end the reasoning and go on, see `MarkScanner.overshooting`.
            Empty if no grammar follows.
    """

    def __init__(self, start: str, end: str, vocabulary: "LLTokenizer", has_grammar: bool) -> None:
        """Look the marks up.

        Raises:
            ValueError: the model's tokens cannot write the end.
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
        START: it may begin with the reasoning.
        THINKING: it is in the reasoning.
        CLOSING: the end of the reasoning is written by force.
        ANSWER: the reasoning is over, or there was none.
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
            form: the reasoning.
            marks: its marks.
            grammar: a matcher in its initial state, which is copied; None: the answer is free.
            stop_ids: tokens that end the request.
            generated: `[tokens]` generated before, if the request was retracted or resent.
            jump_forward: append forced tokens without sampling them.
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

    @property
    def matcher(self) -> "LLMatcher | None":
        """That of the grammar, unless the answer is in the reasoning or at its end."""
        is_answer = self._phase is Phase.ANSWER or self._phase is Phase.START
        return self._grammar.matcher if is_answer and self._grammar is not None else None

    def adjust(self, mask: Mask) -> None:
        """Allow the tokens of this phase."""
        match self._phase:
            case Phase.ANSWER:
                assert self._grammar is not None
                self._grammar.adjust(mask)
            case Phase.CLOSING:
                _allow(mask, self._closing[0])
            case Phase.THINKING:
                mask[:] = 0xFF
                _bar_all(mask, self._stop_ids)
                _bar_all(mask, self._marks.overshooting[self._scanned.num_matched])
            case Phase.START:
                if self._grammar is not None:
                    self._grammar.adjust(mask)
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


def _allow(mask: Mask, token: int) -> None:
    mask[token >> 3] |= np.uint8(1 << (token & 7))


def _bar(mask: Mask, token: int) -> None:
    mask[token >> 3] &= np.uint8(0xFF ^ (1 << (token & 7)))


def _bar_all(mask: Mask, ids: Ints) -> None:
    bits = (1 << (ids & 7)).astype(np.uint8)
    np.bitwise_and.at(mask, ids >> 3, ~bits)


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar, the reasoning before it, or both.

    Attributes:
        matcher: in its initial state; slots get copies. None: what follows the reasoning is free.
        thinking: the reasoning and its marks; None: the grammar begins with the answer.
    """

    matcher: "LLMatcher | None"
    thinking: tuple[ThinkingForm, ThinkingMarks] | None = None

    def begin(self, stop_ids: Ints, generated: Ints, jump_forward: bool) -> SlotConstraint:
        """Return the state of a slot after the tokens generated so far.

        Args:
            stop_ids: tokens that end the request.
            generated: `[tokens]` generated before, if the request was retracted or resent.
            jump_forward: append forced tokens without sampling them.
        """
        if self.thinking is not None:
            form, marks = self.thinking
            return GrammarAfterThinking(
                form, marks, self.matcher, stop_ids, generated, jump_forward
            )
        assert self.matcher is not None
        return SlotGrammar(self.matcher.deep_copy(), stop_ids, generated, jump_forward)


def compile_form(vocabulary: "LLTokenizer", form: GrammarForm) -> CompiledGrammar:
    """Return a grammar for slots.

    Raises:
        ValueError: the grammar is wrong, the model's tokens cannot end the reasoning, or nothing
            begins it.
    """
    thinking, text = form.parts()
    if thinking is None:
        return CompiledGrammar(compile_grammar(vocabulary, text))
    matcher = compile_grammar(vocabulary, text) if text else None
    marks = thinking_marks(thinking.start, thinking.end, vocabulary, matcher is not None)
    if not thinking.is_inside and not marks.start_ids:
        raise ValueError("no text begins the reasoning, and the prompt does not end within it")
    return CompiledGrammar(matcher, (thinking, marks))
