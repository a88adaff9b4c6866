"""Tokens that a grammar forces: they follow the one that was chosen without a step of their own."""

from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.worker import ForcedRow
from worker_proc.sample_step import SampledTokens
from worker_proc.step.inputs import StepInputs

MAX_AT_ONCE = 32
"""So that one row cannot make a step long for the others."""


def jump(chosen: SampledTokens, inputs: StepInputs) -> list[ForcedRow]:
    """Add what the grammars of a step force to what is known of its slots, once they have taken
    what was chosen. The next step of each computes it with the chosen token."""
    table, told = inputs.table, []
    for row, grammar in chosen.constrained:
        slot = int(inputs.sampled_slots[row])
        room = table.context_length - int(table.known[slot])
        token_ids = grammar.take_forced(min(room, MAX_AT_ONCE))
        if token_ids:
            table.jump(slot, token_ids)
            told.append(ForcedRow(int(inputs.sampled_rows[row]), pack_ids(token_ids)))
    return told
