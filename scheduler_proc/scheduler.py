"""The scheduler: every request's state, and the loop that decides what the worker runs.

Read it top to bottom: receive → process input → get_next_batch_to_run → run_batch →
process_batch_result. It knows no socket and no clock of its own: both are passed in, so that the
same code runs under test and in the simulator, with a simulated worker and simulated time.
"""

from collections import deque
from collections.abc import Callable, Iterable

from quadriga.errors import QuadrigaError, RequestFailed
from quadriga.messages.ids import unpack_ids
from quadriga.messages.public import ErrorInfo, InfoValues
from quadriga.messages.to_detok import StopDetok
from quadriga.messages.to_scheduler import (
    AbortAll,
    AbortRequest,
    Drain,
    Inspect,
    SchedulerMessage,
    StopFound,
    Submit,
)
from quadriga.messages.worker import (
    GrammarReady,
    ResultMessage,
    StepResult,
    StopWorker,
    WorkerReady,
)
from quadriga.scheduler_args import SchedulerArgs
from scheduler_proc.admission import Admission, check_queue
from scheduler_proc.batch import ScheduleBatch
from scheduler_proc.deadlines import Deadlines
from scheduler_proc.grammars import Grammars
from scheduler_proc.kv_cache import KVCache
from scheduler_proc.output import Link, RoundOutput, close_text, open_text
from scheduler_proc.pacing import Pace
from scheduler_proc.planner import Planner
from scheduler_proc.policies import make_queue
from scheduler_proc.policy import FirstComeFirstServed, WaitingQueue
from scheduler_proc.report import Report
from scheduler_proc.request import Request, Status
from scheduler_proc.requests import LiveRequests
from scheduler_proc.statistics import Statistics

MAX_PLANS_OUTSTANDING = 2


