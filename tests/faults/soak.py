"""Run a mixed load for a long time: memory, files and throughput stay, and no request is lost.

    python -m tests.faults.soak --minutes 60
    python -m tests.faults.soak --minutes 30 --with-storage
    python -m tests.faults.soak --minutes 30 --dp 2 --kill-every 60

Clients of the ring's socket and of the gateway run one action after the other: streams and whole
answers, greedy and sampled, growing chats, shared prefixes, grammars, several choices, aborts,
closed streams, closed sockets, and requests that are refused. Every process is sampled, and its
first quarter (after a warm-up of a tenth of the time, at most three minutes) is compared with its
last one.

With storage the server has a journal, a data directory and a log of usage, traces every request,
and clients store responses, run batches and resume streams. With --kill-every all processes of a
replica, of one that is ready, are killed at a time; only the processes that live are compared.
With --action-rate the load stays the same whatever else the computer does.

The exit code is 1 if memory, files or threads grew, a request was lost or answered wrongly, a
process died, or something is left afterwards.
"""

import argparse
import asyncio
import itertools
import os
import random
import signal
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
from tests.faults.soak_load import Pace, RingClient, Shape, Tally, run_actions
from tests.faults.soak_stored import StoringClient
from tests.faults.soak_web import WebClient
from tests.server import Server, running_server, settle, wait_until
from tests.tiny_models import tiny_llama

