"""What it costs to obey JSON schemas: `python -m bench.structured`.

Requests with a schema each, some at a time, in turns with the same requests without: those give as
many tokens each as the first ones did. Every answer is judged by a validator that has nothing to do
with the grammars. Grammars are compiled as they come: the first of each schema counts.

Without --endpoint the bench starts a server of its own, which takes the server's flags. Exit codes:
0 all answers valid and the throughput within the bound, 1 not so, 2 bad flags, 3 no server.
"""

import argparse
import asyncio
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.client.server import OwnServer
from bench.load.schemas import complaint, schemas
from bench.load.workload import word
from bench.metrics.percentiles import MS, percentile
from bench.serving import (
    CONNECT_TIMEOUT_S,
    EXIT_INTERRUPTED,
    EXIT_NO_SERVER,
    EXIT_OK,
    EXIT_USAGE,
    START_CONNECT_TIMEOUT_S,
    START_INFO_TIMEOUT_S,
    run_until_signal,
)
from quadriga.client import AsyncClient, Completion, SamplingParams
from quadriga.config import server_config as server_flags
from quadriga.config.flags import positive
from quadriga.errors import ConfigError, QuadrigaError

BOUND = 0.85
"""Of the throughput without schemas."""
EXIT_MISSED = 1
MAX_TOKENS = 768
WARM_UP = 16
WARM_UP_NUMBERS, FREE_NUMBERS = 1_000_000, 2_000_000
"""Where their tasks are numbered from: no two prompts are alike, or one would be served from the
prefix cache."""
SHOWN_WRONG = 5


@dataclass(frozen=True, slots=True)
class Task:
    """One request. number: draws its prompt and seed."""

    number: int
    schema: dict[str, Any]

    @property
    def prompt(self) -> Any:
        fields = ", ".join(self.schema["properties"])
        text = f"{word(self.number)}: make up a JSON object with the fields {fields}."
        return [{"role": "user", "content": text}]

    def params(self, tokens: int | None) -> SamplingParams:
        """tokens: None: obey the schema; else give so many, whatever they are."""
        if tokens is None:
            return SamplingParams(
                json_schema=self.schema,
                max_new_tokens=MAX_TOKENS,
                temperature=0.7,
                top_p=1.0,
                seed=self.number,
            )
        return SamplingParams(
            max_new_tokens=tokens, temperature=0.7, top_p=1.0, seed=self.number, ignore_eos=True
        )


@dataclass(frozen=True, slots=True)
class Pass:
    """Some tasks, run to their end. seconds: from the first submit to the last end. steps: of the
    server's worker."""

    completions: list[Completion]
    seconds: float
    steps: int

    @property
    def tokens(self) -> int:
        return sum(completion.usage.completion_tokens for completion in self.completions)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def first_tokens(self) -> list[float]:
        """TTFT by the server's clock, in ms."""
        times = [completion.timings for completion in self.completions]
        return [(t.first_token - t.received) * MS for t in times]


async def run_pass(
    client: AsyncClient, tasks: Sequence[Task], lengths: Sequence[int | None], concurrency: int
) -> Pass:
    """So many tasks at a time. QuadrigaError where a request fails."""
    room = asyncio.Semaphore(concurrency)

    async def one(task: Task, tokens: int | None) -> Completion:
        async with room:
            return await client.generate(task.prompt, task.params(tokens))

    steps_before = (await client.info())["steps"]
    began = time.perf_counter()
    jobs = [one(task, tokens) for task, tokens in zip(tasks, lengths, strict=True)]
    completions = await asyncio.gather(*jobs)
    seconds = time.perf_counter() - began
    return Pass(completions, seconds, (await client.info())["steps"] - steps_before)


