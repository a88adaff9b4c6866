"""Kill every process of a server by each signal at each moment, and count lost streams.

python -m tests.faults.kill_matrix [--rounds 10] [--processes …] [--signals …] [--moments …]
python -m tests.faults.kill_matrix --random 600     # a random process every three seconds
python -m tests.faults.kill_matrix --moments http   # under resumable streams by HTTP
python -m tests.faults.kill_matrix --dp 2           # the processes of one of two replicas

The streams are greedy, in float32, of a tiny model with random weights. Each is compared with the
undisturbed run: lost (ended with an error), duplicated (longer than expected), different. Those by
HTTP (resumed_streams.py) are compared event by event, and "all" are all processes at once: after
SIGKILL the server is started again with --resume, after SIGSTOP its processes are continued.
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.client.server import free_port
from quadriga.client import AsyncClient, SamplingParams
from quadriga.errors import QuadrigaError
from tests.faults.restarts import Restarts, resumed_server
from tests.faults.resumed_streams import ResumedStreams
from tests.server import (
    START_TIMEOUT_S,
    Server,
    kill_tree,
    launch,
    running_server,
    settle,
    stop,
    wait_until_ready,
)
from tests.tiny_models import tiny_llama
from tests.waiting import wait_until_async

PROCESSES = ("worker_proc", "scheduler_proc", "detok_proc", "tokenizer_proc", "http_proc")
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGSEGV")
MOMENTS = ("loading", "streams", "draining", "http")
ALL = "all"
STREAMS, CLIENTS = 64, 4
GREEDY = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)
# A stream that takes longer counts as lost. Under repeated kills restarts are delayed by seconds.
TIMEOUT_S = 60.0
RANDOM_KILLS_TIMEOUT_S = 600.0
KILL_INTERVAL_S = 3.0

# Ids of tokens, or numbers of events; and the text, or the bytes of the events.
Answer = tuple[list[int], str | bytes]


@dataclass
class StreamTally:
    """Results of the streams of several rounds.

    Attributes:
        seconds: From the kill to the end of the longest silence after it; with random kills, the
            duration of a round.
    """

    lost: int = 0
    duplicated: int = 0
    different: int = 0
    streams: int = 0
    seconds: list[float] = field(default_factory=list)
    errors: set[str] = field(default_factory=set)

    def take(self, answers: Sequence[Answer | Exception], expected: Sequence[Answer]) -> None:
        for answer, reference in zip(answers, expected, strict=True):
            self.streams += 1
            if isinstance(answer, Exception):
                self.lost += 1
                self.errors.add(f"{type(answer).__name__}: {answer}")
            elif len(answer[0]) > len(reference[0]):
                self.duplicated += 1
            elif answer != reference:
                self.different += 1

    @property
    def is_clean(self) -> bool:
        return self.lost == self.duplicated == self.different == 0

    def row(self) -> str:
        seconds = self.seconds or [0.0]
        return (
            f"{self.streams:8} {self.lost:5} {self.duplicated:10} {self.different:9}"
            f" {statistics.median(seconds):8.2f} {max(seconds):6.2f}"
        )


class Load:
    """Streams of several clients.

    Attributes:
        started: Set when each stream has a token.
        arrivals: Arrival times of chunks.
    """

    def __init__(self, endpoint: str, timeout_s: float = TIMEOUT_S) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self.started = asyncio.Event()
        self.arrivals: list[float] = []
        self._streaming = 0

    async def run(self) -> "list[Answer | QuadrigaError]":
        timeout_s = self._timeout_s
        clients = [AsyncClient(self._endpoint, timeout_s, timeout_s) for _ in range(CLIENTS)]
        try:
            await asyncio.gather(*(client.connect() for client in clients))
            return list(
                await asyncio.gather(
                    *(self._stream(clients[n % CLIENTS], n) for n in range(STREAMS))
                )
            )
        finally:
            self.started.set()
            await asyncio.gather(*(client.close() for client in clients))

    async def _stream(self, client: AsyncClient, number: int) -> "Answer | QuadrigaError":
        ids: list[int] = []
        text = ""
        try:
            stream = client.stream(
                [3 + number] * (1 + number % 40), GREEDY, timeout=self._timeout_s
            )
            async for chunk in stream:
                self.arrivals.append(time.monotonic())
                self._streaming += not ids and bool(chunk.token_ids)
                ids += chunk.token_ids
                text += chunk.text
                if self._streaming == STREAMS:
                    self.started.set()
        except QuadrigaError as error:
            return error
        return ids, text

    def silence_after(self, moment: float) -> float:
        """Return the seconds from a moment to the end of the longest silence after it."""
        later = [moment, *sorted(t for t in self.arrivals if t > moment)]
        gaps = [(later[n + 1] - later[n], later[n + 1]) for n in range(len(later) - 1)]
        return max(gaps)[1] - moment if gaps else 0.0


class Matrix:
    """The servers whose processes are killed, and their undisturbed answers."""

    def __init__(self, directory: Path, watchdog_s: float = 3.0, dp: int = 1) -> None:
        self._directory = directory
        self._number = 0
        self._expected_events: list[Answer] = []
        self._flags = ["--model", str(tiny_llama(directory / "model")), "--dtype", "float32"]
        self._flags += ["--worker-threads", "1", "--max-total-tokens", "16384"]
        self._flags += ["--max-restarts", "1000000", "--dp", str(dp)]
        self._flags += ["--watchdog-timeout", str(watchdog_s * dp)]
        with self.server() as server:
            answers = asyncio.run(Load(server.endpoint).run())
        self.expected = [a for a in answers if not isinstance(a, QuadrigaError)]
        assert len(self.expected) == STREAMS, "the undisturbed run failed"

    def _next_flags(self) -> list[str]:
        self._number += 1
        return [*self._flags, "--port", str(free_port())]

    @contextmanager
    def server(self) -> Iterator[Server]:
        flags = self._next_flags()
        with running_server(self._directory / f"log-{self._number}", *flags) as server:
            yield server

    async def disturbed(
        self, endpoint: str, tally: StreamTally, disturb: Callable[[], Awaitable[None]]
    ) -> None:
        """Run the load, and call `disturb` once all streams have started."""
        load = Load(endpoint)
        running = asyncio.create_task(load.run())
        await load.started.wait()
        moment = time.monotonic()
        await disturb()
        tally.take(await running, self.expected)
        tally.seconds.append(load.silence_after(moment))

    def streams(self, name: str, number: int, rounds: int, tally: StreamTally) -> None:
        with self.server() as server:

            async def kill() -> None:
                await _kill(server, name, number)

            for _ in range(rounds):
                asyncio.run(self.disturbed(server.endpoint, tally, kill))

    def http(self, name: str, number: int, rounds: int, tally: StreamTally) -> None:
        """Kill a process, or all, under resumable streams by HTTP."""
        port, endpoint = free_port(), f"tcp://127.0.0.1:{free_port()}"
        journal = self._directory / f"journal-{self._number}"
        flags = [*self._flags, "--port", str(port), "--journal", str(journal)]
        with resumed_server(self._directory, endpoint, flags) as servers:
            if not self._expected_events:
                answers = asyncio.run(ResumedStreams(_url(port), TIMEOUT_S).run())
                assert not [answer for answer in answers if isinstance(answer, Exception)], answers
                self._expected_events = [
                    each for each in answers if not isinstance(each, Exception)
                ]
            for _ in range(rounds):
                asyncio.run(self._resumed_round(servers, port, name, number, tally))

    async def _resumed_round(
        self, servers: Restarts, port: int, name: str, number: int, tally: StreamTally
    ) -> None:
        load = ResumedStreams(_url(port), TIMEOUT_S)
        running = asyncio.create_task(load.run())
        await load.started.wait()
        moment = time.monotonic()
        if name == ALL:
            await asyncio.to_thread(servers.disturb_all, number)
        else:
            await _kill(servers.server, name, number)
        tally.take(await running, self._expected_events)
        tally.seconds.append(load.silence_after(moment))

    def draining(self, name: str, number: int, rounds: int, tally: StreamTally) -> None:
        for _ in range(rounds):
            with self.server() as server:

                async def stop_and_kill(server: Server = server) -> None:
                    pid = server.pid_of(name)  # a gateway without streams leaves at once
                    server.process.send_signal(signal.SIGTERM)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)

                asyncio.run(self.disturbed(server.endpoint, tally, stop_and_kill))

    def loading(self, name: str, number: int, rounds: int, tally: StreamTally) -> None:
        for _ in range(rounds):
            flags = self._next_flags()
            endpoint, log = f"tcp://127.0.0.1:{free_port()}", self._directory / f"l{self._number}"
            process = launch(endpoint, *flags, log=log)
            try:
                server = Server(process, endpoint, log, self._directory, {})
                asyncio.run(_kill(server, name, number))
                killed_at = time.monotonic()
                wait_until_ready(process, log)
                tally.seconds.append(time.monotonic() - killed_at)
                tally.take(asyncio.run(Load(endpoint).run()), self.expected)
                stop(process)
            finally:
                kill_tree(process)

    def at_random(self, names: list[str], seconds: float, tally: StreamTally) -> int:
        """Kill a random process every three seconds under load, and return the number of kills."""
        chosen, kills = random.Random(0), 0

        async def kill_repeatedly(server: Server) -> None:
            nonlocal kills
            while True:
                await asyncio.sleep(KILL_INTERVAL_S)
                name, number = chosen.choice(names), signal.Signals[chosen.choice(SIGNALS)]
                await _kill(server, name, number)
                kills += 1

        async def run(server: Server) -> None:
            killer = asyncio.create_task(kill_repeatedly(server))
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                began = time.monotonic()
                load = Load(server.endpoint, RANDOM_KILLS_TIMEOUT_S)
                tally.take(await load.run(), self.expected)
                tally.seconds.append(time.monotonic() - began)
            killer.cancel()

        with self.server() as server:
            asyncio.run(run(server))
            settle(
                server.endpoint, START_TIMEOUT_S
            )  # the process that was killed last must be back
        return kills


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


async def _kill(server: Server, name: str, number: int) -> None:
    """Send a signal to a process as soon as it exists."""
    pid = await wait_until_async(lambda: server.pid_of(name), START_TIMEOUT_S, lambda: name)
    os.kill(pid, number)


def main(arguments: list[str] | None = None) -> int:
    """Run the matrix, and return 0 if no stream was lost, duplicated or different."""
    parser = argparse.ArgumentParser("python -m tests.faults.kill_matrix")
    parser.add_argument("--rounds", type=int, default=10)
    names = (*PROCESSES, ALL)
    parser.add_argument("--processes", nargs="*", choices=names, default=list(PROCESSES))
    parser.add_argument("--signals", nargs="*", choices=SIGNALS, default=list(SIGNALS))
    parser.add_argument("--moments", nargs="*", choices=MOMENTS, default=list(MOMENTS))
    parser.add_argument("--watchdog", type=float, default=3.0, help="seconds; more if it is busy")
    parser.add_argument(
        "--dp", type=int, default=1, help="replicas; those of the last one are killed"
    )
    parser.add_argument(
        "--random", type=float, metavar="SECONDS", help="kill random processes instead"
    )
    options = parser.parse_args(arguments)
    print(f"{'killed':42}  streams  lost duplicated different  median s  max s", flush=True)
    clean = True
    with tempfile.TemporaryDirectory(prefix="kill-matrix-") as directory:
        matrix = Matrix(Path(directory), options.watchdog, options.dp)
        names = [_of_last_replica(name, options.dp) for name in options.processes]
        if options.random:
            tally = StreamTally()
            kills = matrix.at_random(names, options.random, tally)
            clean = _print(f"{kills} random kills", tally)
        else:
            for name in names:
                for kind in options.signals:
                    for moment in options.moments:
                        if name == ALL and moment != "http":
                            continue
                        tally, number = StreamTally(), signal.Signals[kind]
                        getattr(matrix, moment)(name, number, options.rounds, tally)
                        clean &= _print(f"{name} {kind} {moment}", tally)
    return int(not clean)


def _of_last_replica(name: str, dp: int) -> str:
    is_shared = dp == 1 or name in ("tokenizer_proc", "http_proc")
    return name if is_shared else f"{name}/{dp - 1}"


def _print(title: str, tally: StreamTally) -> bool:
    print(f"{title:42} {tally.row()}", *sorted(tally.errors), sep="\n    ", flush=True)
    return tally.is_clean


if __name__ == "__main__":
    sys.exit(main())
