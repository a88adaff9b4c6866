"""The scheduler: one step, from the messages that came in to the plans that go out.

`step` is all of it: results, messages, deadlines, plans, publish. The core decides what runs
(core.py), the pipeline when (pipeline.py), and the lifecycle accepts and ends requests and
publishes what happened (lifecycle.py). Sockets and clock are passed in, so that the same code runs
under test and in the simulator. At the end of the file is what clients ask: the server info, and
how far requests are.
"""

import math
import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

from quadriga.errors import ConfigError, QuadrigaError, from_code
from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.server.processes.machine import other_version
from quadriga.wire import to_detok, to_scheduler
from quadriga.wire import worker as to_worker
from quadriga.wire.client import Info, InfoValues, ProgressAnswer, RequestProgress, RequestState
from quadriga.wire.packing import unpack_ids
from quadriga.wire.sockets import Sender
from quadriga.wire.to_detok import InfoReply, ProgressReply
from quadriga.wire.to_scheduler import InfoRequest, ProgressRequest
from quadriga.wire.worker import WorkerReady
from scheduler_proc import live_feed, pipeline
from scheduler_proc.core import SchedulerCore
from scheduler_proc.forecast import WaitForecast
from scheduler_proc.journal.writer import Journal
from scheduler_proc.lifecycle import RequestLifecycle
from scheduler_proc.pause import Pause
from scheduler_proc.planning.quarantine import is_quarantined, record_worker_crash
from scheduler_proc.planning.step_cost import StepCosts
from scheduler_proc.state.request import FinishReason, Request, RequestStatus