async def measure(client: AsyncClient, arguments: Namespace) -> "Measured":
    """Warm up, then all turns."""
    others = schemas(WARM_UP, arguments.seed + 1)
    await _turn(client, _tasks(WARM_UP, others, WARM_UP_NUMBERS), arguments.concurrency)
    tasks = _tasks(arguments.num_requests, schemas(arguments.num_schemas, arguments.seed))
    size = -(-len(tasks) // arguments.turns)
    turns: list[TimedTurn] = []
    for first in range(0, len(tasks), size):
        turn = await _turn(client, tasks[first : first + size], arguments.concurrency)
        print(f"turn {len(turns) + 1}: {turn.shown}", file=sys.stderr, flush=True)
        turns.append(turn)
    return Measured(tasks, turns)


def _tasks(count: int, made: Sequence[dict[str, Any]], first: int = 0) -> list[Task]:
    return [Task(first + number, made[number % len(made)]) for number in range(count)]


async def _turn(client: AsyncClient, tasks: Sequence[Task], concurrency: int) -> "TimedTurn":
    obeying = await run_pass(client, tasks, [None] * len(tasks), concurrency)
    lengths = [completion.usage.completion_tokens for completion in obeying.completions]
    fresh = [Task(FREE_NUMBERS + task.number, task.schema) for task in tasks]
    return TimedTurn(obeying, await run_pass(client, fresh, lengths, concurrency))


@dataclass(frozen=True, slots=True)
class TimedTurn:
    """The same load twice: with schemas, and free."""

    obeying: Pass
    free: Pass

    @property
    def ratio(self) -> float:
        return self.obeying.rate / self.free.rate

    @property
    def shown(self) -> str:
        return f"{self.obeying.rate:.0f} tok/s with schemas, {self.free.rate:.0f} without"


@dataclass(frozen=True, slots=True)
class Measured:
    """All turns, and the tasks of all of them in order."""

    tasks: list[Task]
    turns: list[TimedTurn]

    def invalid(self) -> list[str]:
        """What is wrong with each answer that does not obey its schema."""
        answers = [answer for turn in self.turns for answer in turn.obeying.completions]
        found = (complaint(t.schema, a) for t, a in zip(self.tasks, answers, strict=True))
        return [text for text in found if text]

    def rate(self, which: str) -> float:
        """Tokens per second over all turns."""
        passes = [getattr(turn, which) for turn in self.turns]
        return float(sum(p.tokens for p in passes) / sum(p.seconds for p in passes))

    def steps(self, which: str) -> int:
        return sum(getattr(turn, which).steps for turn in self.turns)

    @property
    def ratio(self) -> float:
        return self.rate("obeying") / self.rate("free")


def block(arguments: Namespace, info: dict[str, Any], measured: Measured) -> str:
    """The figures."""
    wrong, turns = measured.invalid(), measured.turns
    count, ratios = len(measured.tasks), [turn.ratio for turn in turns]
    lines = [
        "=== structured output ===",
        f"Model: {info['model']} ({info['dtype']}, {info['device']}, {info['attention_backend']})",
        f"Requests: {count} of {arguments.num_schemas} schemas, {arguments.concurrency} at a time,"
        f" in {len(turns)} turns",
        f"Valid answers: {count - len(wrong)} of {count} ({1 - len(wrong) / count:.1%})",
        f"Tokens of an answer: {sum(turn.obeying.tokens for turn in turns) / count:.1f} on average",
        f"TTFT p50/p99, schemas: {_first_tokens([turn.obeying for turn in turns])}",
        f"TTFT p50/p99, free: {_first_tokens([turn.free for turn in turns])}",
        f"Throughput, schemas: {measured.rate('obeying'):.1f} tokens/s",
        f"Throughput, free: {measured.rate('free'):.1f} tokens/s",
        f"Steps: {measured.steps('obeying')} with schemas, {measured.steps('free')} free",
        f"Ratio: {measured.ratio:.3f} over all, {percentile(ratios, 50):.3f} in the median turn"
        f" ({min(ratios):.3f} to {max(ratios):.3f})",
    ]
    return "\n".join([*lines, *(f"invalid: {text}" for text in wrong[:SHOWN_WRONG])])


def _first_tokens(passes: Sequence[Pass]) -> str:
    times = [time for one in passes for time in one.first_tokens()]
    return f"{percentile(times, 50):.1f}/{percentile(times, 99):.1f} ms"


# --- the command ----------------------------------------------------------------------------------


async def bench(arguments: Namespace) -> int:
    """Start or find the server, measure, print; the exit code."""
    async with AsyncExitStack() as stack:
        endpoint = await _server(arguments, stack)
        client = await stack.enter_async_context(
            AsyncClient(endpoint, CONNECT_TIMEOUT_S, curve_dir=_keys(arguments))
        )
        info = await client.info()
        measured = await measure(client, arguments)
    print(block(arguments, info, measured))
    missed = measured.ratio < BOUND and not arguments.report_only
    return EXIT_MISSED if measured.invalid() or missed else EXIT_OK


def _keys(arguments: Namespace) -> str:
    """With which the bench connects: those of its own server, or a client's."""
    return str(arguments.server_config.front_door.curve_dir)


async def _server(arguments: Namespace, stack: AsyncExitStack) -> str:
    """The endpoint of a server that is ready."""
    if "endpoint" in arguments:
        return str(arguments.endpoint)
    server = stack.enter_context(OwnServer(arguments.server_config, arguments.server_log))

    async def info() -> dict[str, Any]:
        keys = _keys(arguments)
        async with AsyncClient(server.endpoint, START_CONNECT_TIMEOUT_S, curve_dir=keys) as client:
            return await client.info(START_INFO_TIMEOUT_S)

    await server.wait_ready(info)
    return server.endpoint


def _parse(argv: Sequence[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.structured", usage="%(prog)s [FLAGS]", description=__doc__.split("\n")[0]
    )
    group = parser.add_argument_group("the load")
    for name, default, what in (
        ("--num-requests", 500, "requests"),
        ("--num-schemas", 50, "different schemas among them"),
        ("--concurrency", 16, "requests at a time"),
        ("--turns", 10, "turns in which the requests are sent, each with and without schemas"),
    ):
        group.add_argument(name, type=int, default=default, help=f"{what} (default: {default})")
    group.add_argument("--seed", type=int, default=0, help="of schemas, prompts and sampling")
    group.add_argument("--report-only", action="store_true", help="exit with 0 below the bound too")
    group.add_argument("--server-log", type=Path, metavar="FILE", help="log of the bench's server")
    server_flags.add_flags(parser)
    arguments = parser.parse_args(argv)
    for name in ("num_requests", "num_schemas", "concurrency", "turns"):
        positive(name, getattr(arguments, name))
    arguments.server_config = server_flags.from_namespace(arguments)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what a command line says; the exit code."""
    try:
        return run_until_signal(bench(_parse(argv)))
    except ConfigError as error:
        return _say(error, EXIT_USAGE)
    except QuadrigaError as error:
        return _say(error, EXIT_NO_SERVER)
    except (asyncio.CancelledError, KeyboardInterrupt):
        return _say("interrupted", EXIT_INTERRUPTED)


def _say(what: object, code: int) -> int:
    print(f"bench.structured: {what}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
