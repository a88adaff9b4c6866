"""The messages that wait for a worker process, and those that are being prepared."""

import asyncio
import logging
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quadriga.errors import QueueFull, RequestFailed
from quadriga.wire.messages.public import ErrorInfo, Refused
from quadriga.wire.sockets import encode
from tokenizer_proc.preparation.pool_worker import LENGTH, LONG_FRAME_BYTES, MAX_CPU_S, ForkServer
from tokenizer_proc.preparation.validation import peek

MAX_WAITING_BYTES = 256 * 1024 * 1024
"""Of all messages that wait or are being prepared."""
MAX_CLIENT_BYTES = MAX_WAITING_BYTES // 2
"""Of those of one client, so that no client keeps the others out."""
MAX_RUNNING_BYTES = 8 * 1024 * 1024
"""Of the messages that are being prepared at the same time, unless there is only one: their texts
take 200 times as much memory in the workers."""
MAX_ATTEMPTS = 2
"""A worker may die of something else than the message that it prepares."""
RETRY_AFTER_S = 1.0
EXIT_NO_FORK_SERVER = 1

Then = Callable[[bytes], None]
"""Takes an encoded Outcome (`prepare.py`)."""


@dataclass(slots=True, eq=False)
class PrepareJob:
    """A message on its way through the pool."""

    client: bytes
    frame: bytes
    then: Then


class PreparePool:
    """Prepare messages in up to `num_workers` processes; clients take turns, one message each.

    Memory is bounded here by MAX_WAITING_BYTES, and in the workers by MAX_RUNNING_BYTES and
    `prepare_worker.MAX_WORKER_BYTES`.
    """

    def __init__(self, fork_server: ForkServer, num_workers: int) -> None:
        self._fork_server = fork_server
        self._num_workers = num_workers
        self._waiting: OrderedDict[bytes, deque[PrepareJob]] = OrderedDict()
        self._running: dict[PrepareJob, asyncio.Task[None]] = {}
        self._idle: list[_Worker] = []
        self._bytes_of_client: dict[bytes, int] = {}
        self._num_bytes = 0

    def open(self) -> None:
        """Watch the fork server: without it this process cannot serve and has to be replaced."""
        asyncio.get_running_loop().add_reader(self._fork_server.socket, _exit)

    def submit(self, client: bytes, frame: bytes, then: Then) -> None:
        """Prepare a message and call `then` with its outcome, later and once.

        Raises:
            QueueFull: the messages of all clients, or of this one, take as much memory as they may.
        """
        self._check(client, len(frame))
        self._num_bytes += len(frame)
        self._bytes_of_client[client] = self._bytes_of_client.get(client, 0) + len(frame)
        self._waiting.setdefault(client, deque()).append(PrepareJob(client, frame, then))
        self._start_jobs()

    def drop(self, client: bytes) -> None:
        """Forget the messages of a client that wait; their `then` is not called."""
        for job in self._waiting.pop(client, ()):
            self._forget(job)

    def close(self) -> None:
        """Forget all messages and end the workers, whatever they are at."""
        asyncio.get_running_loop().remove_reader(self._fork_server.socket)
        self._waiting.clear()
        for task in self._running.values():
            task.cancel()
        for worker in self._idle:
            worker.close()
        self._fork_server.close()

    def _check(self, client: bytes, size: int) -> None:
        of_client = self._bytes_of_client.get(client, 0)
        for taken, limit, whose in (
            (self._num_bytes, MAX_WAITING_BYTES, ""),
            (of_client, MAX_CLIENT_BYTES, " of this client"),
        ):
            if taken + size > limit:
                raise QueueFull(
                    f"messages{whose} of {taken} bytes are being encoded, and at most {limit} may"
                    f" be: {size} more do not fit; try again in {RETRY_AFTER_S:g} s",
                    RETRY_AFTER_S,
                )

    def _forget(self, job: PrepareJob) -> None:
        size = len(job.frame)
        self._num_bytes -= size
        self._bytes_of_client[job.client] -= size
        if not self._bytes_of_client[job.client]:
            del self._bytes_of_client[job.client]

    # --- the workers ------------------------------------------------------------------------------

    def _start_jobs(self) -> None:
        for job in self._startable_jobs():
            self._running[job] = asyncio.get_running_loop().create_task(self._run(job))

    def _startable_jobs(self) -> Iterator[PrepareJob]:
        """Yield jobs, and take them off the queue, as long as workers and memory allow."""
        while self._waiting and len(self._running) < self._num_workers:
            client, jobs = next(iter(self._waiting.items()))
            running_bytes = sum(len(job.frame) for job in self._running)
            if running_bytes and running_bytes + len(jobs[0].frame) > MAX_RUNNING_BYTES:
                return
            job = jobs.popleft()
            self._waiting.move_to_end(client)
            if not jobs:
                del self._waiting[client]
            yield job

    async def _run(self, job: PrepareJob) -> None:
        outcome = await self._outcome(job)
        del self._running[job]
        self._forget(job)
        self._start_jobs()
        job.then(outcome)

    async def _outcome(self, job: PrepareJob) -> bytes:
        for _ in range(MAX_ATTEMPTS):
            worker = self._idle.pop() if self._idle else await _connect(self._fork_server)
            try:
                outcome = await worker.prepare(job.frame)
            except (OSError, EOFError):
                worker.close()
                continue
            except asyncio.CancelledError:
                worker.close()
                raise
            if len(job.frame) < LONG_FRAME_BYTES:
                self._idle.append(worker)
            else:
                worker.close()
            return outcome
        logging.error("%d processes that prepared one message died", MAX_ATTEMPTS)
        error = RequestFailed(
            f"the message of {len(job.frame)} bytes could not be prepared within {MAX_CPU_S:g} s"
            " and the memory of a process; shorten it, or send token ids"
        )
        return encode(Refused(peek(job.frame).request_id, ErrorInfo.of(error)))


@dataclass(slots=True, eq=False)
class _Worker:
    """The streams to and from a worker process."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def prepare(self, frame: bytes) -> bytes:
        """Return the outcome of a frame. Raises OSError or EOFError where the process has died."""
        self.writer.write(LENGTH.pack(len(frame)))
        self.writer.write(frame)
        await self.writer.drain()
        (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
        return await self.reader.readexactly(length)

    def close(self) -> None:
        """End the process, at the latest when it has prepared what it is at."""
        self.writer.transport.abort()


async def _connect(fork_server: ForkServer) -> _Worker:
    return _Worker(*await asyncio.open_unix_connection(sock=fork_server.fork_worker()))


def _exit() -> None:
    logging.error("the fork server of the tokenizer process has ended")
    os._exit(EXIT_NO_FORK_SERVER)
