"""One server of a simulation: frontend, scheduler and worker on a simulated clock.

The scheduler is the real one. A step of the worker takes the time of the cost model, and its tokens
come from a hash. The time of messages between the processes is in the model's delays.
"""

import math
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from quadriga.errors import PromptTooLong
from quadriga.sampling.params import SamplingParams
from quadriga.server.config.engine_args import GPU_PREFILL_TOKENS
from quadriga.server.config.server_config import ServerConfig
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.cache import CacheHint
from quadriga.wire.packing import pack_ids
from quadriga.wire.to_detok import HandedBack, StepOutput, StreamEnd
from quadriga.wire.to_scheduler import SchedulerMessage, Submit
from quadriga.wire.worker import (
    NO_ADAPTER,
    AdapterReady,
    EvictAdapter,
    LoadAdapter,
    LoadPages,
    ResultMessage,
    StepPlan,
    StepResult,
    StorePages,
    WorkerReady,
)
from scheduler_proc.journal.writer import NoJournal
from scheduler_proc.main import MAX_MESSAGES_PER_STEP
from scheduler_proc.observe.replica_report import ReplicaReport
from scheduler_proc.scheduler import Scheduler
from simulator.clock import Clock
from simulator.cost_model import CostModel, features_of
from simulator.latency import MS
from simulator.records import Growing
from simulator.roles import SimulatedExchange, SimulatedMover
from simulator.trace import MIN_TOKEN_ID, TraceRequest
from worker_proc.startup.prefill_tuning import CANDIDATE_SIZES, smallest_good_size

# The simulated worker: steps take the time of the cost model, and tokens come from a hash.

Ints = npt.NDArray[np.int64]


def draw_ids(seeds: Ints, positions: Ints, vocab_size: int) -> Ints:
    """Return the tokens of the simulated model at positions, different for each seed."""
    mixed = (seeds * 1_000_003 + positions) * 2_654_435_761 & 0x7FFF_FFFF_FFFF
    return MIN_TOKEN_ID + (mixed >> 13) % (vocab_size - MIN_TOKEN_ID)


class StepWork(NamedTuple):
    """What a plan computes.

    Attributes:
        token_ids: int32 bytes, one per row; -1 for a row that does not sample.
        num_tokens: [rows] tokens that the step computes.
        computed: [rows] tokens that were computed before it.
        num_samples: number of rows that sample.
        num_adapters: number of adapters that the rows have.
    """

    token_ids: bytes
    num_tokens: Ints
    computed: Ints
    num_samples: int
    num_adapters: int


class SimulatedSlots:
    """The number of known and of computed tokens of each slot; tokens come from a hash."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._known = np.zeros(num_slots, np.int64)
        self._computed = np.zeros(num_slots, np.int64)
        self._seeds = np.zeros(num_slots, np.int64)
        self._adapters = np.full(num_slots, NO_ADAPTER)

    def apply(self, plan: StepPlan) -> StepWork:
        """Apply a plan to the slots, and return its work."""
        for new in plan.new:
            self._known[new.slot] = len(new.token_ids) // 4
            self._computed[new.slot] = new.computed
            self._seeds[new.slot] = new.seed
            self._adapters[new.slot] = new.adapter
        slots = np.frombuffer(plan.slots, "<i4")
        num_tokens = np.frombuffer(plan.num_tokens, "<i4").astype(np.int64)
        before, known = self._computed[slots], self._known[slots]
        after = before + num_tokens
        samples = after == known
        assert (after <= known).all(), "a token is computed that is not known"
        self._computed[slots] = after
        self._known[slots] = known + samples
        tokens = np.where(samples, draw_ids(self._seeds[slots], known, self._vocab_size), -1)
        adapters = np.unique(self._adapters[slots])
        return StepWork(
            tokens.astype("<i4").tobytes(), num_tokens, before, int(samples.sum()),
            int((adapters != NO_ADAPTER).sum()),
        )  # fmt: skip


class SimulatedWorker:
    """A worker without a model.

    `deliver` is called with the time at which the scheduler has a result, and the result. With an
    exchange, it moves pages there and back.
    """

    def __init__(
        self,
        model: CostModel,
        num_slots: int,
        clock: Clock,
        deliver: Callable[[float, ResultMessage], None],
        exchange: SimulatedExchange | None = None,
    ) -> None:
        self._mover = None if exchange is None else SimulatedMover(exchange, clock, deliver)
        self._prices = model.prices
        self._adapters_ms = model.adapters_ms
        self._adapters_in_memory: set[str] = set()
        self._plan_delay = model.delays_ms.plan / MS
        self._gap = model.delays_ms.gap / MS
        self._result_delay = model.delays_ms.result / MS
        self._window = model.measured_on.window
        self._clock = clock
        self._deliver = deliver
        self._slots = SimulatedSlots(num_slots, model.measured_on.vocab_size)
        self._free_at = 0.0
        self.steps = 0
        self.rows = 0
        self.busy = 0.0

    def send(self, message: msgspec.Struct) -> None:
        """Receive the scheduler's message to the worker."""
        if isinstance(message, LoadAdapter):
            is_in_memory = message.adapter.id in self._adapters_in_memory
            seconds = 0.0 if is_in_memory else self._adapters_ms.load / MS
            self._adapters_in_memory.add(message.adapter.id)
            loaded = AdapterReady(message.adapter.id, message.place, seconds=seconds)
            self._deliver(self._clock.now + seconds, loaded)
        elif isinstance(message, EvictAdapter):
            self._adapters_in_memory.discard(message.id)
        elif self._mover is not None and isinstance(message, StorePages):
            self._mover.store(message, self._free_at)
        elif self._mover is not None and isinstance(message, LoadPages):
            self._mover.load(message)
        if not isinstance(message, StepPlan):
            return
        work = self._slots.apply(message)
        began = max(self._clock.now + self._plan_delay, self._free_at + self._gap)
        seconds = self._seconds(work)
        self._free_at = ended = began + seconds
        self.steps += 1
        self.rows += len(work.num_tokens)
        self.busy += seconds
        result = StepResult(message.step, work.token_ids, began, ended)
        self._deliver(ended + self._result_delay, result)

    def _seconds(self, work: StepWork) -> float:
        features = features_of(work.num_tokens, work.computed, work.num_samples, self._window)
        prices = zip(self._prices, msgspec.structs.astuple(features), strict=True)
        seconds = float(sum(price * amount for price, amount in prices))
        if work.num_adapters:
            costs = self._adapters_ms
            seconds += (costs.step + costs.each * work.num_adapters) / MS
        return seconds


