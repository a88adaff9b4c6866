"""Load a server beyond its capacity: refusals are fast, and accepted requests are served.

    python -m tests.faults.overload --times 10 --seconds 300

Starts a server of a tiny model, measures its capacity with as many requests as may run and wait,
and then sends a multiple of that rate, independently of the answers.
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
TICK_S = 0.01  # between arrivals, of which several come at once


@dataclass
class Outcome:
    """Results of a load.

    Attributes:
        served: Seconds from submission to the end.
        refused: Seconds from submission to the refusal.
        hints: Values of retry_after in seconds; None: a refusal without one.
        ends: (number of the request, whether it was served), in the order of their ends.
    """

    served: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    hints: set[float | None] = field(default_factory=set)
    ends: list[tuple[int, bool]] = field(default_factory=list)


async def ask(client: AsyncClient, number: int, outcome: Outcome) -> None:
    began = time.monotonic()
    try:
        await client.submit([3 + number % 500] * 8, PARAMS).completion()
        outcome.served.append(time.monotonic() - began)
        outcome.ends.append((number, True))
    except QueueFull as error:
        outcome.refused.append(time.monotonic() - began)
        outcome.hints.add(error.retry_after)
        outcome.ends.append((number, False))


async def at_capacity(client: AsyncClient, seconds: float) -> Outcome:
    """Keep as many requests open as may run and wait."""
    outcome, end = Outcome(), time.monotonic() + seconds

    async def send_in_turn(first: int) -> None:
        while time.monotonic() < end:
            await ask(client, first, outcome)

    await asyncio.gather(*(send_in_turn(n) for n in range(RUNNING + QUEUED)))
    return outcome


async def at_rate(client: AsyncClient, rate: float, seconds: float) -> Outcome:
    """Send `rate` requests per second, independently of the answers."""
    outcome, began, sent = Outcome(), time.monotonic(), 0
    in_flight: set[asyncio.Task[None]] = set()
    while (now := time.monotonic() - began) < seconds:
        while sent < rate * now:
            task = asyncio.ensure_future(ask(client, sent, outcome))
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
            sent += 1
        await asyncio.sleep(TICK_S)
    await asyncio.gather(*in_flight)
    return outcome


def percentile(values: list[float], share: float) -> float:
    """Return a percentile in ms."""
    ordered = sorted(values)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def line(name: str, values: list[float], seconds: float) -> str:
    return (
        f"{name}: {len(values)} ({len(values) / seconds:.0f} a second),"
        f" {percentile(values, 0.5):.1f} ms median, {percentile(values, 0.99):.1f} ms p99"
    )


async def overload(endpoint: str, times: float, seconds: float) -> tuple[Outcome, Outcome]:
    """Return the outcomes at capacity, and at `times` its rate."""
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
    parser.add_argument("--times", type=float, default=10.0, help="multiple of the capacity")
    parser.add_argument("--seconds", type=float, default=300.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = tiny_llama(Path(directory) / "model")
        run(arguments.times, arguments.seconds, model, Path(directory) / "log")


if __name__ == "__main__":
    main()
