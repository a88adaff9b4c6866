"""A server at many times its capacity: refusals come at once, who is accepted is served as ever.

    python -m tests.faults.overload --times 10 --seconds 300

Starts a server of a tiny model, finds its capacity with as many requests under way as may run and
wait, then sends so many times as much, whatever comes back.
"""

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from quadriga.client import AsyncClient, SamplingParams
from quadriga.errors import QueueFull
from tests.faults.fuzz import sizes
from tests.server import running_server, settle
from tests.tiny_models import tiny_llama

PARAMS = SamplingParams(temperature=0, max_new_tokens=128, ignore_eos=True)
RUNNING, QUEUED = 8, 24
FLAGS = ["--max-total-tokens", "8192", "--worker-threads", "1", "--max-batch-size", str(RUNNING)]
FLAGS += ["--max-running-requests", str(RUNNING), "--max-queued-requests", str(QUEUED)]
TICK = 0.01
"""Seconds between arrivals, which then come several at once."""


@dataclass
class Outcome:
    """Seconds from submission to the end, or to the refusal. hints: seconds to retry after; None is
    a refusal that says none."""

    served: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    hints: set[float | None] = field(default_factory=set)


async def ask(client: AsyncClient, number: int, outcome: Outcome) -> None:
    began = time.monotonic()
    try:
        await client.submit([3 + number % 500] * 8, PARAMS).completion()
        outcome.served.append(time.monotonic() - began)
    except QueueFull as error:
        outcome.refused.append(time.monotonic() - began)
        outcome.hints.add(error.retry_after)


async def at_capacity(client: AsyncClient, seconds: float) -> Outcome:
    """As many at once as may run and wait."""
    outcome, end = Outcome(), time.monotonic() + seconds

    async def one_after_the_other(first: int) -> None:
        while time.monotonic() < end:
            await ask(client, first, outcome)

    await asyncio.gather(*(one_after_the_other(n) for n in range(RUNNING + QUEUED)))
    return outcome


async def at_rate(client: AsyncClient, rate: float, seconds: float) -> Outcome:
    """So many requests a second, whatever becomes of them."""
    outcome, began, sent = Outcome(), time.monotonic(), 0
    under_way: set[asyncio.Task[None]] = set()
    while (now := time.monotonic() - began) < seconds:
        while sent < rate * now:
            task = asyncio.ensure_future(ask(client, sent, outcome))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            sent += 1
        await asyncio.sleep(TICK)
    await asyncio.gather(*under_way)
    return outcome


def percentile(values: list[float], share: float) -> float:
    """In ms."""
    ordered = sorted(values)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def line(name: str, values: list[float], seconds: float) -> str:
    return (
        f"{name}: {len(values)} ({len(values) / seconds:.0f} a second),"
        f" {percentile(values, 0.5):.1f} ms median, {percentile(values, 0.99):.1f} ms p99"
    )


async def overload(endpoint: str, times: float, seconds: float) -> tuple[Outcome, Outcome]:
    """What came of it at capacity, and at so many times as much."""
    measured = max(1.0, min(20.0, seconds / 5))
    async with AsyncClient(endpoint, connect_timeout=30) as client:
        await at_capacity(client, 1.0)
        normal = await at_capacity(client, measured)
        print(line("at capacity, served", normal.served, measured))
        pids = (await client.info())["pids"]
        rate = times * len(normal.served) / measured
        await at_rate(client, rate, seconds / 5)
        before = sizes(pids)
        outcome = await at_rate(client, rate, seconds)
        after = sizes(pids)
    print(line(f"at {times:g} times as much, served", outcome.served, seconds))
    print(line("refused", outcome.refused, seconds), f"; retry after {outcome.hints} s")
    for name, size in after.items():
        print(f"  {name}: {before[name]:.1f} MiB after a sixth, {size:.1f} MiB at the end")
    return normal, outcome


def run(times: float, seconds: float, model: Path, log: Path) -> tuple[Outcome, Outcome]:
    with running_server(log, "--model", str(model), *FLAGS) as server:
        outcomes = asyncio.run(overload(server.endpoint, times, seconds))
        settle(server.endpoint)
        return outcomes


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.faults.overload")
    parser.add_argument("--times", type=float, default=10.0, help="of the capacity")
    parser.add_argument("--seconds", type=float, default=300.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = tiny_llama(Path(directory) / "model")
        run(arguments.times, arguments.seconds, model, Path(directory) / "log")


if __name__ == "__main__":
    main()
