"""/v1/batches and /v1/files: the batches and files of one directory, jobs, and handlers.

One gateway owns the directory by a lock that ends with its process.
"""

import asyncio
import logging
import os
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from aiohttp import web

from http_proc.core.caller import current_caller
from http_proc.core.errors import RETRY_AFTER_S, ApiError, invalid
from http_proc.core.gateway import Gateway, Key
from http_proc.generation import sampling, schema
from http_proc.jobs.batch_job import ENDPOINTS, BatchJob, JobTools, LineGate
from http_proc.jobs.batch_lines import (
    BatchList,
    BatchObject,
    BatchStatus,
    CreateBatchRequest,
    StoredBatch,
)
from http_proc.jobs.files import (
    FORM,
    FileObject,
    FileStore,
    check_owner,
    disk_errors,
    new_file_id,
    receive_upload,
)
from http_proc.web.endpoint import Endpoint, listed, page, post
from http_proc.web.exchange import GATEWAY, json_response, read_object
from quadriga import disk
from quadriga.clock import now

WINDOW_S = 24 * 3600
# Ended batches beyond these are forgotten, the oldest first. Their files stay.
MAX_KEPT_BATCHES = 10_000
NUM_WRITERS = 2


class BatchService:
    """The batches of one gateway. It is closed, and refuses every call, until `open` succeeds.

    Attributes:
        files: the uploaded files and those that batches have written.
        num_lines: lines by outcome since the start.
    """

    def __init__(self, gateway: Gateway) -> None:
        args = gateway.args
        self._gateway = gateway
        self._directory: Path | None = gateway.data_dir
        self.files = FileStore(
            (self._directory or Path()) / "files",
            args.max_file_bytes,
            args.max_files_bytes,
            gateway.shares,
        )
        self.num_lines: Counter[str] = Counter()
        self._batches: dict[str, StoredBatch] = {}
        self._jobs: dict[str, BatchJob] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Batches have threads of their own, so that no other work waits for their files.
        self._readers = ThreadPoolExecutor(1, "batch-readers")
        self._writers = ThreadPoolExecutor(NUM_WRITERS, "batch-writers")
        self._saving = threading.RLock()
        self._lock_fd = -1
        self._opening = asyncio.Lock()
        self._is_stopped = False

    async def open(self) -> None:
        """Take the directory and go on with its batches, unless that is done.

        Raises:
            ApiError: there is no directory, or it cannot be used now.
        """
        async with self._opening:
            if self._is_stopped:
                raise _unavailable("the server is stopping")
            if self._lock_fd >= 0:
                return
            if self._directory is None:
                raise ApiError(
                    501,
                    "this server keeps no files and runs no batches: it was started with"
                    " --no-store",
                    code="no_data_dir",
                )
            try:
                self._lock_fd = disk.lock_directory(self._states)
                self._read()
            except BlockingIOError:
                raise _unavailable(f"another server uses {self._directory}") from None
            except OSError as error:
                self._unlock()
                raise _unavailable(f"{self._directory} cannot be used: {error}") from None
            self._start_jobs()

    async def stop(self) -> None:
        """End the jobs, which go on at the next start."""
        self._is_stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._readers.shutdown()
        self._writers.shutdown()  # a write that began ends before another server may begin
        async with self._opening:
            if self._lock_fd >= 0:
                self._unlock()

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self._lock_fd = -1

    def _read(self) -> None:
        """Read the states of all batches, and the files."""
        disk.make_directory(self._states)
        disk.remove_unfinished(self._states)
        for path in self._states.glob("batch_*.json"):
            try:
                stored = msgspec.json.decode(disk.read_bytes(path), type=StoredBatch)
            except msgspec.DecodeError as error:
                logging.error("%s is not the state of a batch and is ignored: %s", path, error)
                continue
            self._batches[stored.batch.id] = stored
        opened = [stored for stored in self._batches.values() if stored.batch.status.is_open]
        kept = {name for stored in opened for name in (stored.answers_id, stored.failures_id)}
        self.files.open(kept)

    def _start_jobs(self) -> None:
        self._tools = JobTools(
            self.files,
            self._gateway,
            {model: LineGate(self._gateway, model) for model in self._gateway.models},
            self._save,
            self._gateway.args.max_body_bytes,
            self.num_lines,
            self._readers,
            self._writers,
        )
        for stored in sorted(self._batches.values(), key=_age):
            if stored.batch.status.is_open:
                logging.info("batch %s goes on", stored.batch.id)
                self._start(stored)

    @property
    def _states(self) -> Path:
        assert self._directory is not None
        return self._directory / "batches"

    def _save(self, stored: StoredBatch) -> None:
        """Write a state. It is read under the lock: no older one is written after a newer one."""
        with self._saving:
            disk.replace(self._states / f"{stored.batch.id}.json", msgspec.json.encode(stored))

    def _start(self, stored: StoredBatch) -> None:
        job = self._jobs[stored.batch.id] = BatchJob(stored, self._tools)
        task = asyncio.create_task(job.run())
        self._tasks.add(task)

        def forget(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            del self._jobs[stored.batch.id]

        task.add_done_callback(forget)

    def create(self, call: CreateBatchRequest) -> BatchObject:
        """Start a batch. Raise ApiError if too many are open; OSError if it cannot be kept."""
        max_open, owner = self._gateway.args.max_open_batches, current_caller().file_owner
        opened = Counter(self._batches[name].owner for name in self._jobs)
        if not self._gateway.shares.has_room(owner, opened, max_open):
            raise ApiError(
                429,
                f"{len(self._jobs)} batches are open, {opened[owner]} of them yours, and this"
                f" server takes {max_open}, with a share for each tenant:"
                " wait until one has ended, or cancel one",
                code="too_many_batches",
                retry_after=RETRY_AFTER_S,
            )
        created_at, models = int(now()), self._gateway.models
        batch = BatchObject(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=call.endpoint,
            input_file_id=call.input_file_id,
            completion_window=call.completion_window,
            created_at=created_at,
            expires_at=created_at + WINDOW_S,
            model=models.default.name if len(models) == 1 else None,
            metadata=call.metadata,
        )
        caller = current_caller()
        stored = StoredBatch(
            batch=batch,
            answers_id=new_file_id(),
            failures_id=new_file_id(),
            owner=caller.file_owner,
            caller=caller.name,
            has_users=caller.has_users,
        )
        self._save(stored)
        self._batches[batch.id] = stored
        self._start(stored)
        self._forget_old()
        return batch

    def get(self, batch_id: str) -> BatchObject:
        """Return a batch with its current counts.

        Raises:
            ApiError: 404 for an unknown id, 403 for a batch of another tenant.
        """
        stored = self._batches.get(batch_id)
        if stored is None:
            raise ApiError(
                404, f"there is no batch {batch_id!r}", param="id", code="batch_not_found"
            )
        check_owner(stored.owner, f"batch {batch_id}")
        if (job := self._jobs.get(batch_id)) is not None:
            job.update_counts()
        return stored.batch

    def newest_first(self) -> list[BatchObject]:
        """Return the batches that the caller may use."""
        stored = [s for s in self._batches.values() if current_caller().may_use_files_of(s.owner)]
        return [self.get(s.batch.id) for s in sorted(stored, key=_age)[::-1]]

    def cancel(self, batch_id: str) -> BatchObject:
        """End a batch soon.

        Raises:
            ApiError: it ends already, or has ended.
            OSError: the state cannot be written; the batch goes on as before.
        """
        batch = self.get(batch_id)
        job = self._jobs.get(batch_id)
        if batch.status is BatchStatus.CANCELLING:
            return batch
        before = batch.status if job is None or job.ends_as is None else job.ends_as
        if job is None or before not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            raise ApiError(
                409,
                f"batch {batch_id} is {before.value}: it cannot be cancelled any more",
                param="id",
                code="batch_ended",
            )
        with self._saving:  # a save of the job's has the state before or after, none between
            batch.enter(BatchStatus.CANCELLING)
            try:
                self._save(self._batches[batch_id])
            except OSError:
                batch.status, batch.cancelling_at = before, None
                raise
        job.cancel()
        return batch

    def check_unused(self, file_id: str) -> None:
        """Raise a 409 for the input file of an open batch."""
        for stored in self._batches.values():
            if stored.batch.status.is_open and stored.batch.input_file_id == file_id:
                raise ApiError(
                    409,
                    f"file {file_id} is the input of batch {stored.batch.id}, which is"
                    f" {stored.batch.status.value}: cancel it first",
                    param="id",
                    code="file_in_use",
                )

    @property
    def num_open(self) -> int:
        """Number of batches that have not ended."""
        return len(self._jobs)

    def num_by_status(self) -> dict[str, int]:
        """Return the number of batches in each state."""
        counts = Counter(stored.batch.status for stored in self._batches.values())
        return {status.value: counts[status] for status in BatchStatus}

    def _forget_old(self) -> None:
        num_old = len(self._batches) - MAX_KEPT_BATCHES
        if num_old <= 0:
            return
        ended = [s for s in self._batches.values() if not s.batch.status.is_open]
        for stored in sorted(ended, key=_age)[:num_old]:
            (self._states / f"{stored.batch.id}.json").unlink(missing_ok=True)
            del self._batches[stored.batch.id]


BATCHES = Key[BatchService]("batches")


@asynccontextmanager
async def batch_lifetime(gateway: Gateway) -> AsyncIterator[None]:
    """Run the batches while the gateway runs."""
    service = gateway[BATCHES] = BatchService(gateway)
    if gateway.data_dir is not None:
        try:
            await service.open()
        except ApiError as error:
            logging.error("batches and files are not served: %s", error)
    yield
    await service.stop()


async def service_of(request: web.Request) -> BatchService:
    """Return the open service. Raise an ApiError that says why it is not open."""
    service = request.app[GATEWAY][BATCHES]
    await service.open()
    return service


def _age(stored: StoredBatch) -> tuple[int, str]:
    return stored.batch.created_at, stored.batch.id


def _unavailable(reason: str) -> ApiError:
    return ApiError(503, f"{reason}; try again", code="no_storage", retry_after=RETRY_AFTER_S)


async def create_batch(request: web.Request) -> web.Response:
    """Start a batch: its file is checked and run afterwards."""
    service = await service_of(request)
    call = sampling.convert(await read_object(request), CreateBatchRequest)
    if call.endpoint not in ENDPOINTS:
        names = ", ".join(ENDPOINTS)
        raise invalid(f"endpoint is {call.endpoint[:100]!r}: it must be one of {names}", "endpoint")
    schema.check_metadata(call.metadata)
    try:
        purpose = service.files.get(call.input_file_id).purpose
    except ApiError as error:
        error.answer.error.param = "input_file_id"
        raise
    if purpose != "batch":
        raise invalid(
            f"file {call.input_file_id} has the purpose {purpose!r}: upload it with 'batch'",
            "input_file_id",
        )
    with disk_errors():
        return json_response(service.create(call))


async def list_batches(request: web.Request) -> web.Response:
    """List the batches."""
    service = await service_of(request)
    return json_response(listed(BatchList, *page(request, service.newest_first(), 20, 100)))


async def get_batch(request: web.Request) -> web.Response:
    """Return a batch."""
    service = await service_of(request)
    return json_response(service.get(request.match_info["id"]))


async def cancel_batch(request: web.Request) -> web.Response:
    """End a batch; the lines that are answered stay in its output file."""
    service = await service_of(request)
    with disk_errors():
        return json_response(service.cancel(request.match_info["id"]))


BATCH_ENDPOINTS = [
    post("/v1/batches", create_batch, "Start a batch", CreateBatchRequest, BatchObject),
    Endpoint("/v1/batches", list_batches, "The batches", BatchList),
    Endpoint("/v1/batches/{id}", get_batch, "One batch", BatchObject),
    post("/v1/batches/{id}/cancel", cancel_batch, "End a batch", None, BatchObject),
]


BINARY = "application/octet-stream"
PIECE_BYTES = 256 * 1024


class FileUpload(msgspec.Struct):
    """The form of POST /v1/files. file: JSON lines; purpose: batch."""

    file: str
    purpose: str


class FileList(msgspec.Struct):
    """A page of files, the newest first."""

    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class DeletedFile(msgspec.Struct):
    """The file that was removed."""

    id: str
    deleted: bool = True
    object: str = "file"


async def create_file(request: web.Request) -> web.Response:
    """Store a file; it is on the disk when the answer is sent."""
    service = await service_of(request)
    with disk_errors():
        return json_response(await receive_upload(request, service.files))


async def list_files(request: web.Request) -> web.Response:
    """List the files."""
    service = await service_of(request)
    files, purpose = service.files.newest_first(), request.query.get("purpose")
    files = [file for file in files if purpose in (None, file.purpose)]
    return json_response(listed(FileList, *page(request, files, 10_000, 10_000)))


async def get_file(request: web.Request) -> web.Response:
    """Return the description of a file."""
    service = await service_of(request)
    return json_response(service.files.get(request.match_info["id"]))


async def file_content(request: web.Request) -> web.StreamResponse:
    """Send the content of a file, piece by piece."""
    service = await service_of(request)
    path = service.files.path(service.files.get(request.match_info["id"]).id)
    with disk_errors():
        content = await asyncio.to_thread(path.open, "rb")
    with content:
        response = web.StreamResponse(headers={"Content-Type": BINARY})
        response.content_length = os.fstat(content.fileno()).st_size
        await response.prepare(request)
        while piece := await asyncio.to_thread(content.read, PIECE_BYTES):
            await response.write(piece)
    await response.write_eof()
    return response


async def delete_file(request: web.Request) -> web.Response:
    """Remove a file."""
    service = await service_of(request)
    file = service.files.get(request.match_info["id"])
    service.check_unused(file.id)
    with disk_errors():
        service.files.delete(file.id)
    return json_response(DeletedFile(file.id))


FILE_ENDPOINTS = [
    post("/v1/files", create_file, "Store a file", FileUpload, FileObject, body_type=FORM),
    Endpoint("/v1/files", list_files, "The files", FileList),
    Endpoint("/v1/files/{id}", get_file, "One file", FileObject),
    Endpoint("/v1/files/{id}", delete_file, "Remove a file", DeletedFile, method="delete"),
    Endpoint("/v1/files/{id}/content", file_content, "The content of a file", BINARY),
]
