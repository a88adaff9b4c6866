"""Run clients that never read beside normal ones, which must not notice, with bounded memory.

The same load comes first from clients that read, then from clients that do not.

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
# Pings per second of each of the other clients, whose answers fill its queue.
NUM_PINGS = 100


async def gaps(endpoint: str, normal: int, seconds: float) -> list[float]:
    """Return the seconds between the tokens of normal streams."""
    seconds_between: list[float] = []
    end = time.monotonic() + seconds

    async def stream(number: int) -> None:
        async with AsyncClient(endpoint, connect_timeout=30) as client:
            while time.monotonic() < end:
                last = 0.0
                async for chunk in client.stream([3 + number] * 8, PARAMS):
                    if last:
                        seconds_between.append(chunk.received_at - last)
                    last = chunk.received_at

    await asyncio.gather(*(stream(number) for number in range(normal)))
    return seconds_between


async def flood(others: list[RawClient], reading: bool) -> None:
    """Send requests from the other clients, and read their answers if `reading`."""
    params, number = {"max_new_tokens": 40, "temperature": 0.0, "ignore_eos": True}, 0
    ping = msgpack.packb(["ping", 1])
    while True:
        for other in others:
            number += 1
            ids = (3 + number % 500).to_bytes(4, "little") * 4
            other.send(msgpack.packb(["generate", 1, f"r{number}", "", params, True, None, ids]))
            for _ in range(NUM_PINGS):
                other.send(ping)
            while reading and other.socket.poll(0):
                other.socket.recv()
        await asyncio.sleep(1.0)


async def beside(
    endpoint: str, count: int, reading: bool, normal: int, seconds: float
) -> list[float]:
    """Return the gaps of normal streams beside `count` other clients."""
    others = [RawClient(endpoint, receive_queue=1000 if reading else 1) for _ in range(count)]
    flooding = asyncio.ensure_future(flood(others, reading))
    measured = await gaps(endpoint, normal, seconds)
    flooding.cancel()
    for other in others:
        other.socket.close()
    return measured


async def compare(endpoint: str, slow: int, normal: int, seconds: float) -> None:
    async with AsyncClient(endpoint, connect_timeout=30) as client:
        pids = (await client.info())["pids"]
    await beside(endpoint, slow, True, normal, seconds / 5)
    before = sizes(pids)
    for reading in (True, False):
        values = await beside(endpoint, slow, reading, normal, seconds)
        kind = "that read" if reading else "that never read"
        print(
            f"beside {slow} {kind}: time between tokens {percentile(values, 0.5):.2f} ms median,"
            f" {percentile(values, 0.99):.2f} ms p99, {len(values) / seconds:.0f} tokens a second"
        )
    for name, size in sizes(pids).items():
        print(f"  {name}: {before[name]:.1f} MiB before, {size:.1f} MiB at the end")


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.faults.slow_readers")
    parser.add_argument("--slow", type=int, default=50)
    parser.add_argument("--normal", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of a phase")
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
            why = "" if cut_off else ": the unread messages fit into the queues; run it longer"
            print(f"cut off: {cut_off}{why}")


if __name__ == "__main__":
    main()
