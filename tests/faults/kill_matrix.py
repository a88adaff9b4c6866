"""Kill every process of a server by each signal at each moment, and count lost streams.

python -m tests.faults.kill_matrix [--rounds 10] [--processes …] [--signals …] [--moments …]
python -m tests.faults.kill_matrix --random 600     # a random process every three seconds
python -m tests.faults.kill_matrix --moments http   # under resumable streams by HTTP
python -m tests.faults.kill_matrix --dp 2           # the processes of one of two replicas
python -m tests.faults.kill_matrix --dp 2 --prefill-replicas 1  # of one replica of either role
python -m tests.faults.kill_matrix --requests encoder ranker …  # answers that are numbers
python -m tests.faults.kill_matrix --requests adapters  # streams of more adapters than places

The streams are greedy, in float32, of a tiny model with random weights. Each is compared with the
undisturbed run: lost (ended with an error), duplicated (longer than expected), different. A process
is killed when each of them has a token, or (moment "prompts") at a random time before that. Those
by HTTP (resumed_streams.py) are compared event by event, and "all" are all processes at once: after
SIGKILL the server is started again with --resume, after SIGSTOP its processes are continued.
Answers that are numbers (number_requests.py) are compared to their last bit.
"""

import argparse
import asyncio
import contextlib
import itertools
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
from typing import Any, NamedTuple, Protocol

from bench.client.server import free_port
from quadriga.client import AsyncClient, SamplingParams
from quadriga.errors import QuadrigaError
from tests.faults.inject import ALL_APART, fault_environment
from tests.faults.number_requests import MODELS, NAME, NumberModel, NumberRequests
from tests.faults.restarts import resumed_server
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
from tests.tiny_models import VOCAB_SIZE, tiny_llama
from tests.waiting import wait_until, wait_until_async

PROCESSES = ("worker_proc", "scheduler_proc", "detok_proc", "tokenizer_proc", "http_proc")
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGSEGV")
PROMPTS = "prompts"
MOMENTS = ("loading", PROMPTS, "streams", "draining", "http")
ALL = "all"
# In place of a name: any process may be killed.
ANY = "any"
STREAMS, CLIENTS = 64, 4
GREEDY = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)
# With the moment "prompts", which are longer, and computed in many steps.
AFTER_PROMPT = SamplingParams(temperature=0, max_new_tokens=32, ignore_eos=True)
PROMPT_TOKENS = range(100, 600)
PROMPT_FLAGS = ("--chunked-prefill-size", "32")
# A stream that takes longer counts as lost. Under repeated kills restarts are delayed by seconds.
TIMEOUT_S = 60.0
RANDOM_KILLS_TIMEOUT_S = 600.0
KILL_INTERVAL_S = 3.0

# Ids of tokens, or numbers of events; and the text, or the bytes of the events.
Answer = tuple[list[int], str | bytes]

TOKENS, ADAPTERS = "tokens", "adapters"


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


class AnyLoad(Protocol):
    """Requests of a server, which are sent at once.

    Attributes:
        started: set when all requests are under way.
    """

    started: asyncio.Event

    async def run(self) -> Sequence[Answer | Exception]:
        """Return the answer of each request, or what went wrong."""

    def silence_after(self, moment: float) -> float:
        """Return the seconds from a moment to the end of the longest silence after it."""


class Load:
    """Streams of several clients.

    Attributes:
        started: Set when each stream has a token.
        arrivals: Arrival times of chunks.
    """

    sampling = GREEDY

    def __init__(
        self,
        endpoint: str,
        timeout_s: float = TIMEOUT_S,
        adapters: Sequence[str] = ("",),
        num_streams: int = STREAMS,
    ) -> None:
        self._endpoint = endpoint
        self._adapters = adapters
        self._num_streams = num_streams
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
                    *(self._stream(clients[n % CLIENTS], n) for n in range(self._num_streams))
                )
            )
        finally:
            self.started.set()
            await asyncio.gather(*(client.close() for client in clients))

    async def _stream(self, client: AsyncClient, number: int) -> "Answer | QuadrigaError":
        ids: list[int] = []
        text = ""
        try:
            prompt = self.prompt(number)
            adapter = self._adapters[number % len(self._adapters)]
            stream = client.stream(prompt, self.sampling, timeout=self._timeout_s, adapter=adapter)
            async for chunk in stream:
                self.arrivals.append(time.monotonic())
                self._streaming += not ids and bool(chunk.token_ids)
                ids += chunk.token_ids
                text += chunk.text
                if self._streaming == self._num_streams:
                    self.started.set()
        except QuadrigaError as error:
            return error
        return ids, text

    def prompt(self, number: int) -> list[int]:
        """Return the prompt of a stream."""
        return [3 + number] * (1 + number % 40)

    def silence_after(self, moment: float) -> float:
        """Return the seconds from a moment to the end of the longest silence after it."""
        later = [moment, *sorted(t for t in self.arrivals if t > moment)]
        gaps = [(later[n + 1] - later[n], later[n + 1]) for n in range(len(later) - 1)]
        return max(gaps)[1] - moment if gaps else 0.0


