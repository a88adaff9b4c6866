"""The scheduler: every request's state, and the loop that decides what the worker runs.

Read it top to bottom: receive → process input → get_next_batch_to_run → run_batch →
process_batch_result. It knows no socket and no clock of its own: both are passed in, so that the
same code runs under test and in the simulator, with a simulated worker and simulated time.
"""

import math
from collections.abc import Callable, Iterable

from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.errors import QuadrigaError, RequestFailed
from quadriga.wire.messages import to_detok
from quadriga.wire.messages import worker as to_worker
from quadriga.wire.messages.public import ErrorInfo, InfoValues
from quadriga.wire.messages.to_detok import Drained, StopDetok
from quadriga.wire.messages.to_scheduler import (
    SERVER_STOPPING,
    AbortAll,
    AbortRequest,
    DetokReady,
    Drain,
    EndsDelivered,
    FrontendRestarted,
    InfoRequest,
    SchedulerMessage,
    Shutdown,
    StopFound,
    Submit,
)
from quadriga.wire.messages.worker import (
    GrammarReady,
    ResultMessage,
    StepResult,
    StopWorker,
    WorkerReady,
)
from scheduler_proc.durability.detok_outbox import DetokOutbox
from scheduler_proc.durability.journal import NO_JOURNAL, Journal, NoJournal
from scheduler_proc.durability.step_output import Sender
from scheduler_proc.grammar_queue import GrammarQueue
from scheduler_proc.intake import Intake
from scheduler_proc.observe.server_info import ServerInfoCollector
from scheduler_proc.observe.stats import SchedulerStats
from scheduler_proc.output_processor import OutputProcessor
from scheduler_proc.pipeline import Pipeline
from scheduler_proc.planning.admission import Admission
from scheduler_proc.planning.deadlines import Deadlines
from scheduler_proc.planning.planner import Planner
from scheduler_proc.planning.quarantine import blame, record_worker_crash
from scheduler_proc.policies import make_queue
from scheduler_proc.request_table import RequestTable
from scheduler_proc.state.batch import ScheduleBatch
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.request import Request, RequestStatus


