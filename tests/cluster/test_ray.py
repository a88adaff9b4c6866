"""Replicas on three machines of a Ray cluster, one of which is lost and comes back."""

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.cluster_server import ClusterServer, cluster_server
from tests.cluster.conftest import MACHINE
from tests.server import wait_until

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def server(
    ray_cluster: Any, llama_dir: Path, key_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterServer]:
    log = tmp_path_factory.mktemp("cluster") / "log"
    with cluster_server(ray_cluster, llama_dir, key_dir, log, ["--dp", "3"]) as server:
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