class PromptLoad(Load):
    """Streams with longer prompts, of which no two begin alike.

    Args:
        endpoint: of the server.
        adapters: of the streams in turn.
        num_streams: how many there are.
        seed: of the prompts.
    """

    sampling = AFTER_PROMPT

    def __init__(self, endpoint: str, adapters: Sequence[str], num_streams: int, seed: int) -> None:
        super().__init__(endpoint, adapters=adapters, num_streams=num_streams)
        self._seed = seed

    def prompt(self, number: int) -> list[int]:
        """Return the prompt of a stream."""
        chosen = random.Random(f"{self._seed} {number}")
        return chosen.choices(range(3, VOCAB_SIZE), k=chosen.choice(PROMPT_TOKENS))


class Reference(NamedTuple):
    """What streams give undisturbed.

    Attributes:
        answers: of each stream.
        started_after_s: seconds until each had a token.
    """

    answers: Sequence[Answer]
    started_after_s: float


class TokenWork:
    """Streams of tokens, of a tiny Llama.

    Args:
        num_streams: streams by the public socket at one time.
    """

    def __init__(self, num_streams: int = STREAMS) -> None:
        self._num_streams = num_streams

    def flags(self, directory: Path) -> list[str]:
        """Write the model, and return the flags of its server."""
        model = tiny_llama(directory, max_position_embeddings=1024)
        return ["--model", str(model), "--max-total-tokens", "16384"]

    def load(
        self, endpoint: str, _url: str, _killed: str, timeout_s: float, _is_stopping: bool = False
    ) -> AnyLoad:
        """Return streams by the public socket."""
        return Load(endpoint, timeout_s, num_streams=self._num_streams)

    def prompt_load(self, endpoint: str, seed: int) -> PromptLoad:
        """Return streams with longer prompts."""
        return PromptLoad(endpoint, ("",), self._num_streams, seed)

    def resumed_load(self, _endpoint: str, url: str) -> AnyLoad:
        """Return streams that go on at a server that resumes."""
        return ResumedStreams(url, TIMEOUT_S)


class AdapterWork(TokenWork):
    """Streams of tokens of a tiny Llama, and of more adapters than the server has places for."""

    NAMES = ("", "a1", "a2", "a3", "a4", "a5")
    PLACES = 3

    def flags(self, directory: Path) -> list[str]:
        """Write the model and the adapters, and return the flags of its server."""
        from tests.tiny_adapters import make_adapter

        flags = super().flags(directory)
        adapters = [
            f"{name}={make_adapter(directory, directory / name, seed, 2 + 3 * seed)}"
            for seed, name in enumerate(self.NAMES)
            if name
        ]
        flags += ["--served-model-name", NAME, "--lora-modules", ",".join(adapters)]
        return [*flags, "--max-loras", str(self.PLACES)]

    def load(
        self, endpoint: str, _url: str, _killed: str, timeout_s: float, _is_stopping: bool = False
    ) -> AnyLoad:
        """Return streams by the public socket."""
        return Load(endpoint, timeout_s, self.NAMES, self._num_streams)

    def prompt_load(self, endpoint: str, seed: int) -> PromptLoad:
        """Return streams with longer prompts."""
        return PromptLoad(endpoint, self.NAMES, self._num_streams, seed)

    def resumed_load(self, _endpoint: str, url: str) -> AnyLoad:
        """Return streams that go on at a server that resumes."""
        return ResumedStreams(url, TIMEOUT_S, models=[name or NAME for name in self.NAMES])