class Scheduler:
    """Run the steps of the worker.

    Attributes:
        lifecycle: every request from its Submit to its end.
        pipeline: the steps in flight.
        pause: whether it sends plans.
        costs: how long they take.
        progress: how far requests are.
        stopped: whether the process may leave.
    """

    def __init__(
        self,
        args: SchedulerArgs,
        eos_ids: frozenset[int],
        worker: Sender,
        detok: Sender,
        clock: Callable[[], float],
        journal: Journal,
    ) -> None:
        self._args = args
        self._worker = worker
        self._detok = detok
        self._clock = clock
        self._journal = journal
        self._worker_ready: to_worker.WorkerReady | None = None
        self.costs = StepCosts()
        self.lifecycle = RequestLifecycle(
            args, eos_ids, worker, detok, clock, self._journal, self.costs
        )
        self.pipeline = pipeline.Pipeline(worker, args.plan_at_once, self.costs)
        self._feed: live_feed.StepFeed | None = None  # only while a client watches
        self._frontend = 0  # number of the newest frontend that was heard of
        self.progress = ProgressReport(self.lifecycle, self.costs, args.max_queued_requests)
        self.stopped = False
        self.pause = Pause(self.lifecycle, self.pipeline)

    def fail_all(self, error: QuadrigaError) -> None:
        """End every open request with an error."""
        self.lifecycle.fail_all([(request, error) for request in self.lifecycle.table])

    def announce_restart(self) -> None:
        """Make worker and detokenizer forget what an earlier scheduler has sent."""
        self._worker.send(to_worker.ResetWorker())
        self._detok.send(to_detok.SchedulerRestarted())

    # --- one step ---------------------------------------------------------------------------------

    def step(
        self,
        messages: Iterable[to_scheduler.SchedulerMessage],
        results: Iterable[to_worker.ResultMessage],
    ) -> float | None:
        """Take in what has arrived, keep the worker busy, and publish what happened.

        Returns:
            The time at which the next step is due even if no message comes; None for never.
        """
        lifecycle = self.lifecycle
        for result in results:
            self._on_worker(result)
        num_queued = self.num_queued
        for message in messages:
            self._on_message(message)
        now = self._clock()
        if self.num_queued > num_queued and lifecycle.core.has_work:
            self.pipeline.start_batch_delay(now)
        lifecycle.fail_all(lifecycle.table.expired(now))
        wake_at = lifecycle.table.next_deadline
        plan_at = self._plan_at(now)
        while plan_at <= now:
            plan_at = self._plan_at(now) if self._dispatch_plan(now) else math.inf
        self.pause.advance(now)
        for transfer in lifecycle.core.offload.take_messages():
            self.pipeline.send_transfer(transfer)
        lifecycle.queue_wait_s = self.progress.wait_if_nearly_full(now)
        lifecycle.publish()
        for observer in lifecycle.pool_observers:
            observer.publish()
        has_replays = lifecycle.continue_replays()
        self._journal.commit()
        if self.pipeline.idle:
            lifecycle.report_drained()
            if self._feed is not None:
                self._feed.on_idle(now)
        if has_replays:
            return now
        plan_at = min(plan_at, self.pause.ends_at)
        wake_at = plan_at if wake_at is None else min(wake_at, plan_at)
        return wake_at if wake_at < math.inf else None

    def _plan_at(self, now: float) -> float:
        """Return when the next plan is wanted; infinite where something has to arrive first."""
        core = self.lifecycle.core
        if self.pause.is_on or not core.has_work:
            return math.inf
        plan_at = self.pipeline.next_plan_at
        is_full = plan_at > now and self.pipeline.idle and not core.has_room
        return now if is_full else plan_at

    def _dispatch_plan(self, now: float) -> bool:
        """Send the next plan to the worker. Return whether there was something to run."""
        core = self.lifecycle.core
        plan = core.plan(now, in_flight=not self.pipeline.idle)
        for request in plan.admitted:
            self.lifecycle.table.on_admitted(request)
        if self.lifecycle.tracer.live:
            self.lifecycle.tracer.on_plan(plan, now)
        self.lifecycle.fail_all(plan.failed)
        if plan.batch.is_empty:
            return False
        self.pipeline.dispatch(plan.batch, core.admission.take_released(), now)
        if self._feed is not None:
            self._feed.on_plan(plan, now)
            if self._feed.is_over(now):
                self._watch_steps(to_scheduler.WatchSteps(0.0))
        return True

    # --- from the worker --------------------------------------------------------------------------

    def _on_worker(self, result: to_worker.ResultMessage) -> None:
        if isinstance(result, to_worker.WorkerReady):
            self._on_worker_ready(result)
        elif self.pipeline.is_stale(result):
            return
        elif isinstance(result, to_worker.StepResult):
            self._on_step_result(result)
        elif isinstance(result, to_worker.GrammarReady):
            self.lifecycle.on_grammar_ready(result)
        elif isinstance(result, to_worker.AdapterReady):
            self.lifecycle.on_adapter_ready(result)
        else:
            offload, tracer = self.lifecycle.core.offload, self.lifecycle.tracer
            if tracer.live and isinstance(result, to_worker.PagesLoaded):
                tracer.on_pages(offload.waiting_for(result.load), result)
            offload.on_message(result)

    def _on_step_result(self, result: to_worker.StepResult) -> None:
        lifecycle = self.lifecycle
        batch = self.pipeline.complete(result)
        self.costs.observe(batch, result)
        for row in result.failed:
            lifecycle.fail(batch.requests[row.row], from_code(row.code, row.error))
        update = lifecycle.core.complete(batch, result)
        if lifecycle.tracer.live:
            lifecycle.tracer.on_step(batch, result)
        lifecycle.stats.on_step(batch, result, update)
        if self._feed is not None:
            self._feed.on_result(result)
        lifecycle.events.add_update(update, result.ended)
        for request in update.finished:
            lifecycle.close(request)
        lifecycle.fail_all(update.failed)
        if result.logprobs is not None:
            lifecycle.events.add_logprobs(result.logprobs, batch.requests)
        lifecycle.publish()  # one message a step: its tokens all carry this step's time

    def _on_worker_ready(self, ready: to_worker.WorkerReady) -> None:
        """Start with a new worker, the first one or a later one: give it every request."""
        poison = record_worker_crash(self.pipeline.reset(ready.session, self._clock()))
        self._worker_ready = ready
        self.pause.on_worker_ready(ready)
        self._journal.set_kernels(ready.kernels)
        self.lifecycle.tracer.on_worker_ready()
        self.lifecycle.restart_all(ready, poison)

    # --- from frontend and detokenizer ------------------------------------------------------------

    def _on_message(self, message: to_scheduler.SchedulerMessage) -> None:  # noqa: C901
        lifecycle = self.lifecycle
        if self._is_late(message):
            return
        match message:
            case to_scheduler.Submit():
                lifecycle.submit(message)
            case to_scheduler.AbortRequest():
                for request in lifecycle.table.of_client(message.client, message.request_id):
                    lifecycle.abort(request, message.by)
            case to_scheduler.StopFound():
                for request in lifecycle.table.with_seqs(message.seqs):
                    lifecycle.finish(request, FinishReason.STOP)
            case to_scheduler.DetokReady():
                lifecycle.replay_to_detok(message.session)
            case to_scheduler.EndsDelivered():
                lifecycle.acknowledge(message)
            case to_scheduler.FrontendRestarted():
                if message.wants_names:
                    lifecycle.name_requests()
                lifecycle.replay_to_frontend(message.sender)
            case to_scheduler.InfoRequest():
                freed = self._empty_cache(message)
                self._detok.send(info_reply(message, freed | self.info(), self._worker_ready))
            case to_scheduler.ProgressRequest():
                values = self.progress.values(message, self._clock())
                self._detok.send(progress_reply(message, values))
            case to_scheduler.WatchSteps():
                self._watch_steps(message)
            case to_scheduler.Drain():
                lifecycle.drain()
            case to_scheduler.LinkRestored():
                if refusal := other_version("the frontend of this replica", message.version):
                    raise ConfigError(refusal)
                self._detok.send(to_detok.SchedulerRestarted())
            case to_scheduler.Recall():
                lifecycle.hand_back(message.number)
            case to_scheduler.Withdraw():
                lifecycle.withdraw(lifecycle.table.with_seqs(message.seqs))
            case to_scheduler.LoadAhead():
                token_ids, salt = unpack_ids(message.token_ids), message.cache_salt.encode()
                lifecycle.core.offload.load_ahead(token_ids, salt)
            case to_scheduler.DropAdapters():
                lifecycle.drop_adapters(message.ids)
            case to_scheduler.PinAdapters():
                lifecycle.pin_adapters(message.adapters)
            case to_scheduler.AbortAll():
                lifecycle.abort_all(message.reason)
            case to_scheduler.Shutdown():
                self._worker.send(to_worker.StopWorker())
                self._detok.send(to_detok.StopDetok())
                self._journal.close()
                self.stopped = True

    def _empty_cache(self, message: to_scheduler.InfoRequest) -> InfoValues:
        """Drop cached prefixes, or let them go, as a message asks; return what that has freed."""
        kv = self.lifecycle.core.kv
        kv.pins.advance(self._clock())
        if message.flush_cache:
            return {"flushed_pages": kv.flush()}
        if message.release is not None:
            return {"released_pins": kv.pins.release(message.release.tenant, message.release.key)}
        return {}

    def _is_late(self, message: to_scheduler.SchedulerMessage) -> bool:
        """Return whether a message is of a frontend that another one has replaced meanwhile.

        A dead frontend's last messages may be read after the first ones of its successor.
        """
        match message:
            case to_scheduler.Recall():
                return message.number < self._frontend
            case (
                to_scheduler.Submit()
                | to_scheduler.AbortRequest()
                | to_scheduler.EndsDelivered()
                | to_scheduler.FrontendRestarted()
            ):
                is_late = 0 < message.sender < self._frontend
                self._frontend = max(self._frontend, message.sender)
                return is_late
        return False

    def _watch_steps(self, message: to_scheduler.WatchSteps) -> None:
        """Make the live feed for some seconds; 0: no longer."""
        observers = self.lifecycle.end_observers
        if message.seconds > 0:
            if self._feed is None:
                self._feed = live_feed.StepFeed(self._args, self.lifecycle, self._detok)
                observers.append(self._feed)
            self._feed.watch(message, self._clock())
        elif self._feed is not None:
            observers.remove(self._feed)
            self._feed = None

    # --- info -------------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Number of requests in the waiting queue."""
        return len(self.lifecycle.core.waiting)

    def info(self) -> InfoValues:
        """Return gauges and counters, as docs/protocol.md lists them."""
        lifecycle = self.lifecycle
        values: InfoValues = {
            "running": len(lifecycle.table) - lifecycle.num_waiting,
            "waiting": lifecycle.num_waiting,
            "waiting_for_grammar": lifecycle.grammars.num_waiting,
            "waiting_for_adapter": lifecycle.adapters.num_waiting,
            "adapters": lifecycle.adapters.info(),
            "journal": self._journal.state,
        }
        gauges = collect_info(self._args, self._worker_ready, lifecycle.core)
        return values | gauges | lifecycle.core.offload.info() | lifecycle.stats.info()

    def check(self) -> None:
        """Raise AssertionError where pages are lost, or held by no request (for tests)."""
        core = self.lifecycle.core
        core.kv.check(core.page_holders)
        if not self.lifecycle.table and self.pipeline.idle and not core.offload.loads:
            assert core.kv.num_held == 0, "pages are held by no request"