class Scheduler:
    """Owns the waiting queue, the running batch and the KV pages.

    wake_at: the clock's time at which `iterate` wants to be called even if no message comes.
    pipeline: the steps under way.
    """

    def __init__(
        self,
        args: SchedulerArgs,
        eos_ids: frozenset[int],
        worker: Sender,
        detok: Sender,
        clock: Callable[[], float],
        journal: Journal | NoJournal = NO_JOURNAL,
    ) -> None:
        self._args = args
        self._journal = journal
        self._worker = worker
        self.texts = DetokOutbox(detok, clock)
        self._detok = detok
        self._clock = clock
        self._requests = RequestTable(eos_ids)
        self._planner: Planner | None = None
        self._deadlines = Deadlines()
        self._grammars = GrammarQueue(worker)
        self.pipeline = Pipeline(worker, args.plan_at_once)
        self._said_all_told = False
        self.stopped = False
        self.wake_at: float | None = None
        self.statistics = SchedulerStats()
        self._results = OutputProcessor(self.texts, journal, self.statistics, self)
        self.arrivals = Intake(
            args, self._requests, self.texts, journal, self._deadlines, self._grammars, self.fail
        )
        self._report = ServerInfoCollector(
            args, self._requests, self._grammars, self.arrivals, self.statistics, journal
        )

    def greet(self) -> None:
        """Another scheduler was here before: worker and detokenizer have to forget what it said."""
        self._worker.send(to_worker.NewScheduler())
        self._detok.send(to_detok.NewScheduler())

    # --- the loop ---------------------------------------------------------------------------------

    def iterate(
        self, messages: Iterable[SchedulerMessage], results: Iterable[ResultMessage]
    ) -> None:
        """One round: take in what has arrived, keep the worker busy, pass on what it gave."""
        for result in results:
            self._process_result(result)
        queued = self.arrivals.num_queued
        for message in messages:
            self._process_input(message)
        now = self._clock()
        if self.arrivals.num_queued > queued and self.pipeline.idle:
            self.pipeline.start_batch_delay(now)
        for request, error in self._deadlines.expired(now):
            self.fail(request, error)
        self.wake_at = self._deadlines.next
        while self._may_plan(now):
            batch = self._get_next_batch_to_run(now)
            if batch.is_empty:
                break
            self._run_batch(batch, now)
        self._flush_output()
        self._journal.commit()
        if self.arrivals.is_draining and not self._said_all_told and self._is_empty:
            self._said_all_told = True
            self._detok.send(Drained())

    def _may_plan(self, now: float) -> bool:
        """Whether now is the time for another plan; if it is later, `wake_at` says when."""
        if self._planner is None or not self._planner.has_work:
            return False
        due = self.pipeline.due
        if now >= due or (self.pipeline.idle and not self._planner.has_room):
            return True
        if due < math.inf:
            self.wake_at = due if self.wake_at is None else min(due, self.wake_at)
        return False

    def _get_next_batch_to_run(self, now: float) -> ScheduleBatch:
        assert self._planner is not None
        return self._planner.next_batch(now, in_flight=not self.pipeline.idle)

    def _run_batch(self, batch: ScheduleBatch, now: float) -> None:
        assert self._planner is not None
        self.pipeline.run(batch, self._planner.admission.take_released(), now)

    # --- what the worker gave ---------------------------------------------------------------------

    def _process_result(self, result: ResultMessage) -> None:
        if isinstance(result, WorkerReady):
            self._take_worker(result)
        elif self.pipeline.is_of_the_dead(result):
            return
        elif isinstance(result, StepResult):
            self._process_batch_result(result)
        else:
            self._take_grammar(result)

    def _process_batch_result(self, result: StepResult) -> None:
        assert self._planner is not None
        self._results.take(self.pipeline.answered(result), result, self._planner)
        # One output message a step: its tokens all carry this step's time.
        self._flush_output()

    def _take_worker(self, ready: WorkerReady) -> None:
        """A worker is there, the first one or another: everything is sent to it anew."""
        to_blame = record_worker_crash(self.pipeline.begin(ready.session, self._clock()))
        self._grammars.forget_all()
        self._make_planner(ready)
        for request in self._requests:
            request.lose_worker()
        if to_blame is not None:
            self.fail(to_blame, blame(to_blame))
        for request in self._requests:
            self.arrivals.hold_or_enqueue(request)

    def _make_planner(self, ready: WorkerReady) -> None:
        kv = KVCache(ready.num_pages, ready.page_size, not self._args.disable_radix_cache)
        admission = Admission(self._args, kv)
        self._planner = Planner(
            self._args,
            ready.prefill_tokens,
            admission,
            make_queue(self._args, kv.locate, ready.page_size),
            self._deadlines,
            self.fail,
        )
        if self.arrivals.planner is not None:
            earlier = self.arrivals.planner.giving_way.retractions
            self._planner.giving_way.retractions = earlier
        self.arrivals.planner, self._report.worker = self._planner, ready

    def _take_grammar(self, ready: GrammarReady) -> None:
        for request in self._grammars.answered(ready):
            if ready.error:
                self.fail(request, RequestFailed(ready.error))
            else:
                self.arrivals.enqueue(request)

    # --- what the clients want --------------------------------------------------------------------

    def _process_input(self, message: SchedulerMessage) -> None:
        match message:
            case Submit():
                self.arrivals.accept(message)
            case AbortRequest():
                for request in self._requests.of(message.client, message.request_id):
                    self.statistics.aborts[message.by] += 1
                    self.finish(request, "abort")
            case StopFound():
                for stopped in self._requests.numbered(message.seqs):
                    self.finish(stopped, "stop")
            case DetokReady():
                self.texts.take_detok(message, self._requests, self.arrivals.num_waiting)
                self._said_all_told = False
            case EndsDelivered():
                self.texts.settle(message.seqs)
                self._journal.settled(message.seqs)
            case FrontendRestarted():
                self.texts.tell_ends(self.arrivals.num_waiting)
            case InfoRequest():
                self._detok.send(self._report.answer(message))
            case Drain():
                self.arrivals.is_draining = True
                self._said_all_told = False
            case Shutdown():
                self._stop()
            case AbortAll():
                error = ErrorInfo("server_stopping", message.reason)
                for request in self._requests:
                    self.statistics.aborts[SERVER_STOPPING] += 1
                    self.finish(request, "abort", error=error)

    # --- the one way out --------------------------------------------------------------------------

    def fail(self, request: Request, error: QuadrigaError) -> None:
        """End a request with an error, as `finish`."""
        self.statistics.errors[error.code] += not request.finished
        self.finish(request, "error", error=ErrorInfo.of(error))

    def finish(
        self,
        request: Request,
        reason: str,
        matched_stop: int | None = None,
        error: ErrorInfo | None = None,
    ) -> None:
        """End a request, wherever it stands: exactly one terminal message, for the first reason."""
        if request.finished:
            return
        if self._planner is not None:
            self._planner.forget(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.matched_stop, request.error = reason, matched_stop, error
        self.statistics.count_end(request, reason, self._clock())
        self.texts.close(request)
        self._journal.ended(request)
        self._deadlines.forget(request)
        self._grammars.ended(request)
        self._requests.remove(request)
        if request.in_flight == 0 and self._planner is not None:
            self._planner.release(request)

    def _flush_output(self) -> None:
        self.texts.flush(self.arrivals.num_waiting)

    @property
    def _is_empty(self) -> bool:
        """Nobody waits for anything: every end was handed on."""
        return not self._requests and self.pipeline.idle and self.texts.settled

    def _stop(self) -> None:
        self._worker.send(StopWorker())
        self._detok.send(StopDetok())
        self._journal.close()
        self.stopped = True

    def retract_one(self, number: int) -> None:
        """One of those that run gives way, though nobody needs its pages: a fault on purpose.
        number: which of them, counted around."""
        if self._planner is not None:
            self._planner.retract_one(number)

    # --- what it says of itself -------------------------------------------------------------------

    def info(self) -> InfoValues:
        """Gauges and counters, as docs/protocol.md lists them."""
        return self._report.info()

    def check(self) -> None:
        """The invariant, for tests: free + cached + held = all pages, and none held by nobody."""
        if self._planner is not None:
            admission = self._planner.admission
            admission.kv.check(admission.seated.values())
            if not self._requests and self.pipeline.idle:
                assert admission.kv.num_held == 0, "pages are held by nobody"