class NumberWork:
    """Requests whose answers are numbers.

    Args:
        model: what is asked.
    """

    def __init__(self, model: NumberModel) -> None:
        self._model = model
        # The kills of several rounds come at different moments.
        self._num_before = itertools.cycle((1, 6, 12, 20))

    def flags(self, directory: Path) -> list[str]:
        """Write the model, and return the flags of its server."""
        flags = ["--model", str(self._model.make(directory)), "--served-model-name", NAME]
        return [*flags, *self._model.flags]

    def load(
        self, endpoint: str, url: str, killed: str, timeout_s: float, is_stopping: bool = False
    ) -> AnyLoad:
        """Return requests that are repeated only where the gateway is killed.

        A server that stops takes no new requests, so that none can be repeated.
        """
        is_broken = killed in ("http_proc", ANY)
        by_http = not (is_broken and is_stopping)
        return NumberRequests(
            self._model, endpoint, url, timeout_s, is_broken, by_http, is_stopping,
            next(self._num_before),
        )  # fmt: skip

    def resumed_load(self, endpoint: str, url: str) -> AnyLoad:
        """Return requests that are repeated at a server that resumes."""
        return self.load(endpoint, url, ANY, TIMEOUT_S)


WORKS: dict[str, Callable[[int], TokenWork]] = {TOKENS: TokenWork, ADAPTERS: AdapterWork}


