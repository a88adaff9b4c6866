"""Set the wall clock, suspend the whole server, kill the launcher: no request is lost."""

import asyncio
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from quadriga.client import AsyncClient, Client, Completion, SamplingParams, StreamChunk
from quadriga.clock import now
from tests.faults.inject import fault_environment
from tests.server import Server, is_alive, running_server, wait_until

LIBRARY = Path(__file__).with_name("wall_clock.c")
STREAMS = 8
WATCHDOG_TIMEOUT_S = 2
SUSPENSION_S = 4.0
HOUR = 3600


class WallClock:
    """The wall clock of a server, which a test may set.

    Attributes:
        environment: Variables for the start of the server.
    """

    def __init__(self, directory: Path) -> None:
        self._shift = directory / "shift"
        library = directory / "wall_clock.so"
        self.environment = {"LD_PRELOAD": str(library), "WALL_CLOCK_SHIFT": str(self._shift)}
        command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(LIBRARY), "-ldl"]
        subprocess.run(command, check=True, timeout=60)
        self._shift.write_bytes(struct.pack("q", 0))

    def set(self, seconds: int) -> None:
        """Set the clock `seconds` ahead of the true one."""
        with self._shift.open("r+b") as file:
            file.write(struct.pack("q", seconds))

    def read(self) -> float:
        """Return the time that a process of the server reads."""
        command = [sys.executable, "-c", "import time; print(time.time())"]
        environment = {**os.environ, **self.environment}
        return float(subprocess.run(command, env=environment, capture_output=True).stdout)


