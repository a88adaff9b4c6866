"""The pool for long messages: their order, its bounds, and the death of a worker."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from quadriga.errors import QueueFull
from quadriga.wire.client import Refused, Tokenize
from quadriga.wire.sockets import encode
from tokenizer_proc.intake import pool as module
from tokenizer_proc.intake.pool import LENGTH, LONG_FRAME_BYTES, MAX_ATTEMPTS, PreparePool


class ScriptedWorkers:
    """A fork server whose workers are the test: `received` has the frames that they were sent."""

    def __init__(self) -> None:
        self.socket, self._end = socket.socketpair()
        self._sockets: list[socket.socket] = []
        self.received: asyncio.Queue[tuple[bytes, asyncio.StreamWriter]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    def fork_worker(self) -> socket.socket:
        pool_end, worker_end = socket.socketpair()
        self._tasks.append(asyncio.get_running_loop().create_task(self._serve(worker_end)))
        return pool_end

    async def _serve(self, end: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=end)
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                self.received.put_nowait((await reader.readexactly(length), writer))
        except (EOFError, OSError):
            writer.close()

    @property
    def num_forked(self) -> int:
        return len(self._tasks)

    async def next_frame(self) -> tuple[bytes, asyncio.StreamWriter]:
        return await self.received.get()

    async def answer_next(self) -> bytes:
        """Answer the next frame by itself, and return it."""
        frame, writer = await self.next_frame()
        writer.write(LENGTH.pack(len(frame)) + frame)
        return frame

    async def kill_next(self) -> None:
        """End the worker that the next frame comes to."""
        _, writer = await self.next_frame()
        writer.transport.abort()

    def close(self) -> None:
        self.socket.close()
        self._end.close()
        for task in self._tasks:
            task.cancel()


@contextmanager
def scripted_pool(num_workers: int = 1) -> Iterator[tuple[PreparePool, ScriptedWorkers]]:
    workers = ScriptedWorkers()
    pool = PreparePool(workers, num_workers)  # type: ignore[arg-type]
    pool.open()
    yield pool, workers
    pool.close()
    workers.close()


def submit(pool: PreparePool, client: bytes, frame: bytes, outcomes: list[bytes]) -> None:
    """Submit a message; its outcome is appended to `outcomes`, in the order of completion."""
    outcome = pool.submit(client, frame)
    outcome.add_done_callback(lambda future: outcomes.append(future.result()))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)


async def test_clients_take_turns_and_a_worker_prepares_one_message_after_the_other() -> None:
    with scripted_pool() as (pool, workers):
        outcomes: list[bytes] = []
        for client, frame in ((b"a", b"a1"), (b"a", b"a2"), (b"a", b"a3"), (b"b", b"b1")):
            submit(pool, client, frame, outcomes)
        order = [await workers.answer_next() for _ in range(4)]
        await until(lambda: len(outcomes) == 4)
        assert order == outcomes == [b"a1", b"a2", b"b1", b"a3"]
        assert workers.num_forked == 1


async def test_a_worker_that_prepared_a_long_message_is_replaced() -> None:
    with scripted_pool() as (pool, workers):
        outcomes: list[bytes] = []
        for frame in (bytes(LONG_FRAME_BYTES), b"short"):
            submit(pool, b"a", frame, outcomes)
            await workers.answer_next()
        await until(lambda: len(outcomes) == 2)
        assert workers.num_forked == 2


async def test_long_messages_are_not_prepared_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_RUNNING_BYTES", 100)
    with scripted_pool(num_workers=3) as (pool, workers):
        outcomes: list[bytes] = []
        for client, size in ((b"a", 1000), (b"b", 60), (b"c", 40)):
            submit(pool, client, bytes(size), outcomes)
        _, writer = await workers.next_frame()
        await asyncio.sleep(0.05)
        assert workers.received.empty(), "beside a message over the bound there is none"
        writer.write(LENGTH.pack(0))
        assert sorted([len(await workers.answer_next()) for _ in range(2)]) == [40, 60]
        await until(lambda: len(outcomes) == 3)


async def test_messages_that_wait_are_bounded_in_bytes_for_all_and_for_each_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_PENDING_BYTES", 100)
    monkeypatch.setattr(module, "MAX_PENDING_BYTES_OF_CLIENT", 60)
    with scripted_pool() as (pool, workers):
        outcomes: list[bytes] = []
        submit(pool, b"a", bytes(60), outcomes)
        with pytest.raises(QueueFull, match="60 bytes of messages of this client are") as caught:
            submit(pool, b"a", bytes(1), outcomes)
        assert caught.value.retry_after == 1
        dropped = pool.submit(b"b", bytes(40))
        with pytest.raises(QueueFull, match="100 bytes of messages are being encoded"):
            submit(pool, b"c", bytes(1), outcomes)
        pool.drop(b"b")
        assert dropped.cancelled()
        submit(pool, b"c", bytes(40), outcomes)
        await workers.answer_next()
        await workers.answer_next()
        await until(lambda: len(outcomes) == 2)
        submit(pool, b"a", bytes(60), outcomes)


async def test_a_message_whose_worker_dies_is_prepared_once_more_and_then_refused_by_name() -> None:
    with scripted_pool() as (pool, workers):
        outcomes: list[bytes] = []
        frame = encode(Tokenize(1, "name", "text"))
        submit(pool, b"a", frame, outcomes)
        await workers.kill_next()
        assert await workers.answer_next() == frame
        await until(lambda: outcomes == [frame])
        submit(pool, b"a", frame, outcomes)
        for _ in range(MAX_ATTEMPTS):
            await workers.kill_next()
        await until(lambda: len(outcomes) == 2)
        refused = msgspec.msgpack.decode(outcomes[1], type=Refused)
        assert (refused.request_id, refused.error.code) == ("name", "failed")
        assert f"message of {len(frame)} bytes" in refused.error.message
        submit(pool, b"a", b"next", outcomes)
        assert await workers.answer_next() == b"next"
        await until(lambda: len(outcomes) == 3)
