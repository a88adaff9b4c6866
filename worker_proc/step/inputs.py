"""A plan as arrays: which tokens at which positions, in which rows, and who samples."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
from torch import Tensor

from quadriga.wire.messages.worker import StepPlan
from worker_proc.attention.base import BatchLayout, Ints
from worker_proc.step.slot_table import SlotTable

Value = TypeVar("Value")


class Once(Generic[Value]):
    """An attribute that is worked out when it is first asked for. The one in functools takes a lock
    for it, in each step."""

    def __init__(self, work_out: Callable[[Any], Value]) -> None:
        self._work_out = work_out
        self._name = work_out.__name__

    def __get__(self, instance: Any, owner: type) -> Value:
        value = self._work_out(instance)
        instance.__dict__[self._name] = value
        return value


@dataclass
class StepInputs:
    """One step, its rows reordered so that similar ones are neighbours (see `Rows`).

    On the host: reached: [rows] tokens of each that are computed after the step; plan_rows: [rows]
    their numbers in the plan; slot_of_token, position_of_token: [tokens]; samples: [samples] the
    rows that sample, sampled_slots, sampled_rows their slots and numbers in the plan,
    sample_positions the index in its request of the token to be sampled.
    What is on the device is sent there when it is first asked for.
    """

    table: SlotTable
    rows: BatchLayout
    reached: Ints
    plan_rows: Ints
    slot_of_token: Ints
    position_of_token: Ints
    samples: Ints
    sampled_slots: Ints
    sampled_rows: Ints
    sample_positions: Ints

    @Once
    def positions(self) -> Tensor:
        """[tokens] int64."""
        return self.table.to_device(self.position_of_token)

    @Once
    def token_ids(self) -> Tensor:
        """[tokens] int32."""
        return self.table.tokens_at(self.slot_of_token, self.position_of_token)

    @Once
    def last_tokens(self) -> Tensor | None:
        """[samples] where in the step each sampling row ends; None where that is every token, in
        order."""
        if self.decodes_only:
            return None
        return self.table.to_device(self.ends_of_samples)

    def of_samples(self, values: Tensor) -> Tensor:
        """values: [tokens, …]; those of the tokens after which a row samples [samples, …]."""
        last = self.last_tokens
        return values if last is None else values.index_select(0, last)

    @property
    def ends_of_samples(self) -> Ints:
        """[samples] where in the step each sampling row ends."""
        return np.cumsum(self.rows.num_tokens)[self.samples] - 1

    @property
    def num_tokens(self) -> int:
        """Of all rows."""
        return len(self.slot_of_token)

    @property
    def decodes_only(self) -> bool:
        """Every row has one token, and samples."""
        return len(self.samples) == self.num_tokens


def make_inputs(plan: StepPlan, table: SlotTable) -> StepInputs:
    """ValueError where the plan asks for a slot not held, or for tokens that are not known yet or
    have no page."""
    slots, num_tokens = ints_of(plan.slots), ints_of(plan.num_tokens)
    _check_rows(slots.tolist(), num_tokens.tolist(), table)
    computed, known, jumps = table.computed[slots], table.known[slots], table.jumps[slots]
    reach = np.minimum(known, table.num_pages_of[slots] * table.page_size)
    if (computed + num_tokens > reach).any():
        _explain_reach(slots, computed + num_tokens, known, reach)
    if jumps.any():
        num_tokens = np.where(jumps, reach - computed, num_tokens)
    many = num_tokens > 1
    decodes = not many.any()  # most steps do, and what is known of them need not be worked out
    order = (
        computed.argsort(kind="stable")
        if decodes
        else np.lexsort((computed, num_tokens, many & (computed > 0), many))
    )
    slots, num_tokens, computed = slots[order], num_tokens[order], computed[order]
    reached, known = computed + num_tokens, known[order]
    slot_of_token, position_of_token = slots, computed
    if not decodes:
        ends = np.cumsum(num_tokens)
        slot_of_token = np.repeat(slots, num_tokens)
        starts = np.repeat(computed - ends + num_tokens, num_tokens)
        position_of_token = starts + np.arange(ends[-1])
    samples = (reached == known).nonzero()[0]
    return StepInputs(
        table=table,
        rows=BatchLayout(table.pages, slots, computed, num_tokens),
        reached=reached,
        plan_rows=order,
        slot_of_token=slot_of_token,
        position_of_token=position_of_token,
        samples=samples,
        sampled_slots=slots[samples],
        sampled_rows=order[samples],
        sample_positions=known[samples],
    )


def ints_of(packed: bytes) -> Ints:
    """The inverse of pack_ids, to count with."""
    return np.frombuffer(packed, dtype="<i4").astype(np.int64)


def _check_rows(slots: list[int], num_tokens: list[int], table: SlotTable) -> None:
    if len(slots) == 0 or len(slots) != len(num_tokens) or min(num_tokens) < 1:
        raise ValueError(f"a plan of {len(slots)} slots with {num_tokens} tokens")
    table.require_held(slots, "computes for")
    if len(set(slots)) != len(slots):
        raise ValueError(f"the plan has two rows for one slot: {slots}")


def _explain_reach(slots: Ints, reached: Ints, known: Ints, reach: Ints) -> NoReturn:
    ahead = slots[reached > known].tolist()
    if ahead:
        raise ValueError(f"the plan runs ahead of the known tokens of slots {ahead}")
    beyond = slots[reached > reach].tolist()
    raise ValueError(f"the plan computes beyond the pages of slots {beyond}")
