"""The rows of a plan as arrays: which tokens are computed at which positions, and who samples."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
from torch import Tensor

from quadriga.wire.worker import StepPlan
from worker_proc.models.attention import BatchLayout, Ints
from worker_proc.models.transfer import send
from worker_proc.step.clock import HostStep, RunningStep
from worker_proc.step.slot_table import SlotTable, ints_of

Value = TypeVar("Value")


class LazyAttribute(Generic[Value]):
    """An attribute that is computed at its first use.

    Unlike functools.cached_property of Python 3.10 and 3.11 it takes no lock at every step.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self._name = compute.__name__

    def __get__(self, instance: Any, owner: type) -> Value:
        value = self._compute(instance)
        instance.__dict__[self._name] = value
        return value


@dataclass
class StepInputs:
    """The rows of one step, ordered as BatchLayout demands.

    Arrays are on the host. Tensors are sent to the device at their first use.

    Attributes:
        table: the slots.
        clock: of the step; an engine may start it again right before its first kernel.
        layout: the rows.
        num_computed_after: `[rows]` computed tokens of each row's slot after the step.
        plan_rows: `[rows]` the row's number in the plan.
        token_slots, token_positions: `[tokens]` where each token of the step belongs.
        samples: `[samples]` the row of each sample. A row with drafts has one more than drafts,
            one after the other.
        sampled_slots, sampled_rows: `[samples]` their slots, and their numbers in the plan.
        sample_positions: `[samples]` the position of the token to be sampled in its request.
    """

    table: SlotTable
    clock: RunningStep
    layout: BatchLayout
    num_computed_after: Ints
    plan_rows: Ints
    token_slots: Ints
    token_positions: Ints
    samples: Ints
    sampled_slots: Ints
    sampled_rows: Ints
    sample_positions: Ints

    @LazyAttribute
    def positions(self) -> Tensor:
        """`[tokens]` int64."""
        return send(self.token_positions, self.table.device)

    @LazyAttribute
    def token_ids(self) -> Tensor:
        """`[tokens]` int32."""
        return self.table.tokens_at(self.token_slots, self.token_positions)

    @LazyAttribute
    def is_second(self) -> Tensor | None:
        """`[tokens]` bool: the token is of the second type; None: none is."""
        begins = self.table.second_from[self.token_slots]
        is_second = self.token_positions >= begins
        return send(is_second, self.table.device) if is_second.any() else None

    @LazyAttribute
    def token_adapters(self) -> Ints | None:
        """`[tokens]` the index of each token's adapter, on the host; None: no token has one."""
        return self.table.adapters_of(self.token_slots)

    @LazyAttribute
    def last_tokens(self) -> Tensor | None:
        """`[samples]` the token before each sample; None: every token is one, in order."""
        return None if self.decodes_only else send(self.sample_places, self.table.device)

    @LazyAttribute
    def sample_places(self) -> Ints:
        """`[samples]` the token of the step before each sample."""
        layout = self.layout
        first = np.cumsum(layout.num_tokens) - layout.num_tokens - layout.num_computed
        places: Ints = first[self.samples] + self.sample_positions - 1
        return places

    def of_samples(self, values: Tensor) -> Tensor:
        """Return the rows `[samples, …]` of `[tokens, …]` after which a token is sampled."""
        last = self.last_tokens
        return values if last is None else values.index_select(0, last)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all rows."""
        return len(self.token_slots)

    @property
    def decodes_only(self) -> bool:
        """True if a token is sampled after every one; without drafts, each row has one."""
        return len(self.samples) == self.num_tokens

    @property
    def has_single_tokens(self) -> bool:
        """True if every row has one token, after which one is sampled."""
        return self.decodes_only and len(self.layout.slots) == self.num_tokens


def make_inputs(plan: StepPlan, table: SlotTable, clock: RunningStep | None = None) -> StepInputs:
    """Return the rows of a plan; nothing is computed on the device yet.

    Raises:
        ValueError: a slot is not held, or a row's tokens are not known yet or have no page.
    """
    slots, num_tokens = ints_of(plan.slots), ints_of(plan.num_tokens)
    _check_rows(slots.tolist(), num_tokens.tolist(), table)
    num_computed, num_known = table.num_computed[slots], table.num_known[slots]
    has_forced = table.has_forced[slots]
    reach = np.minimum(num_known, table.num_pages_of[slots] * table.page_size)
    if (num_computed + num_tokens > reach).any():
        _explain_reach(slots, num_computed + num_tokens, num_known, reach)
    if has_forced.any():
        num_tokens = np.where(has_forced, reach - num_computed, num_tokens)
    if table.has_drafts:
        num_tokens = num_tokens + table.num_drafts[slots]
    several = num_tokens > 1
    all_single = not several.any()  # as in most steps, for which the general way takes too long
    order = (
        num_computed.argsort(kind="stable")
        if all_single
        else np.lexsort((num_computed, num_tokens, several & (num_computed > 0), several))
    )
    slots, num_tokens, num_computed = slots[order], num_tokens[order], num_computed[order]
    num_computed_after, num_known = num_computed + num_tokens, num_known[order]
    token_slots, token_positions = slots, num_computed
    if not all_single:
        ends = np.cumsum(num_tokens)
        token_slots = np.repeat(slots, num_tokens)
        starts = np.repeat(num_computed - ends + num_tokens, num_tokens)
        token_positions = starts + np.arange(ends[-1])
    if table.has_drafts:
        samples, sample_positions = _drafting_samples(num_computed_after, num_known, slots, table)
    else:
        samples = (num_computed_after == num_known).nonzero()[0]
        if table.poolings:
            samples = samples[[int(slot) not in table.poolings for slot in slots[samples]]]
        sample_positions = num_known[samples]
    return StepInputs(
        table=table,
        clock=HostStep() if clock is None else clock,
        layout=BatchLayout(table.pages, slots, num_computed, num_tokens),
        num_computed_after=num_computed_after,
        plan_rows=order,
        token_slots=token_slots,
        token_positions=token_positions,
        samples=samples,
        sampled_slots=slots[samples],
        sampled_rows=order[samples],
        sample_positions=sample_positions,
    )


def _drafting_samples(
    num_computed_after: Ints, num_known: Ints, slots: Ints, table: SlotTable
) -> tuple[Ints, Ints]:
    """Return row and position of each sample: after the last known token, and after each draft."""
    num_drafts = table.num_drafts[slots]
    rows = (num_computed_after == num_known + num_drafts).nonzero()[0]
    counts = num_drafts[rows] + 1
    samples = np.repeat(rows, counts)
    ends = np.cumsum(counts)
    places = np.arange(len(samples)) - np.repeat(ends - counts, counts)
    return samples, num_known[samples] + places


def _check_rows(slots: list[int], num_tokens: list[int], table: SlotTable) -> None:
    if len(slots) == 0 or len(slots) != len(num_tokens) or min(num_tokens) < 1:
        raise ValueError(f"a plan of {len(slots)} slots with {num_tokens} tokens")
    table.require_held(slots, "computes for")
    if len(set(slots)) != len(slots):
        raise ValueError(f"the plan has two rows for one slot: {slots}")


def _explain_reach(slots: Ints, reached: Ints, num_known: Ints, reach: Ints) -> NoReturn:
    ahead = slots[reached > num_known].tolist()
    if ahead:
        raise ValueError(f"the plan runs ahead of the known tokens of slots {ahead}")
    beyond = slots[reached > reach].tolist()
    raise ValueError(f"the plan computes beyond the pages of slots {beyond}")
