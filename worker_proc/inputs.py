"""A plan as tensors: which tokens at which positions, in which rows, and who samples."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quadriga.messages.worker import StepPlan
from worker_proc.attention.base import Ints, Rows
from worker_proc.kv_pool import SlotTable


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, its rows reordered so that similar ones are neighbours (see `Rows`).

    token_ids: [tokens] int32, positions: [tokens] int64, on the device.
    plan_rows: [rows] their numbers in the plan; sampled_slots, sampled_rows: [samples] likewise,
    sample_positions: [samples] the index in its request of the token to be sampled; on the host.
    last_tokens: [samples] where in the step each sampling row ends, on the device; None where
    that is every token, in order.
    """

    rows: Rows
    token_ids: Tensor
    positions: Tensor
    plan_rows: Ints
    sampled_slots: Ints
    sampled_rows: Ints
    sample_positions: Ints
    last_tokens: Tensor | None


def make_inputs(plan: StepPlan, table: SlotTable) -> StepInputs:
    """ValueError where the plan asks for a slot not held, or for tokens that are not known yet or
    have no page."""
    slots, num_tokens = ints_of(plan.slots), ints_of(plan.num_tokens)
    _check(slots, num_tokens, table)
    computed = table.computed[slots]
    many = num_tokens > 1
    order = np.lexsort((computed, num_tokens, many & (computed > 0), many))
    slots, num_tokens, computed = slots[order], num_tokens[order], computed[order]
    ends = np.cumsum(num_tokens)
    slot_of_token = np.repeat(slots, num_tokens)
    positions = np.repeat(computed - ends + num_tokens, num_tokens) + np.arange(ends[-1])
    on_device = table.to_device(positions)
    samples = np.flatnonzero(computed + num_tokens == table.known[slots])
    last_tokens = None if len(samples) == len(positions) else table.to_device(ends[samples] - 1)
    return StepInputs(
        rows=Rows(table.pages, slots, computed, num_tokens),
        token_ids=table.tokens[table.to_device(slot_of_token), on_device],
        positions=on_device,
        plan_rows=order,
        sampled_slots=slots[samples],
        sampled_rows=order[samples],
        sample_positions=table.known[slots[samples]],
        last_tokens=last_tokens,
    )


def ints_of(packed: bytes) -> Ints:
    """The inverse of pack_ids, to count with."""
    return np.frombuffer(packed, dtype="<i4").astype(np.int64)


def _check(slots: Ints, num_tokens: Ints, table: SlotTable) -> None:
    if len(slots) == 0 or len(slots) != len(num_tokens) or num_tokens.min() < 1:
        raise ValueError(f"a plan of {len(slots)} slots with {num_tokens.tolist()} tokens")
    table.require_held(slots, "computes for")
    if len(set(slots.tolist())) != len(slots):
        raise ValueError(f"the plan has two rows for one slot: {slots.tolist()}")
    ends = table.computed[slots] + num_tokens
    if (ends > table.known[slots]).any():
        raise ValueError(f"the plan runs ahead of the known tokens of slots {slots.tolist()}")
    beyond = ends > table.num_pages_of[slots] * table.page_size
    if beyond.any():
        raise ValueError(f"the plan computes beyond the pages of slots {slots[beyond].tolist()}")
