"""The scheduler: one step, from the messages that came in to the plans that go out.

`step` is all of it: results, messages, deadlines, plans, publish. The core decides (core.py), the
request table finds (request_table.py), the pipeline times (pipeline.py). What happened is gathered
in one record (events.py), from which detokenizer and journal are fed. Sockets and clock are passed
in, so that the same code runs under test and in the simulator.
"""

import math
from collections.abc import Callable, Iterable

from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.errors import InvalidRequest, QuadrigaError, RequestFailed
from quadriga.wire.messages import to_detok, to_scheduler
from quadriga.wire.messages import worker as to_worker
from quadriga.wire.messages.public import ErrorInfo, InfoValues
from scheduler_proc.durability.detok_outbox import DetokOutbox
from scheduler_proc.durability.journal import NoJournal
from scheduler_proc.durability.journal_recovery import RecoveredRequest
from scheduler_proc.events import StepEvents
from scheduler_proc.grammar_queue import GrammarQueue
from scheduler_proc.observe.server_info import collect_info, info_reply
from scheduler_proc.observe.stats import SchedulerStats
from scheduler_proc.pipeline import Pipeline
from scheduler_proc.planning.limits import refusal
from scheduler_proc.planning.quarantine import poison_error, record_worker_crash
from scheduler_proc.request_table import RequestTable
from scheduler_proc.sender import Sender
from scheduler_proc.state.plan import Capacity
from scheduler_proc.state.request import FinishReason, Request, RequestFailure
from scheduler_proc.static_core import make_core