@pytest.fixture(scope="module")
def wall_clock(tmp_path_factory: pytest.TempPathFactory) -> WallClock | None:
    """Return None without a C compiler or LD_PRELOAD."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        return None
    return WallClock(tmp_path_factory.mktemp("wall-clock"))


@pytest.fixture(scope="module")
def own_server(
    llama_dir: Path, tmp_path_factory: pytest.TempPathFactory, wall_clock: WallClock | None
) -> Iterator[Server]:
    """Start a server whose steps are slow, so that much happens during each."""
    flags = ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1"]
    flags += ["--max-total-tokens", "8192", "--watchdog-timeout", str(WATCHDOG_TIMEOUT_S)]
    flags += ["--log-stats-interval", "0"]
    environment = fault_environment("delay:worker:ms=10")
    if wall_clock is not None:
        environment |= wall_clock.environment
    log = tmp_path_factory.mktemp("clock") / "log"
    with running_server(log, *flags, environment=environment) as server:
        yield server


async def run_streams(endpoint: str, started: asyncio.Event) -> list[Completion]:
    """Run streams with a deadline, greedy and seeded; set `started` when each has a token."""
    waited_for = STREAMS
    async with AsyncClient(endpoint) as client:

        async def run_stream(number: int) -> Completion:
            nonlocal waited_for
            params = SamplingParams(
                temperature=number % 2, seed=number, max_new_tokens=100, ignore_eos=True
            )
            chunks: list[StreamChunk] = []
            async for chunk in client.stream([3 + number] * 9, params, timeout=60.0):
                waited_for -= not chunks
                chunks.append(chunk)
                if waited_for == 0:
                    started.set()
            assert chunks[-1].completion is not None
            return chunks[-1].completion

        return list(await asyncio.gather(*(run_stream(number) for number in range(STREAMS))))


def ids_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def pids_of(server: Server) -> dict[str, int]:
    return {name: server.pid_of(name) for name in server.pids if name != "launcher"}


async def streams_while_the_clock_is_set(
    server: Server, wall_clock: WallClock, shift: int
) -> list[Completion]:
    """Send requests all the time, so that the scheduler reads its clock within each step."""
    started = asyncio.Event()
    streams = asyncio.create_task(run_streams(server.endpoint, started))
    await started.wait()
    async with AsyncClient(server.endpoint) as client:
        for number in range(20):
            if number == 10:
                wall_clock.set(shift)
            params = SamplingParams(max_new_tokens=1)
            await client.generate([9, number], params, timeout=30.0)
    return await streams


def check_order(completion: Completion) -> None:
    timings = completion.timings
    stamps = [timings.submitted, timings.received, timings.tokenized, timings.admitted]
    stamps += [*timings.token_times, timings.detokenized, timings.delivered]
    assert stamps == sorted(stamps)


def test_a_wall_clock_that_is_set_ends_no_request_and_no_process(
    own_server: Server, wall_clock: WallClock | None
) -> None:
    if wall_clock is None:
        pytest.skip("needs Linux and a C compiler called cc")
    undisturbed = ids_of(asyncio.run(run_streams(own_server.endpoint, asyncio.Event())))
    before = pids_of(own_server)
    for shift in (2 * HOUR, -3 * HOUR):
        completions = asyncio.run(streams_while_the_clock_is_set(own_server, wall_clock, shift))
        assert abs(wall_clock.read() - now() - shift) < HOUR, "the clock was not set"
        assert ids_of(completions) == undisturbed
        for completion in completions:
            check_order(completion)
    assert pids_of(own_server) == before


def test_a_wall_clock_that_goes_back_again_and_again_holds_up_no_request(
    own_server: Server, wall_clock: WallClock | None
) -> None:
    if wall_clock is None:
        pytest.skip("needs Linux and a C compiler called cc")

    async def generate_and_set() -> None:
        """Set the clock within the batch delay of two milliseconds of an idle scheduler."""
        async with AsyncClient(own_server.endpoint) as client:
            for number in range(24):
                handle = client.submit([7, number], SamplingParams(max_new_tokens=1), timeout=20.0)
                await asyncio.sleep(0.0005 * (number % 8))
                wall_clock.set(-HOUR * (4 + number))
                await handle.completion()

    asyncio.run(generate_and_set())


def test_a_process_that_takes_anothers_place_reads_the_same_clock(
    own_server: Server, wall_clock: WallClock | None
) -> None:
    if wall_clock is None:
        pytest.skip("needs Linux and a C compiler called cc")
    wall_clock.set(5 * HOUR)
    for name in ("tokenizer_proc", "worker_proc"):
        before = own_server.pid_of(name)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: own_server.pid_of(name) not in (0, before), 20)  # noqa: B023
    with Client(own_server.endpoint, connect_timeout=30.0) as client:
        client.generate([5, 6, 7], SamplingParams(max_new_tokens=3), timeout=30.0)
        stages = client.info()["stage_seconds"]
    assert all(0 <= stages[stage]["sum"] < HOUR for stage in stages)


def test_a_server_that_was_suspended_goes_on_with_the_same_processes(own_server: Server) -> None:
    async def streams_with_a_suspension() -> list[Completion]:
        started = asyncio.Event()
        streams = asyncio.create_task(run_streams(own_server.endpoint, started))
        await started.wait()
        pids = [own_server.process.pid, *before.values()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(SUSPENSION_S)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.1)  # the launcher continues first, and asks
        return await streams

    undisturbed = ids_of(asyncio.run(run_streams(own_server.endpoint, asyncio.Event())))
    before, log = pids_of(own_server), own_server.log.read_text()
    assert ids_of(asyncio.run(streams_with_a_suspension())) == undisturbed
    assert pids_of(own_server) == before
    assert own_server.log.read_text() == log, "nothing to say of it"


@contextmanager
def stopped(processes: list[psutil.Process]) -> Iterator[None]:
    """Stop processes, and kill the remaining ones on leaving."""
    try:
        for process in processes:
            process.suspend()
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.timeout(90)
def test_a_launcher_that_is_killed_leaves_no_process_behind_though_all_are_stopped(
    llama_dir: Path, tmp_path: Path
) -> None:
    flags = ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1"]
    flags += ["--device", "cpu", "--tp", "2", "--max-total-tokens", "1024"]
    with running_server(tmp_path / "log", *flags) as server:
        with Client(server.endpoint) as client:
            client.generate([5, 6], SamplingParams(max_new_tokens=4, regex="[ab]{2}"))
        processes = psutil.Process(server.process.pid).children(recursive=True)
        commands = " ".join(word for process in processes for word in process.cmdline())
        assert "worker_proc.tp_rank" in commands
        assert "tokenizer_proc.intake.grammar_sandbox" in commands
        with stopped(processes):
            server.process.kill()
            wait_until(lambda: not any(is_alive(process.pid) for process in processes), 3)
            server.wait_for_nothing_left(1)


def test_a_launcher_that_crashes_leaves_no_stopped_worker_behind(
    llama_dir: Path, tmp_path: Path
) -> None:
    flags = ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1"]
    with (
        running_server(tmp_path / "log", *flags, "--max-total-tokens", "1024") as server,
        stopped([psutil.Process(server.pids["worker_proc"])]),
    ):
        server.process.send_signal(signal.SIGSEGV)
        server.wait_for_nothing_left(3)
