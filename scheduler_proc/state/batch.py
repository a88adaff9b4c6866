"""The rows of a step, the requests that decode, and what goes into the core and comes out of it.

`ScheduleBatch` has the rows of one step, `RunningBatch` the requests that decode. `Capacity` and
`BatchMode` go into the core; `Plan` and `StepUpdate` come out of it.
"""

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from quadriga.wire import worker
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import DraftCost, NewSlot, StepPlan
from scheduler_proc.state.kv_offload import NO_TIERS, TierFacts
from scheduler_proc.state.request import Request, RequestFailure, RetractReason, WaitReason

# The rows of one step (ScheduleBatch), and the requests that decode (RunningBatch).

# Returns the requests that have the next rows, as many as asked for, and moves them to the end.
NextRows = Callable[[dict[int, Request], int], list[Request]]


class ForwardMode(enum.IntEnum):
    """EXTEND: rows with prompt tokens; DECODE: rows of one token; MIXED: both."""

    EXTEND = worker.EXTEND
    DECODE = worker.DECODE
    MIXED = worker.MIXED


@dataclass(slots=True)
class ScheduleBatch:
    """The rows of one step: decode rows first, then prompts and chunks of prompts.

    Attributes:
        num_tokens: number of tokens that each of `requests` computes.
        new: requests that enter a slot with this step.
        grown: slot, page, slot, page, … of page tables that become longer.
        num_decodes: number of decode rows.
        num_pairs: pairs of a prompt token and a token that it attends to, in a model without
            windows.
        planned_at: time at which the plan was sent.
        cut_rows: decode rows that sample nothing, as their pages end among forced tokens.
        num_guesses: number of tokens that the worker may guess in each row; None: in no row.
        groups: for each of `new`, the requests from whose answers it may be guessed; empty: nothing
            is guessed.
    """

    requests: list[Request] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    new: list[NewSlot] = field(default_factory=list)
    grown: list[int] = field(default_factory=list)
    num_decodes: int = 0
    num_pairs: int = 0
    step: int = -1
    planned_at: float = 0.0
    cut_rows: set[int] = field(default_factory=set)
    num_guesses: list[int] | None = None
    groups: list[bytes] = field(default_factory=list)

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return len(self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of prompts."""
        return sum(self.num_tokens[self.num_decodes :])

    @property
    def num_prompts(self) -> int:
        """Number of rows of prompts."""
        return len(self.requests) - self.num_decodes

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not self.requests

    @property
    def mode(self) -> ForwardMode:
        """What kinds of rows the step has."""
        if self.num_decodes == len(self.requests):
            return ForwardMode.DECODE
        return ForwardMode.MIXED if self.num_decodes else ForwardMode.EXTEND

    def add_decodes(self, requests: Iterable[Request]) -> None:
        """Add a decode row for each request, whose pages must have room for the token.

        After forced tokens a row computes as many of them as its pages hold.
        """
        rows, num_tokens, before = self.requests, self.num_tokens, len(self.requests)
        for request in requests:
            known, computed = request.num_known_tokens, request.num_computed_tokens
            count = known - computed
            if count > 1:
                count = min(count, request.page_capacity - computed)
            request.num_computed_tokens = computed = computed + count
            if computed == known:
                request.num_known_tokens = known + 1
            else:
                self.cut_rows.add(len(rows))
            request.in_flight += 1
            rows.append(request)
            num_tokens.append(count)
        self.num_decodes += len(rows) - before

    def add_prefill(self, request: Request, count: int) -> bool:
        """Add a row for the next `count` known tokens. Return whether it samples a token."""
        request.in_flight += 1
        self.requests.append(request)
        self.num_tokens.append(0)
        return self._extend_row(len(self.requests) - 1, count)

    def extend_prefill(self, request: Request, count: int) -> bool:
        """Add a prompt's next `count` known tokens to its row, if it has one, as add_prefill."""
        for row in range(self.num_decodes, len(self.requests)):
            if self.requests[row] is request:
                return self._extend_row(row, count)
        return self.add_prefill(request, count)

    def _extend_row(self, row: int, count: int) -> bool:
        request = self.requests[row]
        self.num_pairs += count * request.num_computed_tokens + count * (count + 1) // 2
        request.num_computed_tokens += count
        samples = request.num_computed_tokens == request.num_known_tokens
        request.num_known_tokens += samples
        self.num_tokens[row] += count
        return samples

    def to_plan(self, released: list[int], session: int) -> StepPlan:
        """Return the message for the worker of this session, which first forgets `released`."""
        return StepPlan(
            step=self.step,
            forward_mode=self.mode,
            slots=pack_ids([r.slot for r in self.requests]),
            num_tokens=pack_ids(self.num_tokens),
            new=self.new,
            released=pack_ids(released),
            grown=pack_ids(self.grown),
            session=session,
            num_guesses=pack_ids(self.num_guesses or ()),
            groups=self.groups,
        )


def take_turns(requests: dict[int, Request], count: int) -> list[Request]:
    """Return the first `count` requests, and move them to the end if there are others."""
    if len(requests) <= count:
        return list(requests.values())
    group = list(islice(requests.values(), count))
    move_to_end(requests, group)
    return group


def move_to_end(requests: dict[int, Request], group: Iterable[Request]) -> None:
    """Put some of the requests, by number, behind the others."""
    for request in group:
        requests[request.seq] = requests.pop(request.seq)


class RunningBatch:
    """The prefilled requests that still need decode steps, in the order of their turns.

    Requests of the smallest priority, such as the lines of a batch, are in the background: beside
    others, only a few of them have rows.

    Args:
        width: largest number of decode rows of a step.
        num_beside: number of requests in the background that run beside others.
        next_rows: which of the others have rows, as take_turns.

    Attributes:
        width: largest number of decode rows of a step.
        partial: the requests, beside them, of whose prompts only a part is computed, by number.
    """

    def __init__(self, width: int, num_beside: int, next_rows: NextRows) -> None:
        self.width = width
        self._num_beside = num_beside
        self._next_rows = next_rows
        self._foreground: dict[int, Request] = {}
        self._background: dict[int, Request] = {}
        self.partial: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._foreground) + len(self._background)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._foreground.values(), self._background.values())

    def __contains__(self, request: Request) -> bool:
        return request.seq in self._foreground or request.seq in self._background

    def add(self, request: Request) -> None:
        """Add a request whose prompt is computed."""
        (self._background if request.is_background else self._foreground)[request.seq] = request

    @property
    def all_requests(self) -> list[Request]:
        """All decoding requests and the partially prefilled ones."""
        return [*self, *self.partial.values()]

    @property
    def is_empty(self) -> bool:
        """Whether no request decodes, or is partially prefilled."""
        return not (self._foreground or self._background or self.partial)

    @property
    def num_rows(self) -> int:
        """Number of decode rows of the next step."""
        return min(self.width, self.num_active)

    @property
    def num_active(self) -> int:
        """Number of decoding requests that do not pause."""
        return len(self._foreground) + self._num_active_in_background

    @property
    def _num_active_in_background(self) -> int:
        prompts = self.partial.values()
        is_alone = not self._foreground and all(request.is_background for request in prompts)
        num_background = len(self._background)
        return num_background if is_alone else min(self._num_beside, num_background)

    def remove(self, request: Request) -> None:
        """Remove a request, if it is there."""
        self._foreground.pop(request.seq, None)
        self._background.pop(request.seq, None)
        self.partial.pop(request.seq, None)

    def next_group(self) -> list[Request]:
        """Return the requests that have the next rows, and move them to the end."""
        group = self._next_rows(self._foreground, self.width)
        if self._background:
            room = min(self.width - len(group), self._num_active_in_background)
            group += take_turns(self._background, room)
        return group


