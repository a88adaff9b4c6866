"""What a slot's grammar lets come next."""

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quadriga.wire.messages.worker import FailedRow
from worker_proc.attention.base import Ints

if TYPE_CHECKING:
    from llguidance import LLMatcher

BARRED = float("-inf")


class SlotGrammar:
    """Where a text stands in its grammar: a function of the tokens generated so far.

    matcher: at the grammar's beginning, for nobody else. stop_ids: the tokens that end the
    request; they may come only where the text may end, and the matcher never sees them. jumps:
    tokens that are forced need not be chosen.
    """

    def __init__(
        self, matcher: "LLMatcher", stop_ids: Ints, generated: Ints, jumps: bool = False
    ) -> None:
        self._matcher = matcher
        self._jumps = jumps
        self._stop_ids = stop_ids
        self._stops = frozenset(stop_ids.tolist())
        self._matcher.consume_tokens(generated.tolist())

    def fill(self, mask: np.ndarray) -> None:
        """mask: [bytes] uint8, a bit for each id that may come next, the lowest first. Nothing may
        where the library has given up."""
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
        """The token that was chosen. Says why the request cannot go on, or nothing."""
        matcher = self._matcher
        if token in self._stops and matcher.is_accepting():
            return ""
        if not matcher.is_error() and token not in self._stops and matcher.consume_token(token):
            return ""
        reason = matcher.get_error().removesuffix("\n<non-verbose/>")
        return (
            "no token is left that the grammar and the request's other rules allow"
            f" ({reason or 'all are barred'}); loosen one of them"
        )

    def forced(self, most: int) -> list[int]:
        """The tokens that must follow now, at most so many, as the tokenizer would write them. They
        are taken."""
        if not self._jumps or self._matcher.is_error():
            return []
        found = self._matcher.compute_ff_tokens()[:most]
        token_ids = list(takewhile(lambda token: token not in self._stops, found))
        self._matcher.consume_tokens(token_ids)
        return token_ids


class Constrained(NamedTuple):
    """A row of a step, and its slot's grammar."""

    row: int
    grammar: SlotGrammar


def mask_by_grammar(scores: Tensor, rows: Sequence[Constrained]) -> None:
    """Set to -inf what their grammars do not allow in these rows of scores [rows, vocab_size]."""
    if not rows:
        return
    vocab_size = scores.shape[1]
    masks = np.empty((len(rows), -(-vocab_size // 32) * 4), dtype=np.uint8)
    for mask, one in zip(masks, rows, strict=True):
        one.grammar.fill(mask)
    bits = np.unpackbits(~masks, axis=1, count=vocab_size, bitorder="little")
    barred = torch.from_numpy(bits.view(np.bool_)).to(scores.device)
    for place, one in enumerate(rows):
        scores[one.row].masked_fill_(barred[place], BARRED)


def advance(rows: Sequence[Constrained], token_ids: Ints, plan_rows: Ints) -> list[FailedRow]:
    """Each grammar takes the token of its row. Gives those for which there was none.

    token_ids, plan_rows: [rows of the step], what was chosen, and the number of each in its plan.
    """
    told = [(one.row, one.grammar.advance(int(token_ids[one.row]))) for one in rows]
    return [FailedRow(int(plan_rows[row]), error) for row, error in told if error]
