"""Requests aborted and clients killed at random moments: every page and slot comes back."""

import asyncio
import random
import subprocess
import sys
import time

from quadriga.client import AsyncClient, SamplingParams
from tests.server import ROOT, Server, settle, wait_until

ABORTED = 1000
HOSTS, CLIENTS_PER_HOST = 8, 25
LONG = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)

HOST = f"""
import asyncio, sys
from quadriga.client import AsyncClient, SamplingParams
LONG = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)

async def main():
    streaming = 0
    async def one(number):
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
    await asyncio.gather(*(one(n) for n in range({CLIENTS_PER_HOST})))

asyncio.run(main())
"""


def test_a_thousand_requests_aborted_at_random_moments_leave_nothing(server: Server) -> None:
    before = settle(server.endpoint)
    asyncio.run(_abort_at_random(server.endpoint))
    after = settle(server.endpoint)
    assert after["pages_held"] == 0
    assert sum(after["ended"].values()) - sum(before["ended"].values()) == ABORTED


async def _abort_at_random(endpoint: str) -> None:
    chosen = random.Random(4)
    async with AsyncClient(endpoint) as client:

        async def one() -> None:
            await asyncio.sleep(chosen.random() * 3)
            handle = client.submit([chosen.randrange(3, 500)] * chosen.randrange(1, 50), LONG)
            await asyncio.sleep(chosen.random() * 0.4)
            await client.abort(handle.request_id)
            completion = await handle.completion()
            assert completion.finish_reason in ("abort", "length")

        await asyncio.gather(*(one() for _ in range(ABORTED)))


def test_two_hundred_clients_killed_in_mid_stream_leave_nothing(server: Server) -> None:
    settle(server.endpoint)
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, server.endpoint],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        for _ in range(HOSTS)
    ]
    try:
        for host in hosts:
            assert host.stdout is not None
            assert host.stdout.readline() == b"streaming\n"
        running = asyncio.run(_open_requests(server.endpoint))
        assert running > HOSTS * CLIENTS_PER_HOST / 2
    finally:
        killed_at = time.monotonic()
        for host in hosts:
            host.kill()
            host.communicate()
    wait_until(lambda: asyncio.run(_open_requests(server.endpoint)) == 0, 10)
    print(f"all of them aborted {time.monotonic() - killed_at:.2f} s after the kill")
    assert settle(server.endpoint)["pages_held"] == 0


async def _open_requests(endpoint: str) -> int:
    async with AsyncClient(endpoint) as client:
        info = await client.info()
        return int(info["running"] + info["waiting"])