class Scheduler:
    """Every request from its Submit to its end, and the steps of the worker.

    Attributes:
        pipeline: the steps in flight.
        stopped: whether the process may leave.
    """

    def __init__(
        self,
        args: SchedulerArgs,
        eos_ids: frozenset[int],
        worker: Sender,
        detok: Sender,
        clock: Callable[[], float],
        journal: NoJournal | None = None,
    ) -> None:
        self._args = args
        self._worker = worker
        self._detok = detok
        self._clock = clock
        self._journal = journal or NoJournal()
        self.table = RequestTable(eos_ids)
        self.core = make_core(args, Capacity())
        self.pipeline = Pipeline(worker, args.plan_at_once)
        self.outbox = DetokOutbox(detok)
        self.stats = SchedulerStats()
        self._grammars = GrammarQueue(worker)
        self._events = StepEvents()
        self._ready: to_worker.WorkerReady | None = None
        self._is_draining = False
        self._said_drained = False
        self.stopped = False

    def restore(self, recovered: Iterable[RecoveredRequest], first_seq: int = 0) -> None:
        """Continue the requests that an earlier scheduler left in the journal.

        Args:
            recovered: these requests.
            first_seq: no new request gets a smaller number.
        """
        self.table.start_numbering_at(first_seq)
        for choice in recovered:
            request = self.table.restore(choice)
            self._journal.keep(choice.message, [request], choice.acknowledged)
            if request.finished:
                self.outbox.finish(request)
                self.outbox.acknowledge([request.seq] if choice.acknowledged else [])
        self._journal.compact()

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
        for result in results:
            self._on_worker(result)
        num_queued = self.num_queued
        for message in messages:
            self._on_message(message)
        now = self._clock()
        if self.num_queued > num_queued and self.core.has_work:
            self.pipeline.start_batch_delay(now)
        self._fail_all(self.table.expired(now))
        wake_at = self.table.next_deadline
        plan_at = self._plan_at(now)
        while plan_at <= now:
            plan_at = self._plan_at(now) if self._dispatch_plan(now) else math.inf
        self._publish()
        self._journal.commit()
        self._report_drained()
        wake_at = plan_at if wake_at is None else min(wake_at, plan_at)
        return wake_at if wake_at < math.inf else None

    def _plan_at(self, now: float) -> float:
        """Return when the next plan is wanted; infinite where something has to arrive first."""
        if not self.core.has_work:
            return math.inf
        plan_at = self.pipeline.next_plan_at
        is_full = plan_at > now and self.pipeline.idle and not self.core.has_room
        return now if is_full else plan_at

    def _dispatch_plan(self, now: float) -> bool:
        """Send the next plan to the worker. Return whether there was something to run."""
        plan = self.core.plan(now, in_flight=not self.pipeline.idle)
        for request in plan.admitted:
            self.table.on_admitted(request)
        self._fail_all(plan.failed)
        if plan.batch.is_empty:
            return False
        self.pipeline.dispatch(plan.batch, self.core.admission.take_released(), now)
        return True

    def _publish(self, to_detok: bool = True) -> None:
        """Hand the record of what happened to detokenizer and journal, and begin a new one."""
        events = self._events
        if events.is_empty and to_detok:
            return
        was_sent = events.has_output or not to_detok
        # A step without tokens, as of a chunk, leaves its time to the next message.
        self._events = StepEvents(time=0.0 if was_sent else events.time)
        if to_detok:
            self.outbox.send(events, self._clock(), self.num_waiting)
        self._journal.append(events)

    # --- from the worker --------------------------------------------------------------------------

    def _on_worker(self, result: to_worker.ResultMessage) -> None:
        if isinstance(result, to_worker.WorkerReady):
            self._on_worker_ready(result)
        elif self.pipeline.is_stale(result):
            return
        elif isinstance(result, to_worker.StepResult):
            self._on_step_result(result)
        else:
            self._on_grammar_ready(result)

    def _on_step_result(self, result: to_worker.StepResult) -> None:
        batch = self.pipeline.complete(result)
        for row in result.failed:
            self.fail(batch.requests[row.row], InvalidRequest(row.error))
        update = self.core.complete(batch, result)
        self.stats.on_step(batch, result, update)
        self._events.add_update(update, result.ended)
        for request in update.finished:
            self._close(request)
        self._fail_all(update.failed)
        if result.logprobs is not None:
            self._events.add_logprobs(result.logprobs, batch.requests)
        self._publish()  # one message a step: its tokens all carry this step's time

    def _on_worker_ready(self, ready: to_worker.WorkerReady) -> None:
        """Start with a new worker, the first one or a later one: give it every request."""
        poison = record_worker_crash(self.pipeline.reset(ready.session, self._clock()))
        self._grammars.forget_all()
        capacity = Capacity(ready.num_pages, ready.page_size, ready.prefill_tokens)
        self.core = make_core(self._args, capacity, self.core.num_retractions)
        self._ready = ready
        for request in self.table:
            request.reset_for_new_worker()
        if poison is not None:
            self.fail(poison, poison_error(poison))
        for request in self.table:
            self._enqueue(request)

    def _on_grammar_ready(self, ready: to_worker.GrammarReady) -> None:
        for request in self._grammars.on_ready(ready):
            if ready.error:
                self.fail(request, RequestFailed(ready.error))
            else:
                self._add_to_core(request)

    # --- from frontend and detokenizer ------------------------------------------------------------

    def _on_message(self, message: to_scheduler.SchedulerMessage) -> None:  # noqa: C901
        match message:
            case to_scheduler.Submit():
                self._on_submit(message)
            case to_scheduler.AbortRequest():
                for request in self.table.of_client(message.client, message.request_id):
                    self._abort(request, message.by)
            case to_scheduler.StopFound():
                for request in self.table.with_seqs(message.seqs):
                    self.finish(request, FinishReason.STOP)
            case to_scheduler.DetokReady():
                self._publish(to_detok=False)  # the replay has it
                self.outbox.on_detok_restarted(message.session)
                self._said_drained = False
                self._replay(self.table, self.outbox.seqs_to_replay)
            case to_scheduler.EndsDelivered():
                self.outbox.acknowledge(message.seqs)
                self._events.acknowledged += message.seqs
            case to_scheduler.FrontendRestarted():
                self._replay([], self.outbox.seqs_to_replay)
            case to_scheduler.InfoRequest():
                flushed = {"flushed_pages": self.core.kv.flush()} if message.flush_cache else {}
                self._detok.send(info_reply(message, flushed | self.info(), self._ready))
            case to_scheduler.Drain():
                self._is_draining = True
                self._said_drained = False
            case to_scheduler.AbortAll():
                for request in self.table:
                    error = ErrorInfo("server_stopping", message.reason)
                    self._abort(request, to_scheduler.SERVER_STOPPING, error)
            case to_scheduler.Shutdown():
                self._worker.send(to_worker.StopWorker())
                self._detok.send(to_detok.StopDetok())
                self._journal.close()
                self.stopped = True

    def _on_submit(self, message: to_scheduler.Submit) -> None:
        """Take in a request, unless it is known. A refused one ends at once."""
        if self._is_known(message):
            return
        num_waiting, num_open = self.num_waiting, self.table.num_ids_of(message.client)
        self.outbox.forget_name(message.client, message.request_id)
        requests = self.table.add(message)
        self._events.accepted.append((message, requests))
        if message.client_retry or message.frontend_retry:
            # The client may have tokens from a scheduler that died before it wrote them down.
            self._replay(requests, [])
        error = None
        if not message.frontend_retry:
            num_choices = len(requests)
            error = refusal(self._args, self._is_draining, num_waiting, num_choices, num_open)
        for request in requests:
            if error is not None:
                self.fail(request, error)
            else:
                self._enqueue(request)

    def _is_known(self, message: to_scheduler.Submit) -> bool:
        """Return whether a request was accepted before; a client that retries it gets a replay."""
        name = (message.client, message.request_id)
        live = self.table.of_client(*name)
        if not message.client_retry:
            return bool(live) or (
                message.frontend_retry and self.outbox.has_ended(*name, message.received_at)
            )
        ended = self.outbox.ended_seqs(*name)
        self._replay(live, ended)
        return bool(live or ended)

    def _replay(self, live: Iterable[Request], ended: list[int]) -> None:
        """Send the whole streams of live requests, and of ended ones by their numbers."""
        self._publish()
        self._events.replayed = self.outbox.replays(live, ended)
        self._publish()

    def _enqueue(self, request: Request) -> None:
        """Queue a request, at once or when the worker has compiled its grammar."""
        if request.grammar is None or not self._grammars.add(request):
            self._add_to_core(request)

    def _add_to_core(self, request: Request) -> None:
        failure = self.core.add(request)
        if failure is not None:
            self.fail(*failure)

    # --- ends: the one way out --------------------------------------------------------------------

    def finish(
        self, request: Request, reason: FinishReason, error: ErrorInfo | None = None
    ) -> None:
        """End a request, wherever it stands, with one terminal message, for the first reason."""
        if not request.finished:
            self.core.remove(request)
            request.finish(reason, error=error)
            self._close(request)

    def fail(self, request: Request, error: QuadrigaError) -> None:
        """End a request with an error."""
        self.finish(request, FinishReason.ERROR, ErrorInfo.of(error))

    def _fail_all(self, failures: Iterable[RequestFailure]) -> None:
        for request, error in failures:
            self.fail(request, error)

    def _abort(self, request: Request, by: str, error: ErrorInfo | None = None) -> None:
        self.stats.aborts[by] += 1
        self.finish(request, FinishReason.ABORT, error)

    def _close(self, request: Request) -> None:
        """Report the end of a request that the core has removed."""
        self.stats.on_finish(request, self._clock())
        self._events.finished.append(request)
        self.outbox.finish(request)
        self._grammars.remove(request)
        self.table.remove(request)

    def _report_drained(self) -> None:
        """Report once that every request has ended and every end was acknowledged."""
        is_empty = not self.table and self.pipeline.idle and self.outbox.all_acknowledged
        if self._is_draining and is_empty and not self._said_drained:
            self._said_drained = True
            self._detok.send(to_detok.Drained())

    # --- info -------------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Number of requests in the waiting queue."""
        return len(self.core.waiting)

    @property
    def num_waiting(self) -> int:
        """Number of requests without a slot, also those whose grammar is being compiled."""
        if self._ready is None:
            return len(self.table)
        return self.core.num_waiting + self._grammars.num_waiting

    def info(self) -> InfoValues:
        """Return gauges and counters, as docs/protocol.md lists them."""
        values: InfoValues = {
            "running": len(self.table) - self.num_waiting,
            "waiting": self.num_waiting,
            "waiting_for_grammar": self._grammars.num_waiting,
            "journal": self._journal.state,
        }
        return values | collect_info(self._args, self._ready, self.core) | self.stats.info()

    def check(self) -> None:
        """Raise AssertionError where pages are lost, or held by no request (for tests)."""
        self.core.kv.check(self.core.admission.holders.values())
        if not self.table and self.pipeline.idle:
            assert self.core.kv.num_held == 0, "pages are held by no request"
