"""An event loop in a thread: what is waited for comes, or the wait ends; whenever Ctrl-C is hit."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from queue import SimpleQueue

import pytest

from quadriga.client.sync_client import LoopThread
from quadriga.errors import RequestAborted, RequestFailed

FOREVER = 3600.0
INTERRUPTS = 300

INTERRUPTED = f"""
import asyncio, random, signal, time
from quadriga.client.sync_client import LoopThread

async def count():
    number = 0
    while True:
        yield number
        number += 1
        await asyncio.sleep(0)

async def answer():
    return 42

async def nothing():
    pass

def work(times):
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0005, 0.005))
    if times % 2:
        for expected, number in enumerate(loop.iterate(count())):
            assert number == expected
    while True:
        assert loop.run(answer) == 42

loop = LoopThread("looping")
signal.signal(signal.SIGALRM, signal.default_int_handler)
for times in range({INTERRUPTS}):
    try:
        work(times)
    except KeyboardInterrupt:
        pass
assert loop.run(answer) == 42
deadline = time.monotonic() + 10

async def how_many():
    return len(asyncio.all_tasks())

while loop.run(how_many) > 1 and time.monotonic() < deadline:
    time.sleep(0.01)
print(loop.run(how_many), "left")
loop.end(nothing)
print("ended")
"""


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("test")
    yield loop
    loop.end(nothing)


async def count(to: int, ended: SimpleQueue[str] | None = None) -> AsyncIterator[int]:
    try:
        for number in range(to):
            yield number
            await asyncio.sleep(0)
        raise ValueError("that was the last")
    finally:
        if ended is not None:
            ended.put("ended")


async def nothing() -> None: ...


async def add(one: int, two: int) -> int:
    await asyncio.sleep(0)
    return one + two


def test_results_and_errors_come_back(loop: LoopThread) -> None:
    assert loop.run(lambda: add(1, 2)) == 3
    numbers: list[int] = []
    with pytest.raises(ValueError, match="that was the last"):
        numbers.extend(loop.iterate(count(100)))
    assert numbers == list(range(100))


def test_closing_an_iterator_early_ends_its_coroutine(loop: LoopThread) -> None:
    ended: SimpleQueue[str] = SimpleQueue()
    numbers = loop.iterate(count(1 << 40, ended))
    assert next(numbers) == 0
    numbers.close()  # type: ignore[attr-defined]
    assert ended.get(timeout=10) == "ended"
    assert loop.run(lambda: add(1, 2)) == 3


@pytest.mark.timeout(30)
def test_a_wait_ends_with_the_loop() -> None:
    loop = LoopThread("test")
    outcomes: SimpleQueue[object] = SimpleQueue()
    waiting = threading.Event()

    async def wait() -> None:
        waiting.set()
        await asyncio.sleep(FOREVER)

    def ask() -> None:
        try:
            loop.run(wait)
        except RequestAborted as error:
            outcomes.put(str(error))

    threading.Thread(target=ask, daemon=True).start()
    assert waiting.wait(10)
    loop.end(nothing)
    assert outcomes.get(timeout=10) == "the client was closed"
    with pytest.raises(RequestAborted, match="the client was closed"):
        loop.run(lambda: add(1, 2))
    with pytest.raises(RequestAborted, match="the client was closed"):
        next(loop.iterate(count(3)))
    loop.end(nothing)


@pytest.mark.timeout(30)
def test_threads_that_end_a_loop_at_the_same_time_all_return() -> None:
    for _ in range(20):
        loop = LoopThread("test")
        outcomes: SimpleQueue[object] = SimpleQueue()

        def end(loop: LoopThread = loop, outcomes: SimpleQueue[object] = outcomes) -> None:
            try:
                loop.end(nothing)
                outcomes.put("ended")
            except BaseException as error:
                outcomes.put(error)

        for _ in range(4):
            threading.Thread(target=end, daemon=True).start()
        assert [outcomes.get(timeout=10) for _ in range(4)] == ["ended"] * 4


@pytest.mark.timeout(30)
def test_a_forked_process_gets_an_error_instead_of_waiting(loop: LoopThread) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            loop.end(nothing)
            loop.run(lambda: add(1, 2))
        except RequestFailed as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as said:
        assert "made before this process was forked" in said.read()
    os.waitpid(child, 0)
    assert loop.run(lambda: add(1, 2)) == 3


def test_ctrl_c_at_any_moment_stops_neither_the_loop_nor_the_program() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 left\nended\n", "")
