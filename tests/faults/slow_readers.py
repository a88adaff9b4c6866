"""Clients that never read, beside normal ones: those notice nothing, and the memory has a bound.

First the others read like anybody, then the same load comes from clients that do not.

python -m tests.faults.slow_readers --slow 50 --normal 50 --seconds 30
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import msgpack

from quadriga.client import AsyncClient, SamplingParams
from tests.faults.fuzz import sizes
from tests.faults.overload import percentile
from tests.faults.raw_client import RawClient
from tests.server import running_server, settle
from tests.tiny_models import tiny_llama

PARAMS = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)
FLAGS = ["--max-total-tokens", "65536", "--worker-threads", "1", "--max-batch-size", "128"]
PINGS = 100
"""Of each of the others in a second, beside a request: their answers fill its queue."""


async def gaps(endpoint: str, normal: int, seconds: float) -> list[float]:
    """Seconds between the tokens of normal streams."""
    found: list[float] = []
    end = time.monotonic() + seconds

    async def stream(number: int) -> None:
        async with AsyncClient(endpoint, connect_timeout=30) as client:
            while time.monotonic() < end:
                last = 0.0
                async for chunk in client.stream([3 + number] * 8, PARAMS):
                    if last:
                        found.append(chunk.received_at - last)
                    last = chunk.received_at

    await asyncio.gather(*(stream(number) for number in range(normal)))
    return found


async def flood(others: list[RawClient], reading: bool) -> None:
    """Keep the others asking, and reading if they do."""
    params, number = {"max_new_tokens": 40, "temperature": 0.0, "ignore_eos": True}, 0
    ping = msgpack.packb(["ping", 1])
    while True:
        for other in others:
            number += 1
            ids = (3 + number % 500).to_bytes(4, "little") * 4
            other.send(msgpack.packb(["generate", 1, f"r{number}", "", params, True, None, ids]))
            for _ in range(PINGS):
                other.send(ping)
            while reading and other.socket.poll(0):
                other.socket.recv()
        await asyncio.sleep(1.0)


async def beside(
    endpoint: str, count: int, reading: bool, normal: int, seconds: float
) -> list[float]:
    """The gaps of normal streams beside so many others."""
    others = [RawClient(endpoint, receive_queue=1000 if reading else 1) for _ in range(count)]
    flooding = asyncio.ensure_future(flood(others, reading))
    found = await gaps(endpoint, normal, seconds)
    flooding.cancel()
    for other in others:
        other.socket.close()
    return found


async def compare(endpoint: str, slow: int, normal: int, seconds: float) -> None:
    async with AsyncClient(endpoint, connect_timeout=30) as client:
        pids = (await client.info())["pids"]
    await beside(endpoint, slow, True, normal, seconds / 5)
    before = sizes(pids)
    for reading in (True, False):
        values = await beside(endpoint, slow, reading, normal, seconds)
        who = "that read" if reading else "that never read"
        print(
            f"beside {slow} {who}: time between tokens {percentile(values, 0.5):.2f} ms median,"
            f" {percentile(values, 0.99):.2f} ms p99, {len(values) / seconds:.0f} tokens a second"
        )
    for name, size in sizes(pids).items():
        print(f"  {name}: {before[name]:.1f} MiB before, {size:.1f} MiB at the end")


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.faults.slow_readers")
    parser.add_argument("--slow", type=int, default=50)
    parser.add_argument("--normal", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the two phases")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = tiny_llama(Path(directory) / "model")
        log = Path(directory) / "log"
        with running_server(log, "--model", str(model), *FLAGS) as server:
            asyncio.run(
                compare(server.endpoint, arguments.slow, arguments.normal, arguments.seconds)
            )
            settle(server.endpoint, 60)
            cut_off = log.read_text().count("cut off")
            why = (
                "" if cut_off else ": what they left unread fits into the queues; let it run longer"
            )
            print(f"cut off: {cut_off}{why}")


if __name__ == "__main__":
    main()
