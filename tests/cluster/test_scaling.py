"""Replicas are added under a load, and leave after it, on the machines of a Ray cluster."""

import asyncio
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.client.server import free_port
from tests.cluster.cluster_server import MODEL_FLAGS, STREAMS, ClusterServer, run_streams
from tests.server import kill_tree, launch, running_server, stop, wait_until, wait_until_ready

pytestmark = pytest.mark.timeout(300)

# Twelve streams are more than one replica is for, and not more than two are; one has room for four.
FEW_STREAMS = 4
SCALING_FLAGS = ["--min-replicas", "1", "--max-replicas", "2", "--target-ongoing-requests", "6"]
SCALING_FLAGS += ["--scale-down-after", "3"]


class Rounds(NamedTuple):
    """Rounds of streams, and the seconds until the number of replicas was the wanted one."""

    answers: list[list[tuple[str, ...]]]
    seconds: float


async def streams_until(server: ClusterServer, num_replicas: int, num_streams: int) -> Rounds:
    """Run streams again and again until the server has that many replicas, and once more."""
    began_at, answers, is_there = time.monotonic(), [], False
    while not is_there:
        is_there = await asyncio.to_thread(server.num_serving) == num_replicas
        started = asyncio.Event()
        answers.append(await run_streams(server.endpoint, started, server.keys, num_streams))
    return Rounds(answers, time.monotonic() - began_at)


def test_a_replica_comes_under_a_load_and_leaves_and_no_stream_is_lost_or_different(
    ray_cluster: Any, llama_dir: Path, key_dir: Path, tmp_path: Path
) -> None:
    with running_server(tmp_path / "one", "--model", str(llama_dir), *MODEL_FLAGS) as one:
        undisturbed = asyncio.run(run_streams(one.endpoint, asyncio.Event()))
    endpoint, log = f"tcp://127.0.0.1:{free_port()}", tmp_path / "log"
    flags = ["--model", str(llama_dir), *MODEL_FLAGS, *SCALING_FLAGS, "--curve-dir", str(key_dir)]
    flags += ["--cluster", "ray"]
    process = launch(endpoint, *flags, log=log, environment={"RAY_ADDRESS": ray_cluster.address})
    try:
        wait_until_ready(process, log)
        server = ClusterServer(process, endpoint, log, key_dir)
        assert server.num_serving() == 1
        up = asyncio.run(streams_until(server, 2, STREAMS))
        down = asyncio.run(streams_until(server, 1, FEW_STREAMS))
        print(
            f"1 -> 2 replicas under {STREAMS} streams: {up.seconds:.1f} s; 2 -> 1 under"
            f" {FEW_STREAMS}: {down.seconds:.1f} s, {server.info()['requests_moved']} moved"
        )
        assert up.answers == [undisturbed] * len(up.answers)
        assert down.answers == [undisturbed[:FEW_STREAMS]] * len(down.answers)
        wait_until(lambda: "replica 1 has left" in log.read_text(), 20, log.read_text)
        assert "is lost" not in log.read_text()
        stop(process)
    finally:
        kill_tree(process)
