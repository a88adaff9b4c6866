"""A server on the machines of a Ray cluster, and streams of it."""

import asyncio
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from bench.client.server import free_port
from quadriga.client import AsyncClient, Client, Completion, SamplingParams
from tests.server import kill_tree, launch, stop, wait_until, wait_until_ready

STREAMS = 12
MODEL_FLAGS = ["--dtype", "float32", "--worker-threads", "1", "--max-total-tokens", "8192"]
# Enough that the streams of a fast machine still run when a replica is lost.
NEW_TOKENS = 230
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=5, max_new_tokens=NEW_TOKENS, ignore_eos=True)


def raylet_of(process: psutil.Process) -> int:
    """Return the process of Ray that stands for the machine of a process; 0: it is on none."""
    return next((one.pid for one in process.parents() if one.name() == "raylet"), 0)


async def run_streams(
    endpoint: str, started: asyncio.Event, curve_dir: Path | None = None, num_streams: int = STREAMS
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
    """A server whose replicas are on the machines of a cluster."""

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
def cluster_server(
    cluster: Any,
    model: Path,
    keys: Path,
    log: Path,
    more: list[str],
    environment: Mapping[str, str] | None = None,
) -> Iterator[ClusterServer]:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    flags = ["--model", str(model), *MODEL_FLAGS, "--load-balance-method", "least-loaded"]
    flags += ["--cluster", "ray", *more]
    environment = {**(environment or {}), "RAY_ADDRESS": cluster.address}
    process = launch(endpoint, *flags, "--curve-dir", str(keys), log=log, environment=environment)
    try:
        wait_until_ready(process, log)
        yield ClusterServer(process, endpoint, log, keys)
        stop(process)
    finally:
        kill_tree(process)
