"""The scheduler: one step, from the messages that came in to the plans that go out.

`step` is all of it: results, messages, deadlines, plans, publish. The core decides what runs
(core.py), the pipeline when (pipeline.py), and the lifecycle accepts and ends requests and
publishes what happened (lifecycle.py). Sockets and clock are passed in, so that the same code runs
under test and in the simulator.
"""

import math
from collections.abc import Callable, Iterable

from quadriga.errors import ConfigError, from_code
from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.server.processes.machine import other_version
from quadriga.wire import to_detok, to_scheduler
from quadriga.wire import worker as to_worker
from quadriga.wire.client import InfoValues
from quadriga.wire.sockets import Sender
from scheduler_proc.journal.writer import Journal
from scheduler_proc.lifecycle import RequestLifecycle
from scheduler_proc.live_feed import StepFeed
from scheduler_proc.pipeline import Pipeline
from scheduler_proc.planning.quarantine import record_worker_crash
from scheduler_proc.planning.step_cost import StepCosts
from scheduler_proc.queries import ProgressReport, collect_info, info_reply, progress_reply
from scheduler_proc.state.request import FinishReason


class Scheduler:
    """Run the steps of the worker.

    Attributes:
        lifecycle: every request from its Submit to its end.
        pipeline: the steps in flight.
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
        self.pipeline = Pipeline(worker, args.plan_at_once, self.costs)
        self._feed: StepFeed | None = None  # only while a client watches
        self._frontend = 0  # number of the newest frontend that was heard of
        self.progress = ProgressReport(self.lifecycle, self.costs, args.max_queued_requests)
        self.stopped = False

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
        for transfer in lifecycle.core.offload.take_messages():
            self._worker.send(transfer)
        lifecycle.queue_wait_s = self.progress.wait_if_nearly_full(now)
        lifecycle.publish()
        has_replays = lifecycle.continue_replays()
        self._journal.commit()
        if self.pipeline.idle:
            lifecycle.report_drained()
            if self._feed is not None:
                self._feed.on_idle(now)
        if has_replays:
            return now
        wake_at = plan_at if wake_at is None else min(wake_at, plan_at)
        return wake_at if wake_at < math.inf else None

    def _plan_at(self, now: float) -> float:
        """Return when the next plan is wanted; infinite where something has to arrive first."""
        core = self.lifecycle.core
        if not core.has_work:
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
        else:
            self.lifecycle.core.offload.on_message(result)

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
                flushed = (
                    {"flushed_pages": lifecycle.core.kv.flush()} if message.flush_cache else {}
                )
                self._detok.send(info_reply(message, flushed | self.info(), self._worker_ready))
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
            case to_scheduler.AbortAll():
                lifecycle.abort_all(message.reason)
            case to_scheduler.Shutdown():
                self._worker.send(to_worker.StopWorker())
                self._detok.send(to_detok.StopDetok())
                self._journal.close()
                self.stopped = True

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
                self._feed = StepFeed(self._args, self.lifecycle, self._detok)
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
