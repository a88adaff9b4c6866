"""Replicas on three machines of a Ray cluster, one of which is lost and comes back."""

import asyncio
import itertools
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.client.server import free_port
from quadriga.client import AsyncClient, Client, Completion, SamplingParams
from tests.cluster.conftest import MACHINE
from tests.server import kill_tree, launch, running_server, stop, wait_until, wait_until_ready

pytestmark = pytest.mark.timeout(400)

STREAMS = 12
MODEL_FLAGS = ["--dtype", "float32", "--worker-threads", "1", "--max-total-tokens", "8192"]
GREEDY = SamplingParams(temperature=0, max_new_tokens=120, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=5, max_new_tokens=120, ignore_eos=True)


async def run_streams(
    endpoint: str,
    started: asyncio.Event,
    curve_dir: Path | None = None,
    num_streams: int = STREAMS,
) -> list[tuple[str, ...]]:
    """Run many streams; set `started` when each has its first tokens."""
    streaming = 0
    async with AsyncClient(endpoint, curve_dir=curve_dir) as client:

        async def run_stream(number: int) -> tuple[str, ...]:
            nonlocal streaming
            text = ""
            params = SEEDED if number % 4 == 0 else GREEDY
            async for chunk in client.stream([3 + number] * (5 + number), params):
                streaming += not text
                text += chunk.text or " "
                if streaming == num_streams:
                    started.set()
            completion = chunk.completion
            assert isinstance(completion, Completion)
            return completion.text, str(completion.token_ids), completion.finish_reason

        return list(await asyncio.gather(*(run_stream(number) for number in range(num_streams))))


class ClusterServer:
    """A server of three replicas."""

    def __init__(self, process: "subprocess.Popen[bytes]", endpoint: str, log: Path, keys: Path):
        self.process, self.endpoint, self.log, self.keys = process, endpoint, log, keys

    def info(self) -> dict[str, Any]:
        with Client(self.endpoint, curve_dir=str(self.keys)) as client:
            return dict(client.info())

    def num_serving(self) -> int:
        return len(self.info()["replicas"])

    def wait_for_replicas(self, count: int) -> None:
        wait_until(lambda: self.num_serving() == count, 120, self.log.read_text)

    def streams_while(self, disturb: Any) -> list[tuple[str, ...]]:
        """Run the streams, and disturb them once all have begun."""

        async def run() -> list[tuple[str, ...]]:
            started = asyncio.Event()
            task = asyncio.create_task(run_streams(self.endpoint, started, self.keys))
            await started.wait()
            await asyncio.to_thread(disturb)
            return await task

        return asyncio.run(run())


@contextmanager
def cluster_server(cluster: Any, model: Path, keys: Path, log: Path) -> Iterator[ClusterServer]:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    flags = ["--model", str(model), *MODEL_FLAGS, "--load-balance-method", "least-loaded"]
    flags += ["--cluster", "ray", "--ray-address", cluster.address, "--dp", "3"]
    process = launch(endpoint, *flags, "--curve-dir", str(keys), log=log)
    try:
        wait_until_ready(process, log)
        yield ClusterServer(process, endpoint, log, keys)
        stop(process)
    finally:
        kill_tree(process)


@pytest.fixture(scope="module")
def undisturbed(
    ray_cluster: Any,
    llama_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[tuple[str, ...]]:
    log = tmp_path_factory.mktemp("one") / "log"
    with running_server(log, "--model", str(llama_dir), *MODEL_FLAGS) as server:
        return asyncio.run(run_streams(server.endpoint, asyncio.Event()))


@pytest.fixture(scope="module")
def server(
    ray_cluster: Any, llama_dir: Path, key_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterServer]:
    log = tmp_path_factory.mktemp("cluster") / "log"
    with cluster_server(ray_cluster, llama_dir, key_dir, log) as server:
        yield server


def crews() -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "cluster_proc.crew" in (process.info["cmdline"] or [])
    ]


def test_streams_over_three_machines_are_those_of_one_server(
    server: ClusterServer, undisturbed: list[tuple[str, ...]]
) -> None:
    assert server.streams_while(lambda: None) == undisturbed
    assert [one["replica"] for one in server.info()["replicas"]] == [0, 1, 2]


def test_no_stream_is_lost_or_different_when_a_machine_is_lost_and_it_is_replaced(
    ray_cluster: Any, server: ClusterServer, undisturbed: list[tuple[str, ...]]
) -> None:
    machine = ray_cluster.worker_nodes.copy().pop()
    answers = server.streams_while(lambda: ray_cluster.remove_node(machine, allow_graceful=False))
    assert answers == undisturbed
    server.wait_for_replicas(2)
    assert server.info()["requests_moved"] > 0
    ray_cluster.add_node(**MACHINE)
    server.wait_for_replicas(3)
    assert server.streams_while(lambda: None) == undisturbed


def test_requests_wait_for_the_replicas_of_a_driver_that_was_killed(
    server: ClusterServer, undisturbed: list[tuple[str, ...]]
) -> None:
    def kill_driver() -> None:
        (driver,) = [
            child
            for child in psutil.Process(server.process.pid).children()
            if "cluster_proc" in child.cmdline()
        ]
        driver.kill()

    assert server.streams_while(kill_driver) == undisturbed
    server.wait_for_replicas(3)


def test_a_launcher_that_is_killed_leaves_nothing_on_any_machine(server: ClusterServer) -> None:
    pids = [*server.info()["pids"].values(), *crews()]
    run_dirs = {
        Path(argument).parent if "--replica" in line else Path(argument)
        for line in (psutil.Process(pid).cmdline() for pid in pids)
        for flag, argument in itertools.pairwise(line)
        if flag == "--run-dir"
    }
    assert len(run_dirs) == 4
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()

    def left() -> list[Any]:
        return [pid for pid in pids if psutil.pid_exists(pid)] + [d for d in run_dirs if d.exists()]

    wait_until(lambda: not left(), 20, lambda: f"left: {left()}")
