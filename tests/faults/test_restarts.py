"""A process that dies is restarted, and the streams continue unchanged."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quadriga.client import AsyncClient, Completion
from quadriga.errors import RequestFailed
from quadriga.server.processes.control_channel import EXIT_OK
from tests.faults.inject import fault_environment
from tests.faults.streams import GREEDY, run_streams, run_streams_with_a_kill, same
from tests.server import Server, running_server, settle, wait_until

POISON = 499  # a token with which no other request begins


@pytest.fixture(scope="module")
def own_server(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1"]
    flags += ["--max-total-tokens", "8192", "--max-restarts", "100", "--watchdog-timeout", "3"]
    with running_server(tmp_path_factory.mktemp("restarts") / "log", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(own_server: Server) -> list[Completion]:
    return asyncio.run(run_streams(own_server.endpoint, asyncio.Event()))


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("worker_proc", signal.SIGKILL),
        ("worker_proc", signal.SIGSEGV),
        ("detok_proc", signal.SIGKILL),
        ("tokenizer_proc", signal.SIGKILL),
        ("scheduler_proc", signal.SIGKILL),
    ],
)
def test_streams_are_the_same_as_undisturbed_when_a_process_dies(
    own_server: Server, undisturbed: list[Completion], name: str, number: signal.Signals
) -> None:
    before = own_server.pid_of(name)
    assert same(asyncio.run(run_streams_with_a_kill(own_server, name, number)), undisturbed)
    assert own_server.pid_of(name) not in (0, before)
    assert settle(own_server.endpoint)["pages_held"] == 0
    assert f"{name} died (killed by {number.name})" in own_server.log.read_text()


@pytest.mark.parametrize("name", ["worker_proc", "detok_proc", "tokenizer_proc", "scheduler_proc"])
def test_a_process_that_hangs_is_found_its_stacks_are_written_down_and_it_is_replaced(
    own_server: Server, undisturbed: list[Completion], name: str
) -> None:
    written = own_server.log.read_text().count("most recent call first")
    assert same(asyncio.run(run_streams_with_a_kill(own_server, name, signal.SIGSTOP)), undisturbed)
    wait_until(lambda: f"{name} died (hung: " in own_server.log.read_text(), 10)
    assert own_server.log.read_text().count("most recent call first") > written
    wait_until(lambda: own_server.pid_of(name), 10)


def test_a_reload_takes_the_weights_anew_and_no_stream_notices(
    own_server: Server, undisturbed: list[Completion]
) -> None:
    before = own_server.pid_of("worker_proc")

    async def run_streams_with_a_reload() -> list[Completion]:
        started = asyncio.Event()
        task = asyncio.create_task(run_streams(own_server.endpoint, started))
        await started.wait()
        own_server.process.send_signal(signal.SIGHUP)
        return await task

    assert same(asyncio.run(run_streams_with_a_reload()), undisturbed)
    wait_until(lambda: own_server.pid_of("worker_proc") not in (0, before), 10)
    said = own_server.log.read_text().rpartition("reloading: ")[2]
    assert "worker_proc is replaced for the reload; requests go on with the new weights" in said
    assert "died" not in said and "SIGKILL" not in said


@pytest.mark.parametrize("names", [("worker_proc", "detok_proc"), ("tokenizer_proc",)])
def test_a_death_while_the_server_stops_costs_no_stream_its_end(
    llama_dir: Path, undisturbed: list[Completion], tmp_path: Path, names: tuple[str, ...]
) -> None:
    flags = ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1"]
    with running_server(tmp_path / "log", *flags, "--max-total-tokens", "8192") as server:

        async def stop_and_kill() -> list[Completion]:
            started = asyncio.Event()
            task = asyncio.create_task(run_streams(server.endpoint, started))
            await started.wait()
            server.process.send_signal(signal.SIGTERM)
            for name in names:
                os.kill(server.pid_of(name), signal.SIGKILL)
            return await task

        assert same(asyncio.run(stop_and_kill()), undisturbed)
        assert server.process.wait(20) == EXIT_OK


def test_a_detokenizer_that_dies_as_the_server_stops_delays_nothing(
    llama_dir: Path, tmp_path: Path
) -> None:
    flags = ["--model", str(llama_dir), "--dtype", "float32", "--max-total-tokens", "8192"]
    with running_server(tmp_path / "log", *flags) as server:
        os.kill(server.pid_of("detok_proc"), signal.SIGKILL)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == EXIT_OK


def test_a_poisonous_request_fails_by_name_and_the_others_finish(
    llama_dir: Path, undisturbed: list[Completion], tmp_path: Path
) -> None:
    flags = ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1"]
    flags += ["--max-total-tokens", "8192"]
    environment = fault_environment(f"segv:worker:token={POISON}")

    async def poisoned(endpoint: str) -> list[Completion]:
        async with AsyncClient(endpoint) as client:
            started = asyncio.Event()
            task = asyncio.create_task(run_streams(endpoint, started))
            await started.wait()
            with pytest.raises(RequestFailed, match="the worker died 3 times in a row"):
                await client.generate([POISON], GREEDY)
            return await task

    with running_server(tmp_path / "log", *flags, environment=environment) as server:
        assert same(asyncio.run(poisoned(server.endpoint)), undisturbed)
        assert server.log.read_text().count("worker_proc died") == 3