class Matrix:
    """The servers whose processes are killed, and their undisturbed answers.

    Args:
        directory: of models and logs.
        work: the requests.
        watchdog_s: seconds.
        dp: number of replicas.
        num_prefill: number of replicas that compute prompts for the others, however short they are.
    """

    def __init__(
        self,
        directory: Path,
        work: TokenWork | NumberWork,
        watchdog_s: float = 3.0,
        dp: int = 1,
        num_prefill: int = 0,
    ) -> None:
        self._directory = directory
        self.work = work
        self._number = 0
        self._environment: dict[str, str] = {}
        self._port = 0
        self._expected_events: Sequence[Answer] = []
        self._references: list[Reference] = []
        self._chosen = random.Random(0)
        self._flags = [*work.flags(directory / "model"), "--dtype", "float32"]
        self._flags += ["--worker-threads", "1"]
        self._flags += ["--max-restarts", "1000000", "--dp", str(dp)]
        self._flags += ["--watchdog-timeout", str(watchdog_s * dp)]
        if num_prefill:
            self._flags += ["--prefill-replicas", str(num_prefill), "--page-size", "4"]
            self._environment = fault_environment(ALL_APART)
        with self.server() as server:
            load = self._load(server.endpoint, "", START_TIMEOUT_S)
            self.expected = _undisturbed(asyncio.run(load.run()))

    def _next_flags(self) -> list[str]:
        self._number += 1
        self._port = free_port()
        return [*self._flags, "--port", str(self._port)]

    def _load(
        self, endpoint: str, killed: str, timeout_s: float = TIMEOUT_S, is_stopping: bool = False
    ) -> AnyLoad:
        return self.work.load(endpoint, _url(self._port), killed, timeout_s, is_stopping)

    @contextmanager
    def server(self, *more_flags: str) -> Iterator[Server]:
        flags, environment = self._next_flags(), self._environment
        log = self._directory / f"log-{self._number}"
        with running_server(log, *flags, *more_flags, environment=environment) as server:
            yield server

    def streams(self, name: str, number: int, rounds: int, tally: StreamTally) -> None:
        with self.server() as server:
            for _ in range(rounds):
                load = self._load(server.endpoint, name)
                _disturb(server, name, number, load, tally, self.expected)

    def prompts(self, name: str, number: int, rounds: int, tally: StreamTally) -> None:
        """Kill a process at a random time until each stream has a token."""
        self._compute_references(rounds)
        with self.server(*PROMPT_FLAGS) as server:
            for seed, reference in enumerate(self._references[:rounds]):
                load = self._prompt_load(server, seed)
                after_s = self._chosen.uniform(0, reference.started_after_s)
                _disturb(server, name, number, load, tally, reference.answers, after_s)

    def _compute_references(self, rounds: int) -> None:
        """Compute what the streams of each round give undisturbed, at a server of their own."""
        if len(self._references) >= rounds:
            return
        with self.server(*PROMPT_FLAGS) as server:
            for seed in range(len(self._references), rounds):
                self._references.append(asyncio.run(_timed(self._prompt_load(server, seed))))

    def _prompt_load(self, server: Server, seed: int) -> PromptLoad:
        assert isinstance(self.work, TokenWork)
        return self.work.prompt_load(server.endpoint, seed)

    def http(self, name: str, number: int, rounds: int, tally: StreamTally) -> None:
        """Kill a process, or all, of a server that resumes."""
        port, endpoint = free_port(), f"tcp://127.0.0.1:{free_port()}"
        journal = self._directory / f"journal-{self._number}"
        flags = [*self._flags, "--port", str(port), "--journal", str(journal)]
        with resumed_server(self._directory, endpoint, flags, self._environment) as servers:
            if not self._expected_events:
                load = self.work.resumed_load(endpoint, _url(port))
                self._expected_events = _undisturbed(asyncio.run(load.run()))

            async def disturb_all() -> None:
                await asyncio.to_thread(servers.disturb_all, number)

            for _ in range(rounds):
                load = self.work.resumed_load(endpoint, _url(port))
                if name == ALL:
                    asyncio.run(_disturbed(load, tally, disturb_all, self._expected_events))
                else:
                    server, expected = servers.server, self._expected_events
                    _disturb(server, name, number, load, tally, expected)

    def draining(self, name: str, number: int, rounds: int, tally: StreamTally) -> None:
        for _ in range(rounds):
            with self.server() as server:

                async def stop_and_kill(server: Server = server) -> None:
                    pid = server.pid_of(name)  # a gateway without streams leaves at once
                    server.process.send_signal(signal.SIGTERM)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)

                load = self._load(server.endpoint, name, is_stopping=True)
                asyncio.run(_disturbed(load, tally, stop_and_kill, self.expected))

    def loading(self, name: str, number: int, rounds: int, tally: StreamTally) -> None:
        for _ in range(rounds):
            flags = self._next_flags()
            endpoint, log = f"tcp://127.0.0.1:{free_port()}", self._directory / f"l{self._number}"
            process = launch(endpoint, *flags, log=log, environment=self._environment)
            try:
                server = Server(process, endpoint, log, self._directory, {})
                asyncio.run(_kill(server, name, number))
                killed_at = time.monotonic()
                wait_until_ready(process, log)
                tally.seconds.append(time.monotonic() - killed_at)
                tally.take(asyncio.run(self._load(endpoint, name).run()), self.expected)
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
                load = self._load(server.endpoint, ANY, RANDOM_KILLS_TIMEOUT_S)
                tally.take(await load.run(), self.expected)
                tally.seconds.append(time.monotonic() - began)
            killer.cancel()

        with self.server() as server:
            asyncio.run(run(server))
            settle(
                server.endpoint, START_TIMEOUT_S
            )  # the process that was killed last must be back
        return kills


def _undisturbed(answers: Sequence[Answer | Exception]) -> Sequence[Answer]:
    """Return the answers of a run without kills."""
    errors = [each for each in answers if isinstance(each, Exception)]
    assert not errors, f"the undisturbed run failed: {errors}"
    return [each for each in answers if not isinstance(each, Exception)]


async def _timed(load: AnyLoad) -> Reference:
    """Run a load undisturbed."""
    began_at = time.monotonic()
    running = asyncio.create_task(load.run())
    await load.started.wait()
    started_after_s = time.monotonic() - began_at
    return Reference(_undisturbed(await running), started_after_s)


async def _disturbed(
    load: AnyLoad,
    tally: StreamTally,
    disturb: Callable[[], Awaitable[None]],
    expected: Sequence[Answer],
    after_s: float | None = None,
) -> None:
    """Run a load, and call `disturb` once all requests are under way, or sooner after `after_s`."""
    running = asyncio.create_task(load.run())
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(load.started.wait(), after_s)
    assert not running.done(), "all requests had ended before the kill"
    moment = time.monotonic()
    await disturb()
    # Fewer, where the load has left requests out.
    answers = await running
    tally.take(answers, expected[: len(answers)])
    tally.seconds.append(load.silence_after(moment))


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


