"""Kill the processes of two models that take turns, at each moment of a swap; count lost streams.

python -m tests.faults.swap_kills [--times 1] [--seed 0] [--processes …] [--signals …] [--moments …]
python -m tests.faults.swap_kills --dtype bfloat16

The memory budget holds one of two tiny models, and both have streams by ZeroMQ and by HTTP. While
they take turns, a process is killed or stopped at a moment of a swap, seen from the first model:
while it is loaded again (`loading`), just after that (`resumed`), in the middle of its turn
(`loaded`), while it is suspended (`pausing`), while the other one is loaded (`other-loading`) and
computes (`other-loaded`). Every combination has its turn, in an order by the seed. Each stream is
compared with that of a server that holds both models: lost, duplicated or different ones are none.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

from bench.client.server import free_port
from quadriga.client import AsyncClient, SamplingParams
from quadriga.errors import QuadrigaError
from tests.faults.kill_matrix import Answer, StreamTally
from tests.faults.resumed_streams import ResumedStreams
from tests.server import Server, running_server
from tests.tiny_models import tiny_gpt2, tiny_llama

MODELS = FIRST, SECOND = "first", "second"
GATEWAY, WORKER = "http_proc", "worker_proc"
PROCESSES = (WORKER, "scheduler_proc", "detok_proc", "tokenizer_proc", GATEWAY)
SIGNALS = ("SIGKILL", "SIGSTOP")
# The event that begins each moment, and the longest time from then to the signal.
MOMENTS = {
    "loading": (f"model {FIRST} is being loaded", 1.0),
    "resumed": (f"model {FIRST} is loaded", 0.01),
    "loaded": (f"model {FIRST} is loaded", 0.8),
    "pausing": (f"model {FIRST} is suspended", 0.01),
    "other-loading": (f"model {SECOND} is being loaded", 1.0),
    "other-loaded": (f"model {SECOND} is loaded", 0.8),
}
TURN_S = 0.6
# What the launcher expects of a model with a pool of 0.1 % of the memory is beyond a half of it.
BUDGET_GIB = 0.24
STREAMS, CLIENTS, HTTP_STREAMS = 80, 2, 10
GREEDY = SamplingParams(temperature=0, max_new_tokens=160, ignore_eos=True)
# A stream that takes longer counts as lost: each kill may cost the watchdog's time and a load.
TIMEOUT_S = 240.0
LOOK_S = 0.005
KILLS_PER_ROUND = 8


class Kill(NamedTuple):
    """A signal to a process at a moment."""

    moment: str
    process: str
    signal: str


@dataclass
class Log:
    """The log of a server, while it grows."""

    path: Path
    _place: int = 0

    def skip(self) -> None:
        """Leave out what was logged until now."""
        self._place = self.path.stat().st_size

    def has(self, text: str) -> bool:
        """Return whether what was logged since the last call contains a text."""
        with self.path.open("rb") as log:
            log.seek(self._place)
            new = log.read()
        self._place += len(new)
        return text.encode() in new


class TwoLoads:
    """Streams of both models, by ZeroMQ and by HTTP.

    Args:
        endpoint: of the server.
        port: of its gateway.
        num_streams: by ZeroMQ, of each model.
    """

    def __init__(self, endpoint: str, port: int, num_streams: int) -> None:
        self._endpoint, self._url = endpoint, f"http://127.0.0.1:{port}"
        self._num_streams = num_streams

    async def run(self) -> list[Answer | Exception]:
        """Return the answers: of each model those by ZeroMQ, then those by HTTP."""
        found = await asyncio.gather(*(self._of_model(name) for name in MODELS))
        return [answer for answers in found for answer in answers]

    async def _of_model(self, name: str) -> list[Answer | Exception]:
        clients = [
            AsyncClient(self._endpoint, TIMEOUT_S, TIMEOUT_S, model=name) for _ in range(CLIENTS)
        ]
        by_http = ResumedStreams(self._url, TIMEOUT_S, HTTP_STREAMS, [name])
        try:
            streams = (
                self._stream(clients[number % CLIENTS], number)
                for number in range(self._num_streams)
            )
            found = await asyncio.gather(asyncio.gather(*streams), by_http.run())
            return [answer for answers in found for answer in answers]
        finally:
            await asyncio.gather(*(client.close() for client in clients))

    async def _stream(self, client: AsyncClient, number: int) -> Answer | Exception:
        ids: list[int] = []
        text = ""
        try:
            prompt = [3 + number] * (1 + number % 40)
            async for chunk in client.stream(prompt, GREEDY, timeout=TIMEOUT_S):
                ids += chunk.token_ids
                text += chunk.text
        except QuadrigaError as error:
            return error
        return ids, text


class SwapKills:
    """Servers whose models take turns, and the answers of one where they need not.

    Args:
        directory: for models, journals and logs.
        dtype: number format of the models.
        watchdog_s: seconds after which a process that stands still is replaced.
        num_streams: by ZeroMQ, of each model.
    """

    def __init__(
        self, directory: Path, dtype: str = "float32", watchdog_s: float = 3.0,
        num_streams: int = STREAMS,
    ) -> None:  # fmt: skip
        self._directory, self._num_streams = directory, num_streams
        models = {
            FIRST: {"model": str(tiny_llama(directory / FIRST))},
            SECOND: {"model": str(tiny_gpt2(directory / SECOND, n_positions=256))},
        }
        (directory / "models.yaml").write_text(json.dumps(models))
        self._flags = ["--models", str(directory / "models.yaml"), "--dtype", dtype]
        self._flags += ["--worker-threads", "1", "--mem-fraction-static", "0.001"]
        self._flags += ["--max-batch-size", "2", "--max-restarts", "1000000"]
        self._flags += ["--watchdog-timeout", str(watchdog_s)]
        with self._server("undisturbed") as (server, port):
            answers = asyncio.run(TwoLoads(server.endpoint, port, num_streams).run())
        wrong = [answer for answer in answers if isinstance(answer, Exception)]
        assert not wrong, f"undisturbed: {wrong}"
        self.expected = [answer for answer in answers if not isinstance(answer, Exception)]

    @contextmanager
    def _server(self, name: str, *flags: str) -> Iterator[tuple[Server, int]]:
        port, log = free_port(), self._directory / f"{name}.log"
        endpoint = f"ipc://{self._directory}/{name}"
        journal = ["--journal", str(self._directory / f"{name}-journal")]
        every = [*self._flags, "--port", str(port), *journal, *flags]
        with running_server(log, *every, endpoint=endpoint) as server:
            yield server, port

    def run(
        self, kills: Sequence[Kill], chance: random.Random, max_rounds: int
    ) -> Iterator[tuple[list[Kill], StreamTally]]:
        """Yield the kills of each round, and what became of its streams.

        Args:
            kills: in this order, as the moments come.
            chance: draws the time within a moment.
            max_rounds: kills that are left after so many are not carried out.
        """
        left = list(kills)
        budget = ["--model-memory", str(BUDGET_GIB), "--model-turn", str(TURN_S)]
        with self._server("turns", *budget) as (server, port):
            for _ in range(max_rounds):
                if not left:
                    return
                tally = StreamTally()
                done = asyncio.run(self._round(server, port, left, chance, tally))
                yield done, tally

    async def _round(
        self, server: Server, port: int, left: list[Kill], chance: random.Random,
        tally: StreamTally,
    ) -> list[Kill]:  # fmt: skip
        """Run the streams once, with some kills, which leave the list of those that are left."""
        done: list[Kill] = []
        began_at = time.monotonic()
        killer = asyncio.create_task(self._kill(server, left, chance, done))
        try:
            found = await TwoLoads(server.endpoint, port, self._num_streams).run()
        finally:
            killer.cancel()
        tally.take(found, self.expected)
        tally.seconds.append(time.monotonic() - began_at)
        return done

    async def _kill(
        self, server: Server, left: list[Kill], chance: random.Random, done: list[Kill]
    ) -> None:
        log = Log(server.log)
        log.skip()
        while left and len(done) < KILLS_PER_ROUND:
            kill = left[0]
            text, longest_s = MOMENTS[kill.moment]
            while not log.has(text):
                await asyncio.sleep(LOOK_S)
            await asyncio.sleep(chance.random() * longest_s)
            if (pid := server.pid_of(_name_of(kill))) == 0:
                continue  # over by now: at the next such moment
            os.kill(pid, signal.Signals[kill.signal])
            log.skip()
            done.append(left.pop(0))


def _name_of(kill: Kill) -> str:
    """Return the name of the process that is killed: the worker is that which there is."""
    if kill.process == GATEWAY:
        return GATEWAY
    is_others = kill.process == WORKER and kill.moment.startswith("other-")
    return f"{kill.process}@{SECOND if is_others else FIRST}"


def suspensions(log: str) -> int:
    """Return how often a busy model gave its turn up."""
    return len(re.findall("is suspended with", log))


def main(arguments: list[str] | None = None) -> int:
    """Kill at each moment, and return 0 if no stream was lost, duplicated or different."""
    parser = argparse.ArgumentParser("python -m tests.faults.swap_kills")
    parser.add_argument("--times", type=int, default=1, help="of each combination")
    parser.add_argument("--rounds", type=int, default=1000, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", nargs="*", choices=PROCESSES, default=list(PROCESSES))
    parser.add_argument("--signals", nargs="*", choices=SIGNALS, default=list(SIGNALS))
    parser.add_argument("--moments", nargs="*", choices=MOMENTS, default=list(MOMENTS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", type=int, default=STREAMS, help="by ZeroMQ, of each model")
    parser.add_argument("--watchdog", type=float, default=3.0, help="seconds; more if it is busy")
    options = parser.parse_args(arguments)
    chance = random.Random(options.seed)
    kills: list[Kill] = []
    for _ in range(options.times):
        of_one = [
            Kill(*each) for each in product(options.moments, options.processes, options.signals)
        ]
        chance.shuffle(of_one)
        kills += of_one
    print("round  kills  streams  lost duplicated different  median s  max s", flush=True)
    clean = True
    with tempfile.TemporaryDirectory(prefix="swap-kills-") as directory:
        swaps = SwapKills(Path(directory), options.dtype, options.watchdog, options.streams)
        num_done = number = 0
        for number, (done, tally) in enumerate(swaps.run(kills, chance, options.rounds), 1):
            num_done += len(done)
            clean &= tally.is_clean
            print(f"{number:5} {len(done):6} {tally.row()}", flush=True)
            if not tally.is_clean:
                print("    kills:", *(" ".join(kill) for kill in done), sep="\n      ")
                print("    errors:", *sorted(tally.errors), sep="\n      ", flush=True)
        num_swaps = suspensions((Path(directory) / "turns.log").read_text())
    print(
        f"{num_done} of {len(kills)} kills in {number} rounds, a busy model suspended {num_swaps}"
        " times"
    )
    return int(not clean or num_done < len(kills))


if __name__ == "__main__":
    sys.exit(main())
