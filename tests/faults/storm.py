"""Abort requests at random moments and kill clients in mid-stream: afterwards nothing is left.

python -m tests.faults.storm --requests 10000 --clients 200
"""

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quadriga.client import AsyncClient, Client, SamplingParams
from tests.server import ROOT, running_server, settle, wait_until
from tests.tiny_models import tiny_llama

CLIENTS_PER_HOST = 25
LONG = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)
FLAGS = ["--max-total-tokens", "8192", "--worker-threads", "1"]

HOST = f"""
import asyncio, sys
from quadriga.client import AsyncClient, SamplingParams
LONG = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)

async def main():
    streaming = 0
    async def run_request(number):
        nonlocal streaming
        client = AsyncClient(sys.argv[1], connect_timeout=30)
        await client.connect()
        while True:
            stream = number % 3 != 0  # every third waits for the whole
            handle = client.submit([5 + number] * 6, LONG, stream=stream)
            streaming += 1
            if streaming == {CLIENTS_PER_HOST}:
                print("streaming", flush=True)
            async for _ in handle:
                pass
    await asyncio.gather(*(run_request(n) for n in range({CLIENTS_PER_HOST})))

asyncio.run(main())
"""


def abort_at_random(endpoint: str, count: int, seconds: float) -> dict[str, Any]:
    """Send `count` requests in `seconds`, abort each soon, and return the idle server's info."""
    before = settle(endpoint)
    asyncio.run(_abort_at_random(endpoint, count, seconds))
    after = settle(endpoint)
    assert sum(after["ended"].values()) - sum(before["ended"].values()) == count
    return after


async def _abort_at_random(endpoint: str, count: int, seconds: float) -> None:
    chosen = random.Random(4)
    async with AsyncClient(endpoint) as client:

        async def run_request() -> None:
            await asyncio.sleep(chosen.random() * seconds)
            handle = client.submit([chosen.randrange(3, 500)] * chosen.randrange(1, 50), LONG)
            await asyncio.sleep(chosen.random() * 0.4)
            await client.abort(handle.request_id)
            completion = await handle.completion()
            assert completion.finish_reason in ("abort", "length")

        await asyncio.gather(*(run_request() for _ in range(count)))


def kill_clients(endpoint: str, count: int) -> dict[str, Any]:
    """Kill `count` clients that all have open requests, and return the idle server's info."""
    settle(endpoint)
    hosts = [
        subprocess.Popen([sys.executable, "-c", HOST, endpoint], stdout=subprocess.PIPE, cwd=ROOT)
        for _ in range(count // CLIENTS_PER_HOST)
    ]
    try:
        for host in hosts:
            assert host.stdout is not None
            assert host.stdout.readline() == b"streaming\n"
        assert open_requests(endpoint) > count / 2
    finally:
        killed_at = time.monotonic()
        for host in hosts:
            host.kill()
            host.communicate()
    wait_until(lambda: open_requests(endpoint) == 0, 10)
    print(f"all of them aborted {time.monotonic() - killed_at:.2f} s after the kill")
    return settle(endpoint)


def open_requests(endpoint: str) -> int:
    with Client(endpoint) as client:
        info = client.info()
        return int(info["running"] + info["waiting"])


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.faults.storm")
    parser.add_argument("--requests", type=int, default=10_000, help="requests to abort")
    parser.add_argument("--seconds", type=float, default=30.0, help="time in which they are sent")
    parser.add_argument("--clients", type=int, default=200, help="clients to kill")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = tiny_llama(Path(directory) / "model")
        with running_server(Path(directory) / "log", "--model", str(model), *FLAGS) as server:
            aborted = abort_at_random(server.endpoint, arguments.requests, arguments.seconds)
            killed = kill_clients(server.endpoint, arguments.clients)
    for name, info in (("aborts", aborted), ("killed clients", killed)):
        left = {key: info[key] for key in ("running", "waiting", "pages_held", "open_requests")}
        print(f"after the {name}: {left}, ended {info['ended']}")


if __name__ == "__main__":
    main()
