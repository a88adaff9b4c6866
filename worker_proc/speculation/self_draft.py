"""Draft tokens with the model itself, in fewer bits.

A draft step is an ordinary decode step, of an engine with the same model in fewer bits over the
same KV pages: its keys and values go to the places of the drafted tokens, and the step that
verifies the drafts overwrites them with its own. Drafts are drawn by the seeds and positions of the
tokens that they guess, with the same penalties, so that they are right as often as greedy ones.
(Self-speculation with shared keys and values as in QSpec, arXiv 2410.11305.)
"""

import numpy as np

from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.worker import DECODE, StepPlan
from worker_proc.speculation.guess_source import GuessSource
from worker_proc.step.engine_base import Engine
from worker_proc.step.slot_table import SlotTable, ints_of
from worker_proc.system.step_clock import HostStep

NO_STEP = -1  # no plan of the scheduler has this number


class SelfDrafter(GuessSource):
    """Guess by decode steps of a second engine."""

    def __init__(self, table: SlotTable, draft: Engine) -> None:
        """Draft for the slots of a table.

        Args:
            table: The slots.
            draft: An engine whose KV pages are those of the engine that verifies.
        """
        self._table = table
        self._draft = draft

    def begin(self, plan: StepPlan) -> None:
        """Do nothing: a draft needs the slot's tokens and pages only."""

    def guess(self, plan: StepPlan) -> None:
        """Draft in rounds, and leave the table as it was, with the drafts as guesses."""
        numbers = self._numbers(plan)
        if not numbers:
            return
        table, slots = self._table, list(numbers)
        known, computed = table.num_known[slots], table.num_computed[slots]  # copies
        nonfinite_from = table.nonfinite_from.clone()  # the step computes all of it again
        for place in range(max(numbers.values())):
            self._decode([slot for slot, count in numbers.items() if count > place])
        drafted = [table.known_tokens(*at) for at in zip(slots, known.tolist(), strict=True)]
        table.num_known[slots], table.num_computed[slots] = known, computed
        table.nonfinite_from.copy_(nonfinite_from)
        table.guess(dict(zip(slots, drafted, strict=True)))

    def _numbers(self, plan: StepPlan) -> dict[int, int]:
        """Return the number of tokens to draft by slot, where it is not 0."""
        if not plan.num_guesses:
            return {}
        rows = zip(ints_of(plan.slots).tolist(), ints_of(plan.num_guesses).tolist(), strict=True)
        return {slot: count for slot, most in rows if (count := self._number(slot, most)) > 0}

    def _number(self, slot: int, most: int) -> int:
        """Return the number of tokens to draft after a row's own.

        There are none in a row of several tokens, and none for a grammar that still masks, which
        would have to be copied and followed token by token.
        """
        table = self._table
        if most <= 0 or table.num_computed[slot] + 1 != table.num_known[slot]:
            return 0
        grammar = table.sampling.grammar_of(slot)
        if grammar is not None and not grammar.is_over:
            return 0
        return min(most, table.room_for_guesses(slot))

    def _decode(self, slots: list[int]) -> None:
        """Let each slot know one more token, by a step of the draft."""
        ones = pack_ids(np.ones(len(slots), dtype=np.int32))
        plan = StepPlan(NO_STEP, DECODE, pack_ids(slots), ones, [], b"")
        self._draft.execute(plan, self._table, HostStep())
