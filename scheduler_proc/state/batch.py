"""What one step runs (ScheduleBatch), and who takes turns at decoding (RunningBatch)."""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from quadriga.sampling.params import NEUTRAL, given
from quadriga.wire.messages import worker
from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.worker import NewSlot, StepPlan
from scheduler_proc.state.request import Request


class ForwardMode(enum.IntEnum):
    """EXTEND: rows with prompt tokens; DECODE: rows of one token; MIXED: both."""

    EXTEND = worker.EXTEND
    DECODE = worker.DECODE
    MIXED = worker.MIXED


@dataclass(slots=True)
class ScheduleBatch:
    """The rows of one step: decode rows first, then prompts and chunks of prompts.

    num_tokens: what each of `requests` computes. new: those that enter a slot with this step;
    grown: slot, page, slot, page, ... for page tables that become longer.
    num_decodes: rows that decode.
    planned_at: the clock's time when the plan was sent.
    """

    requests: list[Request] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    new: list[NewSlot] = field(default_factory=list)
    grown: list[int] = field(default_factory=list)
    num_decodes: int = 0
    step: int = -1
    planned_at: float = 0.0

    @property
    def batch_size(self) -> int:
        return len(self.requests)

    @property
    def is_empty(self) -> bool:
        return not self.requests

    @property
    def mode(self) -> ForwardMode:
        if self.num_decodes == len(self.requests):
            return ForwardMode.DECODE
        return ForwardMode.MIXED if self.num_decodes else ForwardMode.EXTEND

    def add_decodes(self, requests: Iterable[Request]) -> None:
        """The next token of requests that have room for it in their pages; after a jump, as many
        as there is room for."""
        rows, num_tokens, before = self.requests, self.num_tokens, len(self.requests)
        for request in requests:
            known, computed = request.known, request.computed
            count = known - computed
            if count > 1:
                count = min(count, request.capacity - computed)
            request.computed = computed = computed + count
            if computed == known:
                request.known = known + 1
            request.in_flight += 1
            rows.append(request)
            num_tokens.append(count)
        self.num_decodes += len(rows) - before

    def add_prefill(self, request: Request, count: int) -> bool:
        """The next `count` known tokens of a request. Whether nothing is left then, so that it
        samples a token."""
        request.computed += count
        samples = request.computed == request.known
        request.known += samples
        request.in_flight += 1
        self.requests.append(request)
        self.num_tokens.append(count)
        return samples

    def to_plan(self, released: list[int], session: int) -> StepPlan:
        """The message for the worker."""
        return StepPlan(
            step=self.step,
            forward_mode=self.mode,
            slots=pack_ids([r.slot for r in self.requests]),
            num_tokens=pack_ids(self.num_tokens),
            new=self.new,
            released=pack_ids(released),
            grown=pack_ids(self.grown),
            session=session,
        )


def new_slot(request: Request) -> NewSlot:
    """A request that was given a slot and pages, as the worker must know it."""
    params = request.params
    assert params.seed is not None, "the front door fills it in"
    return NewSlot(
        slot=request.slot,
        token_ids=pack_ids(request.tokens),
        computed=request.computed,
        pages=pack_ids(request.pages),
        temperature=given(params.temperature, NEUTRAL.temperature),
        top_k=given(params.top_k, NEUTRAL.top_k),
        top_p=given(params.top_p, NEUTRAL.top_p),
        seed=params.seed,
        rules=request.rules_to_go,
    )


class RunningBatch:
    """The prefilled requests that still need decode steps, in the order of their turns.

    chunked: who runs beside them, with a prompt of which a part is computed.
    """

    def __init__(self) -> None:
        self._turns: dict[int, Request] = {}
        self.chunked: Request | None = None

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._turns.values())

    def __contains__(self, request: Request) -> bool:
        return request.seq in self._turns

    def merge(self, request: Request) -> None:
        """Take in a request whose prompt is computed."""
        self._turns[request.seq] = request

    @property
    def everybody(self) -> list[Request]:
        """Those who decode, and the chunked one."""
        others = [] if self.chunked is None else [self.chunked]
        return [*self._turns.values(), *others]

    def remove(self, request: Request) -> None:
        """Nothing happens where it is not there any more."""
        self._turns.pop(request.seq, None)
        if self.chunked is request:
            self.chunked = None

    def next_group(self, width: int) -> list[Request]:
        """The `width` requests whose turn it is; they go to the back (round-robin)."""
        if len(self._turns) <= width:
            return list(self._turns.values())
        group = list(islice(self._turns.values(), width))
        for request in group:
            self._turns[request.seq] = self._turns.pop(request.seq)
        return group
