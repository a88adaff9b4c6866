"""Mask the logits of rows whose request has a grammar or a limited reasoning."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quadriga.wire.messages.worker import FailedRow
from worker_proc.attention.base import Ints
from worker_proc.system.transfer import send_all

if TYPE_CHECKING:
    from llguidance import LLMatcher

MASKED = float("-inf")


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

    @abstractmethod
    def fill(self, mask: np.ndarray) -> None:
        """Set the bits of the allowed tokens.

        Args:
            mask: [bytes] uint8, with a bit for each token, the lowest id in the lowest bit.
        """

    @abstractmethod
    def advance(self, token: int) -> str:
        """Accept a sampled token. Return why the request cannot continue, or an empty string."""

    @abstractmethod
    def take_forced(self, max_tokens: int) -> list[int]:
        """Accept and return the tokens that must follow, at most `max_tokens`."""

    @abstractmethod
    def copy(self) -> "SlotConstraint":
        """Return the same state, which can go on by itself: to see what follows a guess."""

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
            matcher: In the grammar's initial state, used only by this object.
            stop_ids: Tokens that end the request. They are allowed where the text can end, and
                the matcher does not see them.
            generated: [tokens] generated before, if the request was retracted or resent.
            jump_forward: Append forced tokens without sampling them.
        """
        self._matcher = matcher
        self._jump_forward = jump_forward
        self._stop_ids = stop_ids
        self._stop_set = frozenset(stop_ids.tolist())
        self.consume(generated)

    def consume(self, token_ids: Ints) -> None:
        """Accept tokens `[tokens]` that were generated before."""
        self._matcher.consume_tokens(token_ids.tolist())

    def fill(self, mask: np.ndarray) -> None:
        """Set the bits of the allowed tokens, and none if the library has given up."""
        mask[:] = 0
        if self._matcher.is_error():
            return
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        bits = (1 << (self._stop_ids & 7)).astype(np.uint8)
        if self._matcher.is_accepting():
            np.bitwise_or.at(mask, self._stop_ids >> 3, bits)
        else:
            np.bitwise_and.at(mask, self._stop_ids >> 3, ~bits)

    def advance(self, token: int) -> str:
        """Accept a sampled token. Return why the request cannot continue, or an empty string."""
        matcher = self._matcher
        if token in self._stop_set and matcher.is_accepting():
            return ""
        if not matcher.is_error() and token not in self._stop_set and matcher.consume_token(token):
            return ""
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


def mask_by_grammar(scores: Tensor, rows: Sequence[Constrained]) -> None:
    """Set the tokens that the rows' grammars forbid to -inf, in scores [rows, vocab_size]."""
    rows = [row for row in rows if row.grammar.masks]
    if not rows:
        return
    vocab_size = scores.shape[1]
    masks = np.empty((len(rows), -(-vocab_size // 32) * 4), dtype=np.uint8)
    for mask, constrained in zip(masks, rows, strict=True):
        constrained.grammar.fill(mask)
    numbers = np.array([constrained.row for constrained in rows])
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
        masks: `[rows, bytes]` uint8, see SlotConstraint.fill.
    """
    bits = masks.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=masks.device)
    forbidden = (bits & 1).flatten(1)[:, : scores.shape[1]] == 0
    scores[rows] = scores[rows].masked_fill_(forbidden, MASKED)


def advance(rows: Sequence[Constrained], token_ids: Ints, plan_rows: Ints) -> list[FailedRow]:
    """Advance each grammar by the token of its row. Return the rows that had no allowed token.

    Args:
        rows: The rows with a grammar.
        token_ids: [sampling rows] the sampled tokens.
        plan_rows: [sampling rows] the index of each row in the plan.
    """
    errors = [(row, grammar.advance(int(token_ids[row]))) for row, grammar in rows]
    return [FailedRow(int(plan_rows[row]), error) for row, error in errors if error]