# --- the server info ------------------------------------------------------------------------------


def collect_info(args: SchedulerArgs, ready: WorkerReady | None, core: SchedulerCore) -> InfoValues:
    """Return the gauges of worker, policy and pool, as docs/protocol.md lists them.

    ready: None before the worker is.
    """
    values: InfoValues = {
        "ready": ready is not None,
        "dtype": ready.dtype if ready else None,
        "device": ready.device if ready else None,
        "attention_backend": ready.backend if ready else None,
        "kernels": ready.kernels if ready else None,
        "cuda_graph": ready.cuda_graph if ready else None,
        "batch_mode": args.mode,
        "batching": args.batching,
        "schedule_policy": args.schedule_policy,
        "fair_clients": args.fair_clients,
        "prefix_cache": not args.disable_radix_cache,
        "chunked_prefill_size": args.chunk_size(ready.prefill_tokens) if ready else None,
    }
    if args.fair_tenants:
        values["fair_tenants"] = True
    if ready is not None:
        values |= {
            "page_size": core.kv.page_size,
            "pages_total": core.kv.num_pages,
            "pages_free": core.kv.num_free,
            "pages_cached": core.kv.num_cached,
            "pages_held": core.kv.num_held,
            "retractions": core.num_retractions,
            "new_token_ratio": core.admission.ratio.value,
        }
        values |= core.kv.pins.info()
    return values