NUM_RING_CLIENTS, NUM_CONNECTIONS, NUM_WEB_CLIENTS = 24, 6, 8
FLAGS = ["--dtype", "float32", "--max-total-tokens", "32768", "--worker-threads", "1"]
REPLICA_PROCESSES = ("scheduler_proc", "worker_proc", "detok_proc")
# This process, which is shown and not checked, as it is no part of the server.
CLIENT = "client"
MAX_WARM_UP_S = 180.0
STORED_WARM_UP_SHARE = 1 / 3  # of the time, until what is kept of requests is full
MAX_INTERVAL_S = 10.0
TOKENS = "generation_tokens_total"
FOLLOWED = ("running", "waiting", "pages_held", "pages_cached", "pages_free", TOKENS)


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """What is run beside the load itself.

    Attributes:
        with_storage: The server stores, and clients store, resume and run batches.
        dp: Replicas.
        kill_every_s: Seconds from one kill of a replica to the next; 0: none is killed.
        action_rate: Actions of all clients that begin in a second; 0: as many as the server keeps.
    """

    with_storage: bool = False
    dp: int = 1
    kill_every_s: float = 0.0
    action_rate: float = 0.0

    def flags(self, directory: Path) -> list[str]:
        """Return the flags of the server, which may write to a directory."""
        flags = ["--dp", str(self.dp)] if self.dp > 1 else []
        if self.with_storage:
            flags += ["--journal", str(directory / "state"), "--trace-sampling-ratio", "1"]
            # Else a batch waits for as long as there are other requests.
            flags += ["--batch-concurrency-beside", "2"]
            flags += ["--usage-log", str(directory / "usage"), "--log-format", "json"]
        return flags


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures at one moment.

    Attributes:
        seconds: Since the load began.
        processes: Footprints by name.
        info: The FOLLOWED fields of the server's info.
    """

    seconds: float
    processes: dict[str, Footprint]
    info: dict[str, int]


@dataclass
class Soak:
    """Results of a soak; it has failed if there are problems."""

    tally: Tally
    samples: list[Sample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_kills: int = 0
    options: SoakOptions = SoakOptions()

    def quarters(self) -> tuple[list[Sample], list[Sample]]:
        """Return the samples of the first quarter after the warm-up, and of the last."""
        end = self.samples[-1].seconds
        begin = min(MAX_WARM_UP_S, end / 10)
        if self.options.with_storage:
            begin = end * STORED_WARM_UP_SHARE
        quarter = (end - begin) / 4
        return (
            [s for s in self.samples if begin <= s.seconds <= begin + quarter],
            [s for s in self.samples if s.seconds >= end - quarter],
        )

    def report(self) -> None:
        """Print the results."""
        first, last = self.quarters()
        print(HEAD)
        for name, (early, late) in self.footprints().items():
            print(row(name, early, late))
        if self.num_kills:  # a scheduler that starts counts its tokens from 0
            print(f"{self.num_kills} replicas were killed")
        else:
            rates = f"{_rate(first):.0f} in the first quarter, {_rate(last):.0f} last"
            print(f"tokens a second: {rates}")
        print(f"{self.tally.outcomes.total()} requests:", _listed(self.tally.outcomes))
        for what, count in self.tally.wrong.most_common(20):
            print(f"WRONG, {count} times: {what}")
        for problem in self.problems:
            print(f"FAILED: {problem}")

    def footprints(self) -> dict[str, tuple[Footprint, Footprint]]:
        """Return the median footprints of each process in the first and the last quarter."""
        first, last = self.quarters()
        return {
            name: (
                median([s.processes[name] for s in first if name in s.processes]),
                median([s.processes[name] for s in last if name in s.processes]),
            )
            for name in first[-1].processes
        }


def _rate(samples: list[Sample]) -> float:
    begin, end = samples[0], samples[-1]
    return max(0, end.info[TOKENS] - begin.info[TOKENS]) / max(1e-9, end.seconds - begin.seconds)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))


async def take_sample(
    server: Server, client: AsyncClient, began: float, options: SoakOptions
) -> Sample:
    """Sample every process of the server, the grammar checkers, and this process."""
    info = await client.info(60)
    pids = {**server.pids, CLIENT: os.getpid()}
    if options.kill_every_s:
        pids = {name: pid for name, pid in pids.items() if not name.startswith(REPLICA_PROCESSES)}
    checkers = psutil.Process(server.pids["tokenizer_proc"]).children()
    for number, child in enumerate(sorted(checkers, key=lambda child: child.pid), start=1):
        pids[f"grammar_check {number}"] = child.pid
    processes = {name: footprint(pid) for name, pid in pids.items()}
    return Sample(time.monotonic() - began, processes, {name: info[name] for name in FOLLOWED})


async def load(server: Server, url: str, seconds: float, soak: Soak, options: SoakOptions) -> None:
    """Run the load, and sample the processes meanwhile."""
    stopping, pace = asyncio.Event(), Pace(options.action_rate)
    clients = [AsyncClient(server.endpoint, connect_timeout=30) for _ in range(NUM_CONNECTIONS)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client.connect() for client in clients))
        info = await clients[0].info()
        shape = Shape(info["context_length"], info["vocab_size"])
        workload: list[tuple[RingClient | WebClient, random.Random]] = []
        for number in range(NUM_RING_CLIENTS):
            chosen = random.Random(number)
            client = clients[number % NUM_CONNECTIONS]
            workload.append((RingClient(client, shape, soak.tally, chosen), chosen))
        for number in range(NUM_RING_CLIENTS, NUM_RING_CLIENTS + NUM_WEB_CLIENTS):
            chosen = random.Random(number)
            kind = StoringClient if options.with_storage else WebClient
            workload.append((kind(session, url, shape, chosen), chosen))
        tasks = [
            asyncio.create_task(run_actions(actor.actions, soak.tally, chosen, pace, stopping))
            for actor, chosen in workload
        ]
        killing = asyncio.create_task(_kill_replicas(server, clients[0], options, soak))
        try:
            await _sample_until_end(server, clients[0], seconds, soak, options)
        finally:
            killing.cancel()
            stopping.set()
            await asyncio.gather(*tasks)
            await asyncio.gather(*(client.close() for client in clients))


async def _sample_until_end(
    server: Server, client: AsyncClient, seconds: float, soak: Soak, options: SoakOptions
) -> None:
    began, interval = time.monotonic(), min(MAX_INTERVAL_S, seconds / 20)
    while (passed := time.monotonic() - began) < seconds:
        await asyncio.sleep(min(interval, seconds - passed))
        try:
            soak.samples.append(await take_sample(server, client, began, options))
        except (OSError, QuadrigaError) as error:
            soak.problems.append(f"a process is gone: {error}")
            return
        _print_progress(soak)


async def _kill_replicas(
    server: Server, client: AsyncClient, options: SoakOptions, soak: Soak
) -> None:
    """Kill all processes of one replica after the other, each when all are ready again."""
    if not options.kill_every_s:
        return
    for number in itertools.count():
        await asyncio.sleep(options.kill_every_s)
        while not (await client.info(60))["ready"]:
            await asyncio.sleep(1)
        replica = f"/{number % options.dp}" if options.dp > 1 else ""
        for name in REPLICA_PROCESSES:
            if pid := server.pid_of(name + replica):
                os.kill(pid, signal.SIGKILL)
        soak.num_kills += 1


def _print_progress(soak: Soak) -> None:
    sample = soak.samples[-1]
    held = " ".join(f"{memory.megabytes:.1f}" for memory in sample.processes.values())
    followed = ", ".join(f"{name} {sample.info[name]}" for name in FOLLOWED[:-1])
    print(
        f"{sample.seconds:6.0f} s  {_rate(soak.samples[-2:]):6.0f} tokens/s,"
        f" {soak.tally.outcomes.total()} requests, {soak.tally.wrong.total()} wrong,"
        f" {followed}; MB {held}",
        flush=True,
    )


def run(
    model: Path | str, seconds: float, directory: Path, options: SoakOptions | None = None
) -> Soak:
    """Run a server and the load, and check the results."""
    options = options or SoakOptions()
    soak, log, port = Soak(Tally(), options=options), directory / "log", free_port()
    flags = ["--model", str(model), *FLAGS, "--port", str(port), *options.flags(directory)]
    with running_server(log, *flags) as server:
        asyncio.run(load(server, f"http://127.0.0.1:{port}", seconds, soak, options))
        wait_until(lambda: settle(server.endpoint)["open_requests"] == 0, 10)
    _check(soak, log.read_text(), options)
    return soak


def _check(soak: Soak, log: str, options: SoakOptions) -> None:
    """Add problems of the tally, the footprints and the server's log."""
    if soak.tally.wrong:
        soak.problems.append(f"{soak.tally.wrong.total()} requests were lost or answered wrongly")
    for name, (first, last) in soak.footprints().items():
        if name != CLIENT:
            soak.problems += growth(name, first, last)
    if " died (" in log and not options.kill_every_s:
        soak.problems.append(f"a process died:\n{log}")
    if "WARNING stopping with" in log:
        soak.problems.append("the detokenizer had open requests at its end")


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.faults.soak")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--model", help="model (default: a tiny Llama, which is faster)")
    parser.add_argument("--with-storage", action="store_true", help="store, resume, run batches")
    parser.add_argument("--dp", type=int, default=1, help="replicas (default: 1)")
    parser.add_argument("--kill-every", type=float, default=0.0, metavar="SECONDS",
                        help="kill a replica so often (default: 0, never)")  # fmt: skip
    parser.add_argument("--action-rate", type=float, default=0.0, metavar="PER_SECOND",
                        help="actions that begin (default: as many as possible)")  # fmt: skip
    arguments = parser.parse_args()
    options = SoakOptions(
        arguments.with_storage, arguments.dp, arguments.kill_every, arguments.action_rate
    )
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        directory = Path(name)
        model = arguments.model or tiny_llama(directory / "model")
        soak = run(model, 60 * arguments.minutes, directory, options)
    soak.report()
    return int(bool(soak.problems))


if __name__ == "__main__":
    sys.exit(main())
