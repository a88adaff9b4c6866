"""BatchJob: run one batch from where it stands to its end.

While no request of others is open, lines run up to --batch-concurrency. Beside others only
--batch-concurrency-beside run, and none is added while a request waits or the running batch is
full. Batches take turns.
"""

import asyncio
import copy
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import msgspec

from http_proc.core import observe, shares, streaming
from http_proc.core.answering import answer, api_error_of, note_failure, observed
from http_proc.core.call import Call
from http_proc.core.caller import Caller, set_caller
from http_proc.core.gateway import Gateway
from http_proc.core.served_model import ServedModel
from http_proc.jobs.batch_lines import (
    BatchStatus,
    FileCheck,
    InputLine,
    LineError,
    LineErrors,
    LineLog,
    OutputLine,
    ShortStep,
    StoredBatch,
    read_lines,
)
from http_proc.jobs.files import FileStore
from quadriga.clock import now
from quadriga.errors import QuadrigaError
from quadriga.sampling.params import LIMITS

SAMPLE_INTERVAL_S = 0.25


class LineGate:
    """Admission of lines to one model.

    Args:
        gateway: its state.
        model: answers the lines.

    Attributes:
        max_alone: --batch-concurrency.
        num_running: lines that are admitted and have not been released.
    """

    def __init__(self, gateway: Gateway, model: ServedModel) -> None:
        self._gateway = gateway
        self._model = model
        self.max_alone = gateway.args.batch_concurrency
        limits = model.config.scheduler
        self._max_beside = limits.batch_concurrency_beside
        self._max_batch_size = limits.max_batch_size
        self._turn = asyncio.Lock()  # its waiters are served in order
        self._released = asyncio.Event()
        self._sampled_at = 0.0
        self._is_full = self._has_other_clients = True
        self._num_waiting = 0
        self.num_running = 0

    async def acquire(self) -> None:
        """Wait until a line may run."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            while not await self._has_room():
                self._released.clear()
                # Before Python 3.12, asyncio.wait_for drops a cancellation that comes with a
                # release.
                timer = loop.call_later(SAMPLE_INTERVAL_S, self._released.set)
                try:
                    await self._released.wait()
                finally:
                    timer.cancel()
            self.num_running += 1

    def release(self) -> None:
        """Note the end of a line."""
        self.num_running -= 1
        self._released.set()

    async def _has_room(self) -> bool:
        if self.num_running >= self.max_alone:
            return False
        if time.monotonic() - self._sampled_at >= SAMPLE_INTERVAL_S:
            try:
                await self._sample()
            except QuadrigaError:  # a process is being replaced
                return False
        if self._is_full:
            return False
        if (
            not self._has_other_clients
            and self._gateway.num_open_of(self._model) <= self.num_running
        ):
            return True
        return not self._num_waiting and self.num_running < self._max_beside

    async def _sample(self) -> None:
        """Ask the server for its load."""
        before = self._gateway.num_choices_of(self._model)
        info = await self._model.server_info.current()
        self._sampled_at = time.monotonic()
        num_by_http = max(before, self._gateway.num_choices_of(self._model))
        self._is_full = not info["ready"] or info["running"] >= self._max_batch_size
        self._num_waiting = info["waiting"]
        self._has_other_clients = info["running"] + info["waiting"] > num_by_http


ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/decisions",
    "/v1/rerank",
    "/v1/score",
)
LOWEST_PRIORITY = int(LIMITS["priority"].minimum or 0)


class LineAnswer(NamedTuple):
    """The answer to a line. retry_after: seconds, 0 for none; body: JSON."""

    status: int
    body: bytes
    retry_after: float


class _NoStream:
    """The EventSink of a line, which is no stream: the check of the file has refused it."""

    async def open(self, opening: streaming.Opening) -> None:
        raise RuntimeError(f"a line of a batch is answered by {opening.framing.content_type}")

    async def write(self, data: bytes | memoryview) -> None:
        """Nothing comes without `open`."""

    async def comment(self, line: bytes) -> None:
        """Nothing comes without `open`."""

    async def close(self) -> None:
        """Nothing comes without `open`."""


async def answer_line(
    gateway: Gateway, endpoint: str, body: bytes, line_id: str, caller: Caller
) -> LineAnswer:
    """Return the answer to the body of a line, with the lowest priority. It keeps nothing."""
    record = observe.CallRecord(request_id=line_id, path=endpoint, route=endpoint)
    call = Call(endpoint, body, line_id, True, LOWEST_PRIORITY, may_keep=False, record=record)
    set_caller(caller)
    with observed(gateway, record, ""), shares.holding():
        try:
            whole = await answer(gateway, call, caller, _NoStream())
        except Exception as caught:
            error = api_error_of(caught, record)
            note_failure(gateway, record, error)
            retry_after = float(error.headers().get("Retry-After", 0))
            return LineAnswer(error.status, error.body(), retry_after)
        record.answered(200)
        return LineAnswer(200, whole or b"null", 0.0)


DISK_RETRY_S = 10.0
MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0
# The queue is full, or a process is being replaced: the line is tried again.
TRANSIENT = (429, 503)
EXPIRED = LineError(
    "batch_expired", "This request could not be executed before the completion window expired."
)

# What an iterator that has ended gives.
END = object()

T = TypeVar("T")


class JobTools(NamedTuple):
    """What all jobs share.

    Attributes:
        gates: of each model.
        save: writes the state of a batch durably; raises OSError.
        readers: a thread for the steps of jobs that read whole files.
        writers: threads for lines.
        max_line_bytes: length of the longest line of an input file.
        num_lines: lines by outcome, for the metrics.
    """

    files: FileStore
    gateway: Gateway
    gates: Mapping[ServedModel, LineGate]
    save: Callable[[StoredBatch], None]
    max_line_bytes: int
    num_lines: Counter[str]
    readers: ThreadPoolExecutor
    writers: ThreadPoolExecutor


class BatchJob:
    """A batch that has not ended.

    Attributes:
        ends_as: the last state, from when it is decided; None before. A cancellation that was
            accepted before makes it CANCELLED, and none is accepted afterwards.
    """

    def __init__(self, stored: StoredBatch, tools: JobTools) -> None:
        self._stored = stored
        self._batch = stored.batch
        self._tools = tools
        self._input = tools.files.path(stored.batch.input_file_id)
        self._log = LineLog(
            tools.files.path(stored.answers_id), tools.files.path(stored.failures_id)
        )
        self._is_cancelled = asyncio.Event()
        self.ends_as: BatchStatus | None = None

    def cancel(self) -> None:
        """End the batch soon; what is answered stays."""
        self._is_cancelled.set()

    def update_counts(self) -> None:
        """Set the counts of the batch to those of its output."""
        counts = self._batch.request_counts
        counts.completed, counts.failed = self._log.num_completed, self._log.num_failed

    async def run(self) -> None:
        """Run the batch to its end."""
        batch = self._batch
        if batch.status is BatchStatus.CANCELLING:
            self.cancel()
        try:
            await self._run()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logging.error("batch %s failed", batch.id, exc_info=error)
            failure = LineError("server_error", "the server failed on this batch; its log says why")
            await self._finish(BatchStatus.FAILED, [failure])
        finally:
            self._log.close()

    async def _run(self) -> None:
        batch = self._batch
        await _retried(lambda: self._in_steps(self._log.open()))
        if batch.status is BatchStatus.VALIDATING and not await self._validate():
            return
        outcome = await self._run_lines()
        if batch.status is BatchStatus.IN_PROGRESS:
            batch.enter(BatchStatus.FINALIZING)
        if outcome is BatchStatus.EXPIRED and batch.status is BatchStatus.FINALIZING:
            await _retried(lambda: self._in_steps(self._expire_lines()))
        await self._finish(outcome)

    async def _validate(self) -> bool:
        """Check the input file, and return whether the batch runs."""
        batch = self._batch
        check = FileCheck(self._input, batch.endpoint, self._tools.max_line_bytes)
        await self._in_steps(check.steps(), self._is_cancelled.is_set)
        batch.request_counts.total = check.num_lines
        if check.errors:
            await self._finish(BatchStatus.FAILED, check.errors)
            return False
        if batch.status is BatchStatus.VALIDATING:
            batch.enter(BatchStatus.IN_PROGRESS)
            await self._save()
        return True

    async def _in_steps(
        self, steps: Iterator[None], is_stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Do the steps of a job one by one, each after the steps of other batches that wait.

        Args:
            steps: the job.
            is_stopped: whether its result is no longer needed.
        """
        loop = asyncio.get_running_loop()
        while not is_stopped():
            step = await loop.run_in_executor(self._tools.readers, next, steps, END)
            if step is END:
                return

    async def _run_lines(self) -> BatchStatus:
        """Answer lines until all have their answers, the batch is cancelled, or its time is over.

        Returns:
            COMPLETED, CANCELLED or EXPIRED.
        """
        work = asyncio.create_task(self._answer_all())
        cancelled = asyncio.create_task(self._is_cancelled.wait())
        timeout_s = max(self._batch.expires_at - now(), 0)
        try:
            await asyncio.wait(
                (work, cancelled), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if work.done():
                work.result()
                return BatchStatus.COMPLETED
            return BatchStatus.CANCELLED if cancelled.done() else BatchStatus.EXPIRED
        finally:
            cancelled.cancel()
            work.cancel()
            await asyncio.gather(work, cancelled, return_exceptions=True)

    async def _answer_all(self) -> None:
        """Answer every line that has no answer, as many at a time as the gate admits.

        A line that waits to be tried again is not among those, but holds back further lines of its
        batch.
        """
        tasks: set[asyncio.Task[None]] = set()
        room = asyncio.Semaphore(self._tools.gateway.args.batch_concurrency)
        lines = self._unanswered()

        def release(task: "asyncio.Task[None]") -> None:
            room.release()
            if task.cancelled() or task.exception() is None:
                tasks.discard(task)

        try:
            while (line := await self._in_thread(lambda: next(lines, END))) is not END:
                if line is None:
                    continue
                assert isinstance(line, InputLine)
                await room.acquire()
                task = asyncio.create_task(self._answer(line))
                tasks.add(task)
                task.add_done_callback(release)
                _raise_first(tasks)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _unanswered(self) -> Iterator[InputLine | None]:
        """Yield the lines without an answer, and None at the end of a step without one."""
        step = ShortStep()
        for line in read_lines(self._input, self._batch.endpoint, self._tools.max_line_bytes):
            if not self._log.has(line.custom_id):
                yield line
            elif step.is_over():
                yield None

    def _line_id(self, line: InputLine) -> str:
        """Return the id of a line, also where it is answered again after a crash."""
        name = f"{self._batch.id}/{line.custom_id}".encode("utf-8", "surrogatepass")
        return f"batch_req_{hashlib.blake2b(name, digest_size=16).hexdigest()}"

    async def _answer(self, line: InputLine) -> None:
        """Answer a line, and write the answer."""
        line_id = self._line_id(line)
        answer = await self._ask(line, line_id)
        response = {
            "status_code": answer.status,
            "request_id": line_id,
            "body": msgspec.Raw(answer.body),
        }
        is_failure = answer.status != 200
        output = msgspec.json.encode(OutputLine(line_id, line.custom_id, response, None))
        written = await self._until_written(
            lambda: self._log.append(line.custom_id, output, is_failure)
        )
        if written:
            self._tools.num_lines["failed" if is_failure else "completed"] += 1

    async def _ask(self, line: InputLine, line_id: str) -> LineAnswer:
        """Return the answer of the endpoint, asked again while it cannot serve."""
        models = self._tools.gateway.models
        model = models.of_body(line.body, line_id) or models.default
        gate = self._tools.gates[model.base]
        wait_s = MIN_RETRY_S
        while True:
            await gate.acquire()
            # A caller of its own: a line may name the user of its tenant.
            caller = Caller.of_name(self._stored.caller, self._stored.has_users)
            try:
                answer = await answer_line(
                    self._tools.gateway, self._batch.endpoint, line.body, line_id, caller
                )
            finally:
                gate.release()
            if answer.status not in TRANSIENT:
                return answer
            await asyncio.sleep(max(wait_s, answer.retry_after))
            wait_s = min(2 * wait_s, MAX_RETRY_S)

    def _expire_lines(self) -> Iterator[None]:
        """Write an error for each line without an answer, in short steps."""
        step = ShortStep()
        for line in self._unanswered():
            if line is None or step.is_over():
                yield
            if line is None:
                continue
            line_id = self._line_id(line)
            output = msgspec.json.encode(OutputLine(line_id, line.custom_id, None, EXPIRED))
            self._tools.num_lines["failed"] += self._log.append(line.custom_id, output, True)

    async def _finish(self, status: BatchStatus, errors: list[LineError] | None = None) -> None:
        """Make files of the output, and save the end of the batch.

        Args:
            status: how it ends unless it is being cancelled.
            errors: of the input file or of the server.
        """
        if self._batch.status is BatchStatus.CANCELLING:
            status = BatchStatus.CANCELLED
        self.ends_as = status
        await self._until_written(self._log.sync)
        self._log.close()
        self.update_counts()
        stored, batch = self._stored, copy.copy(self._batch)
        batch.output_file_id = await self._publish(stored.answers_id, "output")
        batch.error_file_id = await self._publish(stored.failures_id, "error")
        batch.errors = LineErrors(errors) if errors else None
        batch.enter(status)
        ended = msgspec.structs.replace(stored, batch=batch)
        await self._until_written(lambda: self._tools.save(ended))
        self._batch = stored.batch = batch  # shown only now: a crash cannot undo it
        counts = batch.request_counts
        logging.info("batch %s %s: %d of %d lines answered, %d failed", batch.id, status.value,
                     counts.completed, counts.total, counts.failed)  # fmt: skip

    async def _publish(self, file_id: str, kind: str) -> str | None:
        """Make a file of an output, and return its id; None for an empty one, which is removed."""
        path, files = self._tools.files.path(file_id), self._tools.files
        if not path.exists() or not path.stat().st_size:
            path.unlink(missing_ok=True)
            return None
        name = f"{self._batch.id}_{kind}.jsonl"
        owner = self._stored.owner
        file = await self._until_written(lambda: files.adopt(file_id, name, "batch_output", owner))
        return file.id

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tools.writers, work)

    async def _until_written(self, write: Callable[[], T]) -> T:
        """Return what `write` returns, tried again in a thread while the disk refuses it."""
        return await _retried(lambda: self._in_thread(write))

    async def _save(self) -> None:
        await self._until_written(lambda: self._tools.save(self._stored))


def _raise_first(tasks: "set[asyncio.Task[None]]") -> None:
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error


async def _retried(work: Callable[[], Awaitable[T]]) -> T:
    """Return what `work` returns, tried again while the disk refuses it."""
    has_logged = False
    while True:
        try:
            return await work()
        except OSError as error:
            if not has_logged:
                logging.error("a batch waits for its disk: %s; it tries again every %g s",
                              error, DISK_RETRY_S)  # fmt: skip
            has_logged = True
            await asyncio.sleep(DISK_RETRY_S)
