"""A replica whose ranks are on two machines of a Ray cluster: equal tokens, and nothing is lost."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.cluster_server import ClusterServer, cluster_server, raylet_of
from tests.cluster.conftest import MACHINE
from tests.server import is_alive, wait_until

pytestmark = pytest.mark.timeout(400)

RANK, WORKER = "worker_proc.tp_rank", "worker_proc"


@pytest.fixture(scope="module")
def server(
    ray_cluster: Any, llama_dir: Path, key_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterServer]:
    log = tmp_path_factory.mktemp("ranks") / "log"
    flags = ["--dp", "1", "--tp", "2", "--nnodes", "2"]
    with cluster_server(ray_cluster, llama_dir, key_dir, log, flags) as server:
        yield server


def find_all(program: str) -> list[psutil.Process]:
    """Return the processes of the cluster that run a program."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [])[2:3] == [program] and raylet_of(process)
    ]


def find(program: str) -> psutil.Process:
    """Return the one process of the cluster that runs a program."""
    (found,) = find_all(program)
    return found


def removable_machine(cluster: Any) -> Any:
    """Return a machine of the replica that is not the head of the cluster."""
    raylets = {raylet_of(find(program)) for program in (RANK, WORKER)}
    return next(
        node
        for node in cluster.worker_nodes
        if raylets & {info.process.pid for info in node.all_processes["raylet"]}
    )


def restarts_after(end: Callable[[], None], server: ClusterServer) -> None:
    """End something, and wait until both ranks are others."""
    before = {find(RANK).pid, find(WORKER).pid}
    end()
    wait_until(lambda: not any(map(is_alive, before)), 30, server.log.read_text)


def test_ranks_on_two_machines_give_the_tokens_of_one_process(
    server: ClusterServer, undisturbed: list[tuple[str, ...]]
) -> None:
    assert server.streams_while(lambda: None) == undisturbed
    assert raylet_of(find(RANK)) != raylet_of(find(WORKER))


@pytest.mark.parametrize("program", [RANK, WORKER])
def test_no_stream_is_lost_or_different_when_a_rank_is_killed(
    program: str, server: ClusterServer, undisturbed: list[tuple[str, ...]]
) -> None:
    def kill() -> None:
        restarts_after(lambda: os.kill(find(program).pid, signal.SIGKILL), server)

    assert server.streams_while(kill) == undisturbed
    assert "is lost" not in server.log.read_text()


def test_no_stream_is_lost_or_different_when_a_machine_of_the_replica_is_lost(
    ray_cluster: Any, server: ClusterServer, undisturbed: list[tuple[str, ...]]
) -> None:
    machine = removable_machine(ray_cluster)

    def remove() -> None:
        restarts_after(lambda: ray_cluster.remove_node(machine, allow_graceful=False), server)

    try:
        assert server.streams_while(remove) == undisturbed
    finally:
        ray_cluster.add_node(**MACHINE)
    assert "replica 0 has joined again" in server.log.read_text()
    assert raylet_of(find(RANK)) != raylet_of(find(WORKER))


def test_a_launcher_that_is_killed_leaves_no_rank_on_any_machine(server: ClusterServer) -> None:
    crews = find_all("cluster_proc.crew")
    assert len(crews) == 2, "a crew, and a rank crew"
    pids = [process.pid for process in (find(RANK), find(WORKER), *crews)]
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    wait_until(lambda: not any(map(is_alive, pids)), 20, lambda: f"left: {pids}")
