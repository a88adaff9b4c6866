"""What one step runs (ScheduleBatch), and who takes turns at decoding (RunningBatch)."""

import enum
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

from quadriga import messages
from quadriga.messages import NewSlot, StepPlan, pack_ids
from scheduler_proc.request import Request


class ForwardMode(enum.IntEnum):
    """EXTEND: rows with prompt tokens; DECODE: rows of one token; MIXED: both."""

    EXTEND = messages.EXTEND
    DECODE = messages.DECODE
    MIXED = messages.MIXED


@dataclass(slots=True)
class ScheduleBatch:
    """The rows of one step. `planned_at` is the clock's time when the plan was sent."""

    mode: ForwardMode
    requests: list[Request]
    step: int = -1
    planned_at: float = 0.0

    @property
    def batch_size(self) -> int:
        return len(self.requests)

    @property
    def is_empty(self) -> bool:
        return not self.requests

    def to_plan(self, released: list[int]) -> StepPlan:
        """The message for the worker. Call before the rows are advanced."""
        rows = self.requests
        return StepPlan(
            step=self.step,
            forward_mode=self.mode,
            slots=pack_ids([r.slot for r in rows]),
            num_tokens=pack_ids([r.to_compute for r in rows]),
            new=[_new_slot(r) for r in rows] if self.mode is not ForwardMode.DECODE else [],
            released=pack_ids(released),
        )

    def advance(self) -> None:
        """Every row's computed tokens catch up, and the step will sample one more."""
        for request in self.requests:
            request.computed = request.known
            request.known += 1
            request.in_flight += 1


def _new_slot(request: Request) -> NewSlot:
    params = request.params
    assert params.seed is not None, "the front door fills it in"
    return NewSlot(
        slot=request.slot,
        token_ids=pack_ids(request.prompt),
        computed=request.computed,
        pages=pack_ids(request.pages),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
    )


class RunningBatch:
    """The admitted requests that still need decode steps, in the order of their turns."""

    def __init__(self) -> None:
        self._turns: OrderedDict[int, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def merge(self, batch: ScheduleBatch) -> None:
        """Take in the rows of a prefill batch, except those that need no decode step."""
        for request in batch.requests:
            if not request.fully_scheduled:
                self._turns[request.seq] = request

    def remove(self, request: Request) -> None:
        """Nothing happens where it is not there any more."""
        self._turns.pop(request.seq, None)

    def next_group(self, width: int) -> ScheduleBatch:
        """The `width` requests whose turn it is; they go to the back (round-robin)."""
        group = list(islice(self._turns.values(), width))
        if width < len(self._turns):
            for request in group:
                self._turns.move_to_end(request.seq)
        return ScheduleBatch(ForwardMode.DECODE, group)

    def remove_fully_scheduled(self, batch: ScheduleBatch) -> None:
        """After a decode step was planned: drop the rows that need no further one."""
        for request in batch.requests:
            if request.fully_scheduled:
                self.remove(request)