class Scheduler:
    """Owns the waiting queue, the running batch and the KV pages.

    wake_at: the clock's time at which `iterate` wants to be called even if no message comes.
    """

    def __init__(
        self,
        args: SchedulerArgs,
        eos_ids: frozenset[int],
        worker: Link,
        detok: Link,
        clock: Callable[[], float],
    ) -> None:
        self._args = args
        self._worker = worker
        self._detok = detok
        self._clock = clock
        self._requests = LiveRequests(eos_ids)
        self._planner: Planner | None = None
        self.waiting: WaitingQueue = FirstComeFirstServed()
        self._deadlines = Deadlines()
        self._grammars = Grammars(worker)
        self._pace = Pace()
        self._next_step = 0
        self._outstanding: deque[ScheduleBatch] = deque()
        self._output = RoundOutput()
        self._draining = False
        self.stopped = False
        self.wake_at: float | None = None
        self.statistics = Statistics()
        self._report = Report(args, self._requests, self.statistics)

    # --- the loop ---------------------------------------------------------------------------------

    def iterate(
        self, messages: Iterable[SchedulerMessage], results: Iterable[ResultMessage]
    ) -> None:
        """One round: take in what has arrived, keep the worker busy, pass on what it gave."""
        for result in results:
            self._process_result(result)
        for message in messages:
            self._process_input(message)
        now = self._clock()
        for request, error in self._deadlines.expired(now):
            self._fail(request, error)
        self.wake_at = self._deadlines.next
        while self._may_plan(now):
            batch = self._get_next_batch_to_run(now)
            if batch.is_empty:
                break
            self._run_batch(batch, now)
        self._flush_output()
        if self._draining and not self._requests and not self._outstanding:
            self._stop()

    def _may_plan(self, now: float) -> bool:
        """Whether now is the time for another plan; if it is later, `wake_at` says when.

        At most two are outstanding: the step that runs, and one that the worker begins without
        waiting for anybody. The second is planned as late as the running step's end allows.
        """
        if self._planner is None or not self._planner.has_work:
            return False
        if not self._outstanding:
            return True
        if len(self._outstanding) >= MAX_PLANS_OUTSTANDING:
            return False
        if self._args.plan_at_once:
            return True
        due = self._pace.due(self._outstanding[0])
        if now >= due:
            return True
        self.wake_at = due if self.wake_at is None else min(due, self.wake_at)
        return False

    def _get_next_batch_to_run(self, now: float) -> ScheduleBatch:
        assert self._planner is not None
        return self._planner.next_batch(now, in_flight=bool(self._outstanding))

    def _run_batch(self, batch: ScheduleBatch, now: float) -> None:
        assert self._planner is not None
        batch.step, self._next_step = self._next_step, self._next_step + 1
        batch.planned_at = now
        self._worker.send(batch.to_plan(self._planner.admission.take_released()))
        self._outstanding.append(batch)

    # --- what the worker gave ---------------------------------------------------------------------

    def _process_result(self, result: ResultMessage) -> None:
        match result:
            case StepResult():
                self._process_batch_result(result)
            case GrammarReady():
                self._take_grammar(result)
            case WorkerReady():
                self._take_worker(result)

    def _process_batch_result(self, result: StepResult) -> None:
        batch = self._outstanding.popleft()
        assert batch.step == result.step, f"step {result.step} came, {batch.step} was next"
        self.statistics.count_step(batch, result)
        self._pace.learn(batch, result)
        self._output.time = result.ended
        for piece in result.prompt_logprobs:
            batch.requests[piece.row].prompt_logprobs.append(piece.block)
        for failed in result.failed:
            self._fail(batch.requests[failed.row], RequestFailed(failed.error))
        for request, token in zip(batch.requests, unpack_ids(result.token_ids), strict=True):
            request.in_flight -= 1
            if token >= 0 and request.status is not Status.FINISHED:
                self._take_token(request, token, result.ended)
            if request.in_flight == 0 and request.status >= Status.RETRACTED:
                self._steps_are_over(request)
        if result.logprobs is not None:
            self._output.take_logprobs(result.logprobs, batch.requests)
        # One output message a step: its tokens all carry this step's time.
        self._flush_output()

    def _take_token(self, request: Request, token: int, time: float) -> None:
        if not request.first_token:
            self._take_first_token(request, time)
        request.tokens.append(token)
        self.statistics.generation_tokens += 1
        self._output.seqs.append(request.seq)
        self._output.tokens.append(token)
        if token in request.stop_ids:
            self._finish(request, "stop", matched_stop=token)
        elif len(request.tokens) == request.most_known:
            self._finish(request, "length")

    def _take_first_token(self, request: Request, time: float) -> None:
        request.first_token = time
        if request.status is Status.PREFILLING:
            request.status = Status.DECODING
        self.statistics.prompt_tokens += request.num_prompt
        self.statistics.cached_tokens += request.cached_tokens
        self._output.opened.append(open_text(request))

    def _steps_are_over(self, request: Request) -> None:
        """A request that ended or was retracted has no step in flight any more."""
        assert self._planner is not None
        if request.status is Status.RETRACTED:
            self._planner.requeue(request)
        else:
            self._planner.release(request)

    def _take_worker(self, ready: WorkerReady) -> None:
        kv = KVCache(ready.num_pages, ready.page_size, self._args.prefix_cache)
        admission = Admission(self._args, kv)
        self.waiting = make_queue(self._args, kv.locate, ready.page_size)
        self._planner = Planner(
            self._args,
            ready.device,
            admission,
            self.waiting,
            self._deadlines,
            self._fail,
        )
        self._report.worker, self._report.planner = ready, self._planner
        for request in self._requests:
            if not self._grammars.is_held_back(request):
                self._enqueue(request)

    def _take_grammar(self, ready: GrammarReady) -> None:
        for request in self._grammars.answered(ready):
            if ready.error:
                self._fail(request, RequestFailed(ready.error))
            else:
                self._enqueue(request)

    # --- what the clients want --------------------------------------------------------------------

    def _process_input(self, message: SchedulerMessage) -> None:
        match message:
            case Submit():
                self._accept(message)
            case AbortRequest():
                for request in self._requests.of(message.client, message.request_id):
                    self._finish(request, "abort")
            case StopFound():
                for stopped in self._requests.numbered(message.seqs):
                    self._finish(stopped, "stop")
            case Inspect():
                self._detok.send(self._report.answer(message))
            case Drain():
                self._draining = True
            case AbortAll():
                error = ErrorInfo("server_stopping", message.reason)
                for request in self._requests:
                    self._finish(request, "abort", error=error)

    def _accept(self, message: Submit) -> None:
        requests = self._requests.add(message)
        try:
            self._check_queue(len(requests))
        except QuadrigaError as error:
            for request in requests:
                self._fail(request, error)
            return
        for request in requests:
            self._deadlines.watch(request)
            if request.grammar is not None:
                self._grammars.arrived(request)
            if not self._grammars.is_held_back(request):
                self._enqueue(request)

    def _check_queue(self, count: int) -> None:
        limit = self._args.max_queued_requests
        check_queue(self.waiting, limit, count + self._grammars.num_waiting)

    def _enqueue(self, request: Request) -> None:
        """Into the waiting queue, unless the request can never run."""
        try:
            if self._planner is not None:
                self._planner.admission.check_fits(request)
        except QuadrigaError as error:
            self._fail(request, error)
            return
        self.waiting.push(request)

    # --- the one way out --------------------------------------------------------------------------

    def _fail(self, request: Request, error: QuadrigaError) -> None:
        info = ErrorInfo(error.code, str(error), getattr(error, "field", ""))
        self._finish(request, "error", error=info)

    def _finish(
        self,
        request: Request,
        reason: str,
        matched_stop: int | None = None,
        error: ErrorInfo | None = None,
    ) -> None:
        """End a request, wherever it stands: exactly one terminal message, for the first reason."""
        if request.finished:
            return
        if self._planner is None:
            self.waiting.remove(request)
        else:
            self._planner.forget(request)
        request.status = Status.FINISHED
        request.finish_reason, request.matched_stop, request.error = reason, matched_stop, error
        self.statistics.ended[reason] += 1
        self._output.closed.append(close_text(request))
        self._deadlines.forget(request)
        self._grammars.ended(request)
        self._requests.remove(request)
        if request.in_flight == 0 and self._planner is not None:
            self._planner.release(request)

    def _flush_output(self) -> None:
        if not self._output.is_empty:
            self._detok.send(self._output.to_message(self._clock))
            self._output = RoundOutput()

    def _stop(self) -> None:
        self._worker.send(StopWorker())
        self._detok.send(StopDetok())
        self.stopped = True

    # --- what it says of itself -------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """The worker has nothing to do."""
        return not self._outstanding

    @property
    def patience(self) -> float:
        """Seconds for which it pays to wait for company before an idle worker gets a step."""
        return self._pace.patience

    def info(self) -> InfoValues:
        """Gauges and counters, as docs/protocol.md lists them."""
        return self._report.info()

    def check(self) -> None:
        """The invariant, for tests: free + cached + held = all pages, and none held by nobody."""
        if self._planner is not None:
            admission = self._planner.admission
            admission.kv.check(admission.seated.values())
            if not self._requests and not self._outstanding:
                assert admission.kv.num_held == 0, "pages are held by nobody"