def info_reply(message: InfoRequest, values: InfoValues, ready: WorkerReady | None) -> InfoReply:
    """Return the Info that a client asked for: what the frontend knows, and `values`."""
    values = message.values | values
    pids = message.values.get("pids")
    if isinstance(pids, dict):
        worker = ready.pid if ready else 0
        values["pids"] = pids | {"scheduler_proc": os.getpid(), "worker_proc": worker}
    return InfoReply(message.client, Info(message.request_id, values))


# --- progress -------------------------------------------------------------------------------------
#
# How far requests are: their places in the waiting queue, and when they are probably admitted.
#
# Nothing is computed unless a client asks or the queue is nearly full, and the places are
# determined at most once in MAX_AGE_S, however many questions come.

MAX_AGE_S = 0.1
# A long queue takes longer to read and to simulate, and changes less: 1 % of the time or so is
# spent on it, as the worker may wait meanwhile.
MAX_AGE_S_PER_REQUEST, MAX_AGE_S_PER_STEP = 0.0001, 0.006
# Further requests are taken to be admitted at the rate of these first ones.
MAX_SIMULATED = 1024
# A queue of this share of --max-queued-requests, and of this length, is nearly full: a wait is
# estimated for the requests that may be refused. The ends of a shorter queue say as much.
NEARLY_FULL, MIN_NEARLY_FULL = 0.5, 32

STATES = {
    RequestStatus.WAITING: RequestState.QUEUED,
    RequestStatus.RETRACTED: RequestState.QUEUED,
    RequestStatus.PREFILLING: RequestState.PREFILL,
    RequestStatus.DECODING: RequestState.DECODING,
}
RANKS = {state: rank for rank, state in enumerate(RequestState)}


class QueuePlace(NamedTuple):
    """A place in the waiting queue, from 1, and the estimated seconds until admission.

    They count from the time at which the places were determined; None: unknown.
    """

    place: int
    wait_s: float | None


NO_PLACE = QueuePlace(0, None)