def tune_prefill_size(model: CostModel) -> int:
    """Return the prefill size that the worker would choose at its start."""
    if model.measured_on.device != "cpu":
        return GPU_PREFILL_TOKENS

    def seconds_of(tokens: int) -> float:
        window = model.measured_on.window
        features = features_of(np.array([tokens]), np.zeros(1, np.int64), 1, window)
        return model.step_ms(features) / MS

    return smallest_good_size(list(CANDIDATE_SIZES), seconds_of)


# --- the frontend ---------------------------------------------------------------------------------


class SimulatedFrontend:
    """Makes the scheduler's message of a request, within the limits of the context."""

    def __init__(self, config: ServerConfig, model: CostModel) -> None:
        context = model.measured_on.context_length
        self._limit = min(config.model.context_length or context, context)
        self._args = config.frontend
        self.vocab_size = model.measured_on.vocab_size

    def submit(
        self, index: int, request: TraceRequest, ids: "array[int]", now: float, tokenized: float
    ) -> Submit:
        """Return the message, or raise PromptTooLong."""
        max_new_tokens = request.max_new_tokens
        if self._args.allow_auto_truncate:
            ids = ids[-(self._limit - 1) :]
            max_new_tokens = min(max_new_tokens, self._limit - len(ids))
        if len(ids) + max_new_tokens > self._limit:
            raise PromptTooLong(f"{len(ids)} + {max_new_tokens} tokens are more than {self._limit}")
        queue_timeout, timeout = self._args.queue_timeout, self._args.request_timeout
        return Submit(
            client=b"%d" % request.client,
            request_id=str(index),
            prompt_ids=pack_ids(ids),
            params=SamplingParams(
                max_new_tokens=max_new_tokens,
                temperature=0.0,
                seed=index,
                ignore_eos=True,
                ttft_target=request.ttft_target,
            ),
            stream=True,
            received_at=now,
            tokenized_at=tokenized,
            priority=request.priority,
            queue_deadline=None if queue_timeout is None else now + queue_timeout,
            deadline=None if timeout is None else now + timeout,
            cache_salt=request.adapter,
            adapter=AdapterRef(request.adapter, request.adapter) if request.adapter else None,
            cache=CacheHint(f"client {request.client}", request.keep_s) if request.keep_s else None,
        )


# --- the scheduler process ------------------------------------------------------------------------


class PoolState(NamedTuple):
    """Requests and pages of a replica at one moment."""

    running: int
    waiting: int
    pages_held: int
    pages_cached: int


class ReplicaRole(NamedTuple):
    """The role of a replica among others.

    Attributes:
        exchange: the pages that replicas exchange; None: none has a role.
        computes_prompts: it computes prompts for others.
    """

    exchange: SimulatedExchange | None = None
    computes_prompts: bool = False


NO_ROLE = ReplicaRole()


class ReplicaWatcher(Protocol):
    """Is given what a replica reports to the frontend."""

    def owns(self, replica: "Replica", index: int) -> bool:
        """Return whether what a replica generates for a request counts. index: of the request."""

    def take_output(self, replica: "Replica", output: StepOutput) -> None:
        """Take in what it reports with a step."""

    def take_back(self, replica: "Replica") -> None:
        """Take its requests back: it has answered a Recall."""