async def _kill(server: Server, name: str, number: int) -> int:
    """Send a signal to a process as soon as it exists. Return its pid."""
    pid = await wait_until_async(lambda: server.pid_of(name), START_TIMEOUT_S, lambda: name)
    os.kill(pid, number)
    return pid


def _disturb(
    server: Server,
    name: str,
    number: int,
    load: AnyLoad,
    tally: StreamTally,
    expected: Sequence[Answer],
    after_s: float | None = None,
) -> None:
    """Kill a process under a load, as in _disturbed, and wait until it is back."""
    killed = 0

    async def kill() -> None:
        nonlocal killed
        killed = await _kill(server, name, number)

    asyncio.run(_disturbed(load, tally, kill, expected, after_s))
    wait_until(lambda: server.pid_of(name) not in (0, killed), START_TIMEOUT_S, lambda: name)
    wait_until(lambda: _is_whole(settle(server.endpoint, START_TIMEOUT_S)), START_TIMEOUT_S)


def _is_whole(info: dict[str, Any]) -> bool:
    """Return whether every replica runs; of one whose process is restarted there is no info."""
    replicas = info.get("replicas", [info])
    return len(replicas) == info.get("num_replicas", 1) and all(one["ready"] for one in replicas)


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
        "--dp",
        type=int,
        default=1,
        help="replicas; the processes of the last one are killed, with roles also of the first one",
    )
    parser.add_argument("--prefill-replicas", type=int, default=0, help="as of a server")
    parser.add_argument("--streams", type=int, default=STREAMS, help=f"default: {STREAMS}")
    parser.add_argument("--replica", type=int, help="the processes of this one are killed instead")
    parser.add_argument(
        "--random", type=float, metavar="SECONDS", help="kill random processes instead"
    )
    parser.add_argument(
        "--requests", nargs="*", choices=(TOKENS, ADAPTERS, *MODELS), default=[TOKENS],
        help="streams of tokens, or requests of a kind of models whose answers are numbers",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    print(f"{'killed':42}  streams  lost duplicated different  median s  max s", flush=True)
    clean = True
    for kind in options.requests:
        work = WORKS[kind](options.streams) if kind in WORKS else NumberWork(MODELS[kind])
        with tempfile.TemporaryDirectory(prefix="kill-matrix-") as directory:
            matrix = Matrix(
                Path(directory), work, options.watchdog, options.dp, options.prefill_replicas
            )
            clean &= _run(matrix, options, "" if kind == TOKENS else f"{kind}: ")
    return int(not clean)


def _run(matrix: Matrix, options: argparse.Namespace, title: str) -> bool:
    """Print a row for each case, and return whether no request was lost or wrong."""
    replicas = [options.dp - 1] if options.replica is None else [options.replica]
    if options.prefill_replicas and options.replica is None:
        replicas.insert(0, 0)
    processes = list(
        dict.fromkeys(
            _of_replica(name, options.dp, replica)
            for replica in replicas
            for name in options.processes
        )
    )
    if options.random:
        tally = StreamTally()
        kills = matrix.at_random(processes, options.random, tally)
        return _print(f"{title}{kills} random kills", tally)
    clean = True
    has_prompts = isinstance(matrix.work, TokenWork)
    for name, kind, moment in itertools.product(processes, options.signals, options.moments):
        if (name == ALL and moment != "http") or (moment == PROMPTS and not has_prompts):
            continue
        tally, number = StreamTally(), signal.Signals[kind]
        getattr(matrix, moment)(name, number, options.rounds, tally)
        clean &= _print(f"{title}{name} {kind} {moment}", tally)
    return clean


def _of_replica(name: str, dp: int, replica: int) -> str:
    """Return the name of a process of a replica."""
    is_shared = dp == 1 or name in ("tokenizer_proc", "http_proc", ALL)
    return name if is_shared else f"{name}/{replica}"


def _print(title: str, tally: StreamTally) -> bool:
    print(f"{title:42} {tally.row()}", *sorted(tally.errors), sep="\n    ", flush=True)
    return tally.is_clean


if __name__ == "__main__":
    sys.exit(main())
