"""One server of a simulation: frontend, scheduler and worker on a simulated clock.

The scheduler is the real one. A step of the worker takes the time of the cost model, and its tokens
come from a hash. The time of messages between the processes is in the model's delays.
"""

import math
from array import array
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from bench.load.trace import MIN_TOKEN_ID, TraceRequest
from bench.metrics.percentiles import MS
from bench.simulate.cost_model import CostModel, features_of
from bench.simulate.records import Growing
from quadriga.config.server_config import ServerConfig
from quadriga.errors import PromptTooLong
from quadriga.sampling.params import SamplingParams
from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.to_detok import ReplicaOutput, StepOutput, StreamEnd
from quadriga.wire.messages.to_scheduler import SchedulerMessage, Submit
from quadriga.wire.messages.worker import StepPlan, StepResult, WorkerReady
from scheduler_proc.main import MAX_MESSAGES_PER_STEP
from scheduler_proc.observe.replica_report import ReplicaReport
from scheduler_proc.scheduler import Scheduler
from worker_proc.startup.prefill_tuning import (
    CANDIDATE_SIZES,
    GPU_PREFILL_TOKENS,
    smallest_good_size,
)

Ints = npt.NDArray[np.int64]

# Simulated seconds at which a run begins; a time of 0.0 means never.
START = 1000.0


class Clock:
    """Simulated Unix seconds, and a queue of calls by time."""

    def __init__(self) -> None:
        self.now = START
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = count()
        self._after: dict[Callable[[], None], None] = {}

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def at(self, when: float, act: Callable[[Any], None], subject: Any) -> None:
        """Call `act(subject)` at a time."""
        heappush(self._heap, (when, next(self._order), act, subject))

    def after_this(self, act: Callable[[], None]) -> None:
        """Call `act` once, after all other calls of this moment."""
        self._after[act] = None

    def advance(self) -> bool:
        """Advance to the next moment with a call; return False if there is none."""
        heap = self._heap
        if not heap:
            return False
        now = self.now = heap[0][0]
        while heap and heap[0][0] == now:
            _, _, act, subject = heappop(heap)
            act(subject)
        after, self._after = self._after, {}
        for last in after:
            last()
        return True


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
                max_new_tokens=max_new_tokens, temperature=0.0, seed=index, ignore_eos=True
            ),
            stream=True,
            received_at=now,
            tokenized_at=tokenized,
            priority=request.priority,
            queue_deadline=None if queue_timeout is None else now + queue_timeout,
            deadline=None if timeout is None else now + timeout,
        )


# --- the worker -----------------------------------------------------------------------------------


def draw_ids(seeds: Ints, positions: Ints, vocab_size: int) -> Ints:
    """Return the tokens of the simulated model at positions, different for each seed."""
    mixed = (seeds * 1_000_003 + positions) * 2_654_435_761 & 0x7FFF_FFFF_FFFF
    return MIN_TOKEN_ID + (mixed >> 13) % (vocab_size - MIN_TOKEN_ID)


class SimulatedWorker:
    """A worker without a model; of each slot it counts the known and the computed tokens.

    `deliver` is called with the time at which the scheduler has a result, and the result.
    """

    def __init__(
        self,
        model: CostModel,
        num_slots: int,
        clock: Clock,
        deliver: Callable[[float, StepResult], None],
    ) -> None:
        self._prices = model.prices
        self._plan_delay = model.delays_ms.plan / MS
        self._gap = model.delays_ms.gap / MS
        self._result_delay = model.delays_ms.result / MS
        self._vocab_size = model.measured_on.vocab_size
        self._window = model.measured_on.window
        self._clock = clock
        self._deliver = deliver
        self._known = np.zeros(num_slots, np.int64)
        self._computed = np.zeros(num_slots, np.int64)
        self._seeds = np.zeros(num_slots, np.int64)
        self._free_at = 0.0
        self.steps = 0
        self.rows = 0
        self.busy = 0.0

    def send(self, message: msgspec.Struct) -> None:
        """Receive the scheduler's message to the worker."""
        if not isinstance(message, StepPlan):
            return
        for new in message.new:
            self._known[new.slot] = len(new.token_ids) // 4
            self._computed[new.slot] = new.computed
            self._seeds[new.slot] = new.seed
        slots = np.frombuffer(message.slots, "<i4")
        num_tokens = np.frombuffer(message.num_tokens, "<i4").astype(np.int64)
        began = max(self._clock.now + self._plan_delay, self._free_at + self._gap)
        token_ids, seconds = self._run(slots, num_tokens)
        self._free_at = ended = began + seconds
        self.steps += 1
        self.rows += len(slots)
        self.busy += seconds
        self._deliver(ended + self._result_delay, StepResult(message.step, token_ids, began, ended))

    def _run(self, slots: npt.NDArray[np.int32], num_tokens: Ints) -> tuple[bytes, float]:
        before, known = self._computed[slots], self._known[slots]
        after = before + num_tokens
        samples = after == known
        assert (after <= known).all(), "a token is computed that is not known"
        self._computed[slots] = after
        self._known[slots] = known + samples
        tokens = np.where(samples, draw_ids(self._seeds[slots], known, self._vocab_size), -1)
        features = features_of(num_tokens, before, int(samples.sum()), self._window)
        prices = zip(self._prices, msgspec.structs.astuple(features), strict=True)
        return tokens.astype("<i4").tobytes(), sum(price * amount for price, amount in prices)


