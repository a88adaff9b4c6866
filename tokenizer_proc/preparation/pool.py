"""The queue of long messages, and the processes of `pool_worker.py` that prepare them."""

import asyncio
import logging
import os
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from quadriga.errors import RequestFailed
from quadriga.wire.messages.to_client import Refused
from quadriga.wire.sockets import encode
from tokenizer_proc.overload import check_room
from tokenizer_proc.preparation.pool_worker import LENGTH, LONG_FRAME_BYTES, MAX_CPU_S, ForkServer
from tokenizer_proc.preparation.validation import peek

# Messages that wait or are being prepared count here. One client takes at most half of the bytes,
# so that none keeps the others out.
MAX_PENDING_BYTES = 256 * 1024 * 1024
MAX_PENDING_BYTES_OF_CLIENT = MAX_PENDING_BYTES // 2
# Messages that are prepared at the same time, unless there is only one: their texts take 200 times
# as much memory in the workers.
MAX_RUNNING_BYTES = 8 * 1024 * 1024
# A worker may die of something else than the message that it prepares.
MAX_ATTEMPTS = 2
EXIT_NO_FORK_SERVER = 1


@dataclass(slots=True, eq=False)
class PrepareJob:
    """A message on its way through the pool, and the future of its encoded Outcome."""

    client: bytes
    frame: bytes
    outcome: "asyncio.Future[bytes]"


class PreparePool:
    """Prepare messages in up to `num_workers` processes; clients take turns, one message each.

    Memory is bounded here by MAX_PENDING_BYTES, and in the workers by MAX_RUNNING_BYTES and
    `pool_worker.MAX_WORKER_BYTES`.
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

    def submit(self, client: bytes, frame: bytes) -> "asyncio.Future[bytes]":
        """Queue a message and return the future of its encoded Outcome (`prepare.py`).

        The future is cancelled if the message is dropped.

        Raises:
            QueueFull: the messages of all clients, or of this one, take as much memory as they may.
        """
        self._check_memory(client, len(frame))
        self._num_bytes += len(frame)
        self._bytes_of_client[client] = self._bytes_of_client.get(client, 0) + len(frame)
        job = PrepareJob(client, frame, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(client, deque()).append(job)
        self._start_jobs()
        return job.outcome

    def drop(self, client: bytes) -> None:
        """Drop the waiting messages of a client. The ones in a worker are finished."""
        for job in self._waiting.pop(client, ()):
            job.outcome.cancel()
            self._forget(job)

    def close(self) -> None:
        """Drop all messages and end the workers, even in the middle of a message."""
        asyncio.get_running_loop().remove_reader(self._fork_server.socket)
        self._waiting.clear()
        for task in self._running.values():
            task.cancel()
        for worker in self._idle:
            worker.close()
        self._fork_server.close()

    def _check_memory(self, client: bytes, num_bytes: int) -> None:
        num_bytes_of_client = self._bytes_of_client.get(client, 0)
        for taken, limit, whose in (
            (self._num_bytes, MAX_PENDING_BYTES, ""),
            (num_bytes_of_client, MAX_PENDING_BYTES_OF_CLIENT, " of this client"),
        ):
            what = f"bytes of messages{whose} are being encoded"
            check_room(taken, limit, what, num_bytes)

    def _forget(self, job: PrepareJob) -> None:
        self._num_bytes -= len(job.frame)
        self._bytes_of_client[job.client] -= len(job.frame)
        if not self._bytes_of_client[job.client]:
            del self._bytes_of_client[job.client]

    # --- the workers ------------------------------------------------------------------------------

    def _start_jobs(self) -> None:
        for job in self._startable_jobs():
            self._running[job] = asyncio.get_running_loop().create_task(self._run(job))

    def _startable_jobs(self) -> Iterator[PrepareJob]:
        """Take jobs off the queue and yield them, as long as workers and memory allow."""
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
        outcome = await self._prepare(job)
        del self._running[job]
        self._forget(job)
        self._start_jobs()
        if not job.outcome.done():
            job.outcome.set_result(outcome)

    async def _prepare(self, job: PrepareJob) -> bytes:
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
        return encode(Refused.of(peek(job.frame).request_id, error))


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker process, at the other end of a pair of streams."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def prepare(self, frame: bytes) -> bytes:
        """Return the outcome of a frame. Raise OSError or EOFError if the process died."""
        self.writer.write(LENGTH.pack(len(frame)))
        self.writer.write(frame)
        await self.writer.drain()
        (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
        return await self.reader.readexactly(length)

    def close(self) -> None:
        """End the process, at the latest after the message that it is preparing."""
        self.writer.transport.abort()


async def _connect(fork_server: ForkServer) -> _Worker:
    return _Worker(*await asyncio.open_unix_connection(sock=fork_server.fork_worker()))


def _exit() -> None:
    logging.error("the fork server of the tokenizer process has ended")
    os._exit(EXIT_NO_FORK_SERVER)
