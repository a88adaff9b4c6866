"""The queue of long messages, and the processes that prepare them."""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import struct
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from quadriga.errors import RequestFailed
from quadriga.server.processes import control_channel, logs
from quadriga.wire.client import Refused
from quadriga.wire.sockets import encode
from tokenizer_proc.intake.overload import check_room
from tokenizer_proc.preparation.validation import peek

# The processes that prepare long messages, so that no message holds up the event loop.
#
# The tokenizer process forks a fork server once, after the tokenizer is loaded and before it has
# threads or sockets. The fork server forks a worker on demand, in a few milliseconds, sharing the
# tokenizer's pages. A worker answers each frame with its outcome; before both go 4 bytes of
# length (big endian). It ends with its socket, and after a long frame, which returns the memory.

LENGTH = struct.Struct(">I")
# This is address space; the longest text (`encode.MAX_TEXT_BYTES`) takes half of it.
MAX_WORKER_BYTES = 4 << 30
# This holds for one frame; the longest text takes 4 s.
MAX_CPU_S = 60.0
# A worker that has prepared a frame of this size is replaced.
LONG_FRAME_BYTES = 256 * 1024

PrepareFrame = Callable[[bytes], bytes]


class ForkServer:
    """The tokenizer process's end of its fork server; made before the first thread or socket."""

    def __init__(self, prepare_frame: PrepareFrame) -> None:
        self.socket, child_end = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _run_forked(child_end, partial(_serve_forks, child_end, prepare_frame))
        child_end.close()

    def fork_worker(self) -> socket.socket:
        """Return the socket to a new worker. Raise OSError if the fork server is gone."""
        own_end, worker_end = socket.socketpair()
        with worker_end:
            socket.send_fds(self.socket, [b"w"], [worker_end.fileno()])
        return own_end

    def close(self) -> None:
        """End the fork server."""
        self.socket.close()


def _run_forked(keep: socket.socket, main: Callable[[], None]) -> None:
    """Run `main` and end the process. All files but `keep` and the standard ones are closed.

    A process at the other end of an inherited socket would not notice that its peer has died.
    """
    try:
        control_channel.signal_at_parents_death(signal.SIGKILL)
        os.closerange(3, keep.fileno())
        os.closerange(keep.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        main()
        os._exit(0)
    except BaseException:
        logs.log_exception()
        os._exit(1)


def _serve_forks(connection: socket.socket, prepare_frame: PrepareFrame) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers leave no zombies
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads cost memory, and one text needs none
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not data:
            return
        worker = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            _run_forked(worker, partial(_serve_frames, worker, prepare_frame))
        worker.close()


def _serve_frames(connection: socket.socket, prepare_frame: PrepareFrame) -> None:
    _limit_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    received = connection.makefile("rb")
    while (frame := _receive(received)) is not None:
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        outcome = prepare_frame(frame)
        connection.sendall(LENGTH.pack(len(outcome)))
        connection.sendall(outcome)
        if len(frame) >= LONG_FRAME_BYTES:
            return


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MAX_WORKER_BYTES if hard == resource.RLIM_INFINITY else min(MAX_WORKER_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _receive(received: BinaryIO) -> bytes | None:
    header = received.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    frame = received.read(length)
    return frame if len(frame) == length else None


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