class Replica:
    """A scheduler with its worker, and the loop of the scheduler's process.

    `on_tokens` is called with the indexes of the requests that got a token in a step, `on_close`
    with the terminal message of each request, and both with the time.

    Attributes:
        watcher: is given what one replica among several reports.
        ended_at: when it was lost or left; infinity before. Nothing happens in it after that.
    """

    def __init__(
        self,
        config: ServerConfig,
        model: CostModel,
        num_pages: int,
        clock: Clock,
        on_tokens: Callable[[Ints, float], None],
        on_close: Callable[[StreamEnd, float], None],
        number: int,
        watcher: ReplicaWatcher | None,
        role: ReplicaRole = NO_ROLE,
    ) -> None:
        self.number = number
        self.num_pages = num_pages
        self.began_at, self.ended_at = clock.now, math.inf
        self._watcher = watcher
        self._clock = clock
        self._on_tokens = on_tokens
        self._on_close = on_close
        self._messages: list[SchedulerMessage] = []
        self._results: list[ResultMessage] = []
        self._index_of = Growing(np.int64)
        self._wake_at = math.inf
        slots = config.scheduler.max_running_requests
        self._has_role = role.exchange is not None
        self.worker = SimulatedWorker(
            model, slots, clock, lambda when, result: clock.at(when, self.take_result, result),
            role.exchange,
        )  # fmt: skip
        self.scheduler = Scheduler(
            config.scheduler, frozenset(), self.worker, self, clock, NoJournal()
        )
        self.scheduler.lifecycle.report = ReplicaReport(watcher is not None, role.computes_prompts)
        on, page_size = model.measured_on, config.worker.page_size
        ready = WorkerReady(num_pages, page_size, slots, on.dtype, on.device, window=on.window)
        ready = msgspec.structs.replace(
            ready,
            prefill_tokens=tune_prefill_size(model),
            stored=b"" if role.computes_prompts else None,
            fetches=self._has_role,
        )
        self.scheduler.step([], [ready])

    def take_message(self, message: SchedulerMessage) -> None:
        """Receive a message of the frontend."""
        self._messages.append(message)
        self._clock.after_this(self.round)

    def take_result(self, result: ResultMessage) -> None:
        """Receive a result of the worker."""
        self._results.append(result)
        self._clock.after_this(self.round)

    def round(self) -> None:
        """Run one iteration of the process's loop."""
        if self.ended_at != math.inf:
            return
        messages, self._messages = self._messages, []
        results, self._results = self._results, []
        wake_at = self.scheduler.step(messages[:MAX_MESSAGES_PER_STEP], results)
        for first in range(MAX_MESSAGES_PER_STEP, len(messages), MAX_MESSAGES_PER_STEP):
            wake_at = self.scheduler.step(messages[first : first + MAX_MESSAGES_PER_STEP], [])
        self._wake(wake_at)

    def _wake(self, when: float | None) -> None:
        """Schedule the next iteration without a message, in place of an earlier one."""
        before, self._wake_at = self._wake_at, math.inf if when is None else when
        if self._wake_at not in (before, math.inf):
            self._clock.at(max(self._wake_at, self._clock.now), self._on_wake, self._wake_at)

    def _on_wake(self, wake_at: float) -> None:
        if wake_at == self._wake_at:
            self._wake_at = math.inf
            self._clock.after_this(self.round)

    def send(self, message: msgspec.Struct) -> None:
        """Receive the scheduler's message to the detokenizer."""
        if isinstance(message, HandedBack) and self._watcher is not None:
            self._watcher.take_back(self)
        if not isinstance(message, StepOutput):
            return
        if isinstance(message, StepOutput) and self._watcher is not None:
            self._watcher.take_output(self, message)
        starts = [*message.opened, *(replay.opening for replay in message.replayed)]
        for opened in starts:
            self._index_of.reserve(opened.seq + 1)
            self._index_of.buffer[opened.seq] = int(opened.request_id)
        if message.seqs:
            indexes = self._index_of.buffer[message.seqs]
            if self._has_role:
                indexes = indexes[[self._owns(int(index)) for index in indexes]]
            self._on_tokens(indexes, message.time)
        ends = [replay.closing for replay in message.replayed if replay.closing is not None]
        for closed in (*message.closed, *ends):
            if self._owns(int(closed.request_id)):
                self._on_close(closed, message.time)
            self.scheduler.lifecycle.outbox.acknowledge({closed.seq: closed.placement})

    def _owns(self, index: int) -> bool:
        """Return whether what it generates for a request counts."""
        return not self._has_role or self._watcher is None or self._watcher.owns(self, index)

    def index_of(self, seq: int) -> int:
        """Return the index of the request of a choice. seq: the scheduler's number."""
        return int(self._index_of.buffer[seq])

    @property
    def load(self) -> PoolState:
        """Its requests and pages, without the cost of `info`."""
        lifecycle = self.scheduler.lifecycle
        waiting, kv = lifecycle.num_waiting, lifecycle.core.kv
        return PoolState(len(lifecycle.table) - waiting, waiting, kv.num_held, kv.num_cached)

    @property
    def info(self) -> dict[str, Any]:
        """Gauges and counters of the scheduler."""
        return dict(self.scheduler.info())