def tune_prefill_size(model: CostModel) -> int:
    """Return the prefill size that the worker would choose at its start."""
    if model.measured_on.device != "cpu":
        return GPU_PREFILL_TOKENS

    def seconds_of(tokens: int) -> float:
        window = model.measured_on.window
        features = features_of(np.array([tokens]), np.zeros(1, np.int64), 1, window)
        return model.step_ms(features) / MS

    return smallest_good_size(list(CANDIDATE_SIZES), seconds_of)


# --- the scheduler process ------------------------------------------------------------------------


class Replica:
    """A scheduler with its worker, and the loop of the scheduler's process.

    `on_tokens` is called with the indexes of the requests that got a token in a step, `on_close`
    with the terminal message of each request, and both with the time. With `on_output`, which is
    called with each output, the scheduler reports as one replica among several does.
    """

    def __init__(
        self,
        config: ServerConfig,
        model: CostModel,
        num_pages: int,
        clock: Clock,
        on_tokens: Callable[[Ints, float], None],
        on_close: Callable[[StreamEnd, float], None],
        on_output: Callable[[ReplicaOutput], None] | None = None,
    ) -> None:
        self.num_pages = num_pages
        self._on_output = on_output
        self._clock = clock
        self._on_tokens = on_tokens
        self._on_close = on_close
        self._messages: list[SchedulerMessage] = []
        self._results: list[StepResult] = []
        self._index_of = Growing(np.int64)
        self._wake_at = math.inf
        slots = config.scheduler.max_running_requests
        self.worker = SimulatedWorker(
            model, slots, clock, lambda when, result: clock.at(when, self.take_result, result)
        )
        self.scheduler = Scheduler(
            config.scheduler, frozenset(), self.worker, detok=self, clock=clock
        )
        if on_output is not None:
            self.scheduler.lifecycle.report = ReplicaReport()
        on, page_size = model.measured_on, config.worker.page_size
        ready = WorkerReady(num_pages, page_size, slots, on.dtype, on.device, window=on.window)
        ready = msgspec.structs.replace(ready, prefill_tokens=tune_prefill_size(model))
        self.scheduler.step([], [ready])

    def take_message(self, message: SchedulerMessage) -> None:
        """Receive a message of the frontend."""
        self._messages.append(message)
        self._clock.after_this(self.round)

    def take_result(self, result: StepResult) -> None:
        """Receive a result of the worker."""
        self._results.append(result)
        self._clock.after_this(self.round)

    def round(self) -> None:
        """Run one iteration of the process's loop."""
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
        if not isinstance(message, StepOutput):
            return
        if self._on_output is not None and isinstance(message, ReplicaOutput):
            self._on_output(message)
        for opened in message.opened:
            self._index_of.reserve(opened.seq + 1)
            self._index_of.buffer[opened.seq] = int(opened.request_id)
        if message.seqs:
            self._on_tokens(self._index_of.buffer[message.seqs], message.time)
        for closed in message.closed:
            self._on_close(closed, message.time)
        self.scheduler.lifecycle.outbox.acknowledge([closed.seq for closed in message.closed])

    @property
    def info(self) -> dict[str, Any]:
        """Gauges and counters of the scheduler."""
        return dict(self.scheduler.info())