class ProgressReport:
    """Answer how far requests are."""

    def __init__(self, lifecycle: RequestLifecycle, costs: StepCosts, max_queued: int) -> None:
        self._num_nearly_full = max(NEARLY_FULL * max_queued, MIN_NEARLY_FULL)
        self._lifecycle = lifecycle
        self._costs = costs
        self._places: dict[int, QueuePlace] = {}
        self._places_at = self._places_until = 0.0
        self._last_wait_s: float | None = None

    def values(self, message: ProgressRequest, now: float) -> list[RequestProgress]:
        """Return the progress of each request of a question."""
        self._refresh(now)
        age_s = now - self._places_at
        return [self._value(message, request_id, age_s) for request_id in message.request_ids]

    def wait_if_nearly_full(self, now: float) -> float | None:
        """Return the estimated seconds that one more request would wait.

        None while the queue is far from full, or where nothing is known.
        """
        if len(self._lifecycle.core.waiting) < self._num_nearly_full:
            return None
        self._refresh(now)
        return self._last_wait_s

    def _refresh(self, now: float) -> None:
        if now >= self._places_until:
            self._places, num_steps = places_in_queue(self._lifecycle, self._costs)
            self._places_at = now
            self._last_wait_s = next(reversed(self._places.values()), NO_PLACE).wait_s
            work_s = MAX_AGE_S_PER_REQUEST * len(self._places) + MAX_AGE_S_PER_STEP * num_steps
            max_age_s = max(MAX_AGE_S, work_s)
            self._places_until = now + max_age_s

    def _value(self, message: ProgressRequest, request_id: str, age_s: float) -> RequestProgress:
        # An empty id would stand for all requests of the client.
        table = self._lifecycle.table
        choices = table.of_client(message.client, request_id) if request_id else []
        if not choices:
            is_preparing = request_id in message.preparing
            return RequestProgress(RequestState.PREPARING if is_preparing else RequestState.UNKNOWN)
        values = (self._of_choice(request, age_s) for request in choices)
        return max(values, key=lambda value: (RANKS[value.state], -value.place))

    def _of_choice(self, request: Request, age_s: float) -> RequestProgress:
        state, place = STATES[request.status], NO_PLACE
        if state is RequestState.QUEUED:
            lifecycle = self._lifecycle
            if lifecycle.grammars.holds(request) or lifecycle.adapters.holds(request):
                state = RequestState.PREPARING
            else:
                place = self._place(request, age_s)
        num_computed = min(request.num_computed_tokens, request.num_prompt)
        return RequestProgress(state, *place, num_computed, request.num_prompt)

    def _place(self, request: Request, age_s: float) -> QueuePlace:
        """Return the place of a queued request; age_s: seconds since the places were determined.

        One that is quarantined, or came a moment ago, follows the others.
        """
        wait_s = None if is_quarantined(request) else self._last_wait_s
        last = QueuePlace(len(self._lifecycle.core.waiting) + 1, wait_s)
        place, wait_s = self._places.get(request.seq, last)
        return QueuePlace(place, None if wait_s is None else max(0.0, wait_s - age_s))


def places_in_queue(
    lifecycle: RequestLifecycle, costs: StepCosts
) -> tuple[dict[int, QueuePlace], int]:
    """Return the place of each waiting request by its number, in the order of the policy.

    With them comes the number of steps that were simulated.
    """
    core = lifecycle.core
    num_waiting = len(core.waiting)
    if not num_waiting:
        return {}, 0
    requests = core.waiting.first(num_waiting, core.prefill.budget.tokens)
    forecast = WaitForecast(
        core, lifecycle.recent_ends, costs.wall_seconds, requests[:MAX_SIMULATED]
    )
    forecast.run()
    places, last, wait_s = {}, 0, None
    for place, request in enumerate(requests, start=1):
        place_wait_s = forecast.wait_s(request) if place <= MAX_SIMULATED else None
        if place_wait_s is not None:
            last, wait_s = place, place_wait_s
        elif wait_s is not None:
            place_wait_s = wait_s * place / last
        places[request.seq] = QueuePlace(place, place_wait_s)
    return places, forecast.num_steps


def progress_reply(message: ProgressRequest, values: list[RequestProgress]) -> ProgressReply:
    """Return the ProgressAnswer that a client asked for."""
    return ProgressReply(message.client, ProgressAnswer(message.request_id, values))
