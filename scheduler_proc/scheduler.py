"""The scheduler: every request's state, and the loop that decides what the worker runs.

Read it top to bottom: receive → process input → get_next_batch_to_run → run_batch →
process_batch_result. It knows no socket and no clock of its own: both are passed in, so that the
same code runs under test with a simulated worker and simulated time.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from quadriga.config import SchedulerArgs
from quadriga.errors import QuadrigaError
from quadriga.messages import (
    AbortAll,
    AbortRequest,
    Drain,
    ErrorInfo,
    Info,
    InfoReply,
    InfoValues,
    Inspect,
    ResultMessage,
    SchedulerMessage,
    StepResult,
    StopDetok,
    StopFound,
    StopWorker,
    Submit,
    WorkerReady,
    unpack_ids,
)
from scheduler_proc.admission import Admission, check_queue
from scheduler_proc.batch import ForwardMode, RunningBatch, ScheduleBatch
from scheduler_proc.kv_pages import PagePool
from scheduler_proc.output import RoundOutput, close_text, open_text
from scheduler_proc.policy import FirstComeFirstServed, WaitingQueue
from scheduler_proc.request import Request, Status
from scheduler_proc.statistics import Statistics

MAX_PLANS_OUTSTANDING = 2


class Link(Protocol):
    """Where messages go: a socket, or a list in a test."""

    def send(self, message: msgspec.Struct) -> None: ...


class Scheduler:
    """Owns the waiting queue, the running batch and the KV pages."""

    def __init__(
        self,
        args: SchedulerArgs,
        eos_ids: frozenset[int],
        worker: Link,
        detok: Link,
        clock: Callable[[], float],
    ) -> None:
        self._args = args
        self._eos_ids = eos_ids
        self._worker = worker
        self._detok = detok
        self._clock = clock
        self._next_seq = 0
        self._next_step = 0
        self._requests: dict[int, Request] = {}
        self._by_client: dict[bytes, dict[str, Request]] = {}
        self.waiting: WaitingQueue = FirstComeFirstServed()
        self.running = RunningBatch()
        self.admission: Admission | None = None
        self._outstanding: deque[ScheduleBatch] = deque()
        self._output = RoundOutput()
        self._draining = False
        self.stopped = False
        self.statistics = Statistics()
        self._worker_facts: WorkerReady | None = None

    # --- the loop ---------------------------------------------------------------------------------

    def iterate(
        self, messages: Iterable[SchedulerMessage], results: Iterable[ResultMessage]
    ) -> None:
        """One round: take in what has arrived, keep the worker busy, pass on what it gave."""
        for result in results:
            self._process_result(result)
        for message in messages:
            self._process_input(message)
        while len(self._outstanding) < MAX_PLANS_OUTSTANDING:
            batch = self._get_next_batch_to_run()
            if batch.is_empty:
                break
            self._run_batch(batch)
        self._flush_output()
        if self._draining and not self._requests and not self._outstanding:
            self._stop()

    @property
    def idle(self) -> bool:
        """The worker has nothing to do."""
        return not self._outstanding

    def _get_next_batch_to_run(self) -> ScheduleBatch:
        """Prefill first; else the decode group whose turn it is."""
        if self.admission is not None and len(self.waiting):
            batch = self.admission.next_prefill(self.waiting, self._clock())
            if not batch.is_empty:
                return batch
        return self.running.next_group(self._args.max_batch_size)

    def _run_batch(self, batch: ScheduleBatch) -> None:
        assert self.admission is not None
        batch.step, self._next_step = self._next_step, self._next_step + 1
        self._worker.send(batch.to_plan(self.admission.take_released()))
        batch.planned_at = self._clock()
        batch.advance()
        self._outstanding.append(batch)
        if batch.mode is ForwardMode.EXTEND:
            self.running.merge(batch)
        else:
            self.running.remove_fully_scheduled(batch)

    # --- what the worker gave ---------------------------------------------------------------------

    def _process_result(self, result: ResultMessage) -> None:
        if isinstance(result, WorkerReady):
            self._take_worker(result)
        else:
            self._process_batch_result(result)

    def _process_batch_result(self, result: StepResult) -> None:
        batch = self._outstanding.popleft()
        assert batch.step == result.step, f"step {result.step} came, {batch.step} was next"
        self.statistics.count_step(batch, result)
        self._output.time = result.ended
        for request, token in zip(batch.requests, unpack_ids(result.token_ids), strict=True):
            request.in_flight -= 1
            if not request.finished:
                self._take_token(request, token, result.ended)
            if request.finished and request.in_flight == 0:
                self._release(request)
        # One output message a step: its tokens all carry this step's time.
        self._flush_output()

    def _take_token(self, request: Request, token: int, time: float) -> None:
        if not request.output:
            request.first_token = time
            request.status = Status.DECODING
            self.statistics.prompt_tokens += len(request.prompt)
            self._output.opened.append(open_text(request))
        request.output.append(token)
        self.statistics.generation_tokens += 1
        self._output.seqs.append(request.seq)
        self._output.tokens.append(token)
        if token in request.stop_ids:
            self._finish(request, "stop", matched_stop=token)
        elif len(request.output) >= request.max_new_tokens:
            self._finish(request, "length")

    def _take_worker(self, ready: WorkerReady) -> None:
        self._worker_facts = ready
        self.admission = Admission(self._args, PagePool(ready.num_pages, ready.page_size))
        for request in self.waiting:
            self._refuse_if_it_never_fits(request)

    # --- what the clients want --------------------------------------------------------------------

    def _process_input(self, message: SchedulerMessage) -> None:
        match message:
            case Submit():
                self._accept(message)
            case AbortRequest():
                self._abort(message)
            case StopFound():
                for seq in message.seqs:
                    if seq in self._requests:
                        self._finish(self._requests[seq], "stop")
            case Inspect():
                self._inspect(message)
            case Drain():
                self._draining = True
            case AbortAll():
                error = ErrorInfo("server_stopping", message.reason)
                for request in list(self._requests.values()):
                    self._finish(request, "abort", error=error)

    def _accept(self, message: Submit) -> None:
        mine = self._by_client.setdefault(message.client, {})
        if message.request_id in mine:
            return  # sent again by its client: it is under way
        request = Request.from_submit(self._next_seq, message, self._eos_ids)
        self._next_seq += 1
        self._requests[request.seq] = mine[request.request_id] = request
        try:
            check_queue(self.waiting, self._args.max_queued_requests)
        except QuadrigaError as error:
            self._fail(request, error)
            return
        self.waiting.push(request)
        self._refuse_if_it_never_fits(request)

    def _refuse_if_it_never_fits(self, request: Request) -> None:
        if self.admission is None:
            return
        try:
            self.admission.check_fits(request)
        except QuadrigaError as error:
            self._fail(request, error)

    def _abort(self, message: AbortRequest) -> None:
        mine = self._by_client.get(message.client, {})
        if message.request_id:
            targets = [mine[message.request_id]] if message.request_id in mine else []
        else:
            targets = list(mine.values())
        for request in targets:
            self._finish(request, "abort")

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
        self.waiting.remove(request)
        self.running.remove(request)
        request.status = Status.FINISHED
        request.finish_reason, request.matched_stop, request.error = reason, matched_stop, error
        self.statistics.ended[reason] += 1
        self._output.closed.append(close_text(request))
        self._forget(request)
        if request.in_flight == 0:
            self._release(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.seq]
        mine = self._by_client[request.client]
        del mine[request.request_id]
        if not mine:
            del self._by_client[request.client]

    def _release(self, request: Request) -> None:
        """Slot and pages go back: no step of the request is in flight any more."""
        if request.slot >= 0 and self.admission is not None:
            self.admission.release(request)

    def _flush_output(self) -> None:
        if not self._output.is_empty:
            self._detok.send(self._output.to_message(self._clock))
            self._output = RoundOutput()

    def _stop(self) -> None:
        self._worker.send(StopWorker())
        self._detok.send(StopDetok())
        self.stopped = True

    # --- what it says of itself -------------------------------------------------------------------

    def _inspect(self, message: Inspect) -> None:
        values = message.values | self.info()
        pids = message.values.get("pids")
        if isinstance(pids, dict):
            worker = self._worker_facts.pid if self._worker_facts else 0
            values["pids"] = pids | {"scheduler_proc": os.getpid(), "worker_proc": worker}
        self._detok.send(InfoReply(message.client, Info(message.request_id, values)))

    def info(self) -> InfoValues:
        """Gauges and counters, as docs/protocol.md lists them."""
        statistics, ready = self.statistics, self._worker_facts
        pool = self.admission.pool if self.admission else PagePool(0, 1)
        return {
            "ready": ready is not None,
            "dtype": ready.dtype if ready else None,
            "device": ready.device if ready else None,
            "running": len(self._requests) - len(self.waiting),
            "waiting": len(self.waiting),
            "page_size": pool.page_size,
            "pages_total": pool.num_pages,
            "pages_free": pool.num_free,
            "pages_held": pool.num_held,
            "pages_cached": 0,
            "steps": statistics.steps,
            "prefill_steps": statistics.prefill_steps,
            "busy_seconds": statistics.busy_seconds,
            "step_gap_ms_p50": statistics.gap_ms(0.5),
            "step_gap_ms_p99": statistics.gap_ms(0.99),
            "prompt_tokens_total": statistics.prompt_tokens,
            "generation_tokens_total": statistics.generation_tokens,
            "cached_tokens_total": statistics.cached_tokens,
            "ended": dict(statistics.ended),
        }

    def check(self) -> None:
        """The invariant, for tests and idle moments: no page is lost."""
        if self.admission is not None:
            self.admission.pool.check()
            if not self._requests and not self._outstanding:
                assert self.admission.pool.num_held == 0, "pages are held by nobody"