class Capacity(NamedTuple):
    """What the worker has room for; without pages, there is no worker yet.

    Attributes:
        prefill_tokens: prompt tokens of one step that keep the worker busy.
        window: number of tokens, itself included, that a token sees in every layer; 0: all.
        can_guess: whether the worker guesses tokens.
        draft_costs: of steps that draft guesses; empty: none does.
        tiers: what the worker says of the tiers beyond the pool.
        is_encoder: as in WorkerReady.
    """

    num_pages: int = 0
    page_size: int = 1
    prefill_tokens: int = 0
    window: int = 0
    can_guess: bool = False
    draft_costs: Sequence[DraftCost] = ()
    tiers: TierFacts = NO_TIERS
    is_encoder: bool = False


class BatchMode(str, enum.Enum):
    """What a step computes (--batch-mode).

    PREFILL_FIRST: prompts before anything else; but after a chunk the running requests have a
        step, so that a long prompt never stops them for longer than one chunk.
    MIXED: each step decodes and computes prompts, as many as the token budget allows.
    DECODE_FIRST: prompts only as long as one decode step is not full.
    ALTERNATE: one step of prompts, then one decode step.
    """

    PREFILL_FIRST = "prefill-first"
    MIXED = "mixed"
    DECODE_FIRST = "decode-first"
    ALTERNATE = "alternate"

    def admits(self, num_active: int, width: int) -> bool:
        """Return whether a step may compute prompts beside requests that could decode.

        Args:
            num_active: number of requests that decode.
            width: largest number of decode rows of a step.
        """
        return self is not BatchMode.DECODE_FIRST or num_active < width


@dataclass(slots=True)
class Plan:
    """The next step; its batch is empty where nothing can run.

    Attributes:
        has_retracted: whether requests left the running batch since its composition began.
        admitted: requests that left the waiting queue.
        retracted: requests that lost slot and pages, and why.
        failed: requests that cannot go on.
        lacked: what the step lacks for the requests that still wait; None where it looked at none
            of them, or admitted all.
    """

    in_flight: bool
    batch: ScheduleBatch = field(default_factory=ScheduleBatch)
    has_retracted: bool = False
    admitted: list[Request] = field(default_factory=list)
    retracted: list[tuple[Request, RetractReason]] = field(default_factory=list)
    failed: list[RequestFailure] = field(default_factory=list)
    lacked: WaitReason | None = None


@dataclass(slots=True)
class StepUpdate:
    """What a step brought: token_ids[i] belongs to request seqs[i].

    Attributes:
        started: requests that have their first token.
        finished: requests that ended by themselves, with a stop token or at their length.
        failed: retracted requests that do not fit into the pool any more.
    """

    seqs: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    failed: list[RequestFailure] = field(default_factory=list)
