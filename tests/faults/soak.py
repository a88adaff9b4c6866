"""A long time under a mixed load: memory, open files and throughput stay, and nothing gets lost.

    python -m tests.faults.soak --minutes 60

Callers at the ring's socket and at the web gateway do one thing after the other: streams and whole
answers, greedy and sampled, chats that grow, prefixes that are shared, grammars, several choices;
they abort, leave, close their socket without a word, ask for what is refused. Every process is
looked at again and again, and its first quarter (after a warm-up in which caches fill: a tenth of
the time, at most three minutes) compared with its last.

The exit code is 1 where memory, files or threads grew, a request got lost or was answered wrongly,
a process died, or something is left afterwards.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

from bench.client.server import free_port
from quadriga.client import AsyncClient
from quadriga.errors import QuadrigaError
from tests.faults.footprint import HEAD, Footprint, footprint, growth, median, row
from tests.faults.soak_load import RingCaller, Shape, Tally, do_one_after_the_other
from tests.faults.soak_web import WebCaller
from tests.server import Server, running_server, settle, wait_until
from tests.tiny_models import tiny_llama

RING_CALLERS, CONNECTIONS, WEB_CALLERS = 24, 6, 8
FLAGS = ["--dtype", "float32", "--max-total-tokens", "32768", "--worker-threads", "1"]
FLAGS += ["--log-level", "debug"]  # the detokenizer then says at its end what it still knows
CLIENT = "client"
"""The process of this program. It is shown, and not judged: it is no part of the server."""
MAX_WARM_UP_S = 180.0
MAX_INTERVAL_S = 10.0
TOKENS = "generation_tokens_total"
FOLLOWED = ("running", "waiting", "pages_held", "pages_cached", "pages_free", TOKENS)


@dataclass(frozen=True, slots=True)
class Sample:
    """seconds: since the load began. processes: by name. info: what is FOLLOWED of it."""

    seconds: float
    processes: dict[str, Footprint]
    info: dict[str, int]


@dataclass
class Soak:
    """What came of it. problems: why it has failed, if it has."""

    tally: Tally
    samples: list[Sample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def quarters(self) -> tuple[list[Sample], list[Sample]]:
        """The first after the warm-up, and the last."""
        end = self.samples[-1].seconds
        begin = min(MAX_WARM_UP_S, end / 10)
        quarter = (end - begin) / 4
        return (
            [one for one in self.samples if begin <= one.seconds <= begin + quarter],
            [one for one in self.samples if one.seconds >= end - quarter],
        )

    def report(self) -> None:
        """Print what was found."""
        first, last = self.quarters()
        print(HEAD)
        for name, (early, late) in self.footprints().items():
            print(row(name, early, late))
        print(f"tokens a second: {_rate(first):.0f} in the first quarter, {_rate(last):.0f} last")
        print(f"{self.tally.outcomes.total()} requests:", _listed(self.tally.outcomes))
        for what, count in self.tally.wrong.most_common(20):
            print(f"WRONG, {count} times: {what}")
        for problem in self.problems:
            print(f"FAILED: {problem}")

    def footprints(self) -> dict[str, tuple[Footprint, Footprint]]:
        """Of each process: medians of the first quarter and the last."""
        first, last = self.quarters()
        return {
            name: (
                median([one.processes[name] for one in first if name in one.processes]),
                median([one.processes[name] for one in last if name in one.processes]),
            )
            for name in first[-1].processes
        }


def _rate(samples: list[Sample]) -> float:
    begin, end = samples[0], samples[-1]
    return (end.info[TOKENS] - begin.info[TOKENS]) / max(1e-9, end.seconds - begin.seconds)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))


async def look(server: Server, client: AsyncClient, began: float) -> Sample:
    """At every process of the server, those that check grammars, and this one, the client."""
    info = await client.info(60)
    pids = {**server.pids, CLIENT: os.getpid()}
    checkers = psutil.Process(server.pids["tokenizer_proc"]).children()
    for number, child in enumerate(sorted(checkers, key=lambda child: child.pid), start=1):
        pids[f"grammar_check {number}"] = child.pid
    processes = {name: footprint(pid) for name, pid in pids.items()}
    return Sample(time.monotonic() - began, processes, {name: info[name] for name in FOLLOWED})


async def load(server: Server, url: str, seconds: float, soak: Soak) -> None:
    """Let the callers do their things, and look at the processes meanwhile."""
    over = asyncio.Event()
    clients = [AsyncClient(server.endpoint, connect_timeout=30) for _ in range(CONNECTIONS)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client.connect() for client in clients))
        info = await clients[0].info()
        shape = Shape(info["context_length"], info["vocab_size"])
        callers: list[tuple[RingCaller | WebCaller, random.Random]] = []
        for number in range(RING_CALLERS):
            chosen = random.Random(number)
            client = clients[number % CONNECTIONS]
            callers.append((RingCaller(client, shape, soak.tally, chosen), chosen))
        for number in range(RING_CALLERS, RING_CALLERS + WEB_CALLERS):
            chosen = random.Random(number)
            callers.append((WebCaller(session, url, shape, chosen), chosen))
        tasks = [
            asyncio.create_task(do_one_after_the_other(caller.things, soak.tally, chosen, over))
            for caller, chosen in callers
        ]
        try:
            await _look_again_and_again(server, clients[0], seconds, soak)
        finally:
            over.set()
            await asyncio.gather(*tasks)
            await asyncio.gather(*(client.close() for client in clients))


async def _look_again_and_again(
    server: Server, client: AsyncClient, seconds: float, soak: Soak
) -> None:
    began, interval = time.monotonic(), min(MAX_INTERVAL_S, seconds / 20)
    while (passed := time.monotonic() - began) < seconds:
        await asyncio.sleep(min(interval, seconds - passed))
        try:
            soak.samples.append(await look(server, client, began))
        except (OSError, QuadrigaError) as error:
            soak.problems.append(f"a process is gone: {error}")
            return
        _print_progress(soak)


def _print_progress(soak: Soak) -> None:
    sample = soak.samples[-1]
    held = " ".join(f"{one.megabytes:.1f}" for one in sample.processes.values())
    followed = ", ".join(f"{name} {sample.info[name]}" for name in FOLLOWED[:-1])
    print(
        f"{sample.seconds:6.0f} s  {_rate(soak.samples[-2:]):6.0f} tokens/s,"
        f" {soak.tally.outcomes.total()} requests, {soak.tally.wrong.total()} wrong,"
        f" {followed}; MB {held}",
        flush=True,
    )


def run(model: Path | str, seconds: float, directory: Path) -> Soak:
    """A server, the load, and what is left afterwards."""
    soak, log, port = Soak(Tally()), directory / "log", free_port()
    flags = ["--model", str(model), *FLAGS, "--port", str(port)]
    with running_server(log, *flags) as server:
        asyncio.run(load(server, f"http://127.0.0.1:{port}", seconds, soak))
        wait_until(lambda: settle(server.endpoint)["open_requests"] == 0, 10)
    _judge(soak, log.read_text())
    return soak


def _judge(soak: Soak, said: str) -> None:
    """said: the server's log."""
    if soak.tally.wrong:
        soak.problems.append(f"{soak.tally.wrong.total()} requests were lost or answered wrongly")
    for name, (first, last) in soak.footprints().items():
        if name != CLIENT:
            soak.problems += growth(name, first, last)
    if " died (" in said:
        soak.problems.append(f"a process died:\n{said}")
    if "leaving with 0 open requests" not in said:
        soak.problems.append("the detokenizer knew requests at its end")


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.faults.soak")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--model", help="default: a tiny Llama, which answers many more requests")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        directory = Path(name)
        model = arguments.model or tiny_llama(directory / "model")
        soak = run(model, 60 * arguments.minutes, directory)
    soak.report()
    return int(bool(soak.problems))


if __name__ == "__main__":
    sys.exit(main())
