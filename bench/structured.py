"""Measure the cost of structured output: `python -m bench.structured`.

Requests with a JSON schema each take turns with the same requests without a schema, which generate
as many tokens. A validator that is independent of the grammars checks every answer. The compilation
of each schema's grammar is part of the measurement.

Without --endpoint the bench starts a server of its own, which takes the server's flags. Several
loads follow one another on one server: `--concurrency 1 64 --num-requests 32 512`. Exit codes:
0 all answers valid and the median throughput of the turns within the bound in every load, 1
otherwise, 2 bad flags, 3 no server.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cli.command import EXIT_FAILED, EXIT_OK, run_command, run_until_signal
from bench.client.server import start_server
from bench.load.workload import word
from bench.report.table import FigureRow, add_json_flag, show
from bench.serving import CONNECT_TIMEOUT_S
from bench.turns import Column, Turns
from quadriga.client import AsyncClient, Completion, SamplingParams
from quadriga.errors import ConfigError
from quadriga.server.config import flags, server_config
from quadriga.server.config import server_config as server_flags
from simulator.latency import MS, percentile

# Schemas are objects of a few fields, as programs use them. Texts and lists are bounded, so that a
# model with random weights comes to an end, too.

# Makes the schema of one field.
Draw = Callable[[random.Random], dict[str, Any]]
WORDS = (
    "name", "title", "city", "status", "color", "category", "owner", "summary", "country", "unit",
    "priority", "language", "currency", "material", "season", "level", "reason", "source", "topic",
    "amount", "quantity", "year", "score", "rating", "weight", "height", "duration", "version",
)  # fmt: skip
VALUES = (
    "new", "open", "closed", "red", "green", "blue", "small", "medium", "large", "low", "high",
    "north", "south", "paper", "steel", "spring", "autumn", "daily", "weekly", "draft", "final",
)  # fmt: skip
MIN_FIELDS, MAX_FIELDS = 3, 8
NESTED_SHARE = 0.25


def schemas(count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` different schemas, the same for the same seed."""
    source = random.Random(f"{seed}/schemas")
    made: dict[str, dict[str, Any]] = {}
    while len(made) < count:
        schema = _object(source, MAX_FIELDS, source.random() < NESTED_SHARE)
        made.setdefault(repr(schema), schema)
    return list(made.values())


def complaint(schema: dict[str, Any], answer: Completion) -> str:
    """Return why the answer does not obey the schema, or ""."""
    from jsonschema import Draft202012Validator, ValidationError

    if answer.finish_reason != "stop":
        return f"{answer.usage.completion_tokens} tokens, ended by {answer.finish_reason}"
    try:
        Draft202012Validator(schema).validate(json.loads(answer.text))
    except (ValueError, ValidationError) as error:
        return f"{answer.text!r}: {error}"
    return ""


def _object(source: random.Random, max_fields: int, nested: bool) -> dict[str, Any]:
    names = source.sample(WORDS, source.randint(MIN_FIELDS, max_fields))
    properties = {name: source.choice(FIELDS)(source) for name in names}
    if nested:
        properties["details"] = _object(source, MIN_FIELDS + 1, nested=False)
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(source: random.Random) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": source.choice((8, 16, 24))}


def _enum(source: random.Random) -> dict[str, Any]:
    return {"enum": source.sample(VALUES, source.randint(2, 6))}


def _integer(source: random.Random) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "maximum": source.choice((9, 100, 2100))}


def _boolean(_: random.Random) -> dict[str, Any]:
    return {"type": "boolean"}


def _date(_: random.Random) -> dict[str, Any]:
    return {"type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$"}


def _list(source: random.Random) -> dict[str, Any]:
    items = source.choice((_text, _enum, _integer))(source)
    return {"type": "array", "items": items, "minItems": 1, "maxItems": source.randint(2, 4)}


FIELDS: tuple[Draw, ...] = (_text, _text, _enum, _integer, _boolean, _date, _list)


# Share of the throughput without schemas.
MIN_THROUGHPUT_RATIO = 0.85
MAX_TOKENS = 768
NUM_WARM_UP = 16
# First numbers of these tasks: equal prompts would be served from the prefix cache.
FIRST_WARM_UP_NUMBER, FIRST_FREE_NUMBER = 1_000_000, 2_000_000
MAX_SHOWN_COMPLAINTS = 5


@dataclass(frozen=True, slots=True)
class Load:
    """So many requests, at most `concurrency` of them in flight."""

    num_requests: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class Task:
    """One request, whose number determines prompt and seed."""

    number: int
    schema: dict[str, Any]

    @property
    def prompt(self) -> list[dict[str, str]]:
        """Chat that asks for the fields of the schema."""
        fields = ", ".join(self.schema["properties"])
        text = f"{word(self.number)}: make up a JSON object with the fields {fields}."
        return [{"role": "user", "content": text}]

    def params(self, tokens: int | None) -> SamplingParams:
        """Return parameters that obey the schema, or that generate `tokens` tokens without it."""
        free = tokens is not None
        return SamplingParams(
            json_schema=None if free else self.schema,
            max_new_tokens=tokens if free else MAX_TOKENS,
            temperature=0.7,
            top_p=1.0,
            seed=self.number,
            ignore_eos=free,
        )


@dataclass(frozen=True, slots=True)
class Pass:
    """Some tasks, run to their end: seconds from first submit to last end, worker steps."""

    completions: list[Completion]
    seconds: float
    steps: int

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return sum(completion.usage.completion_tokens for completion in self.completions)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def ttft(self, share: float) -> float:
        """Return a percentile of the TTFT in ms, by the server's clock."""
        timings = [completion.timings for completion in self.completions]
        return percentile([(t.first_token - t.received) * MS for t in timings], share)


COLUMNS: list[Column[Pass]] = [
    Column("tokens/s", lambda one: one.rate, 1, has_ratio=True),
    Column("tokens of an answer", lambda one: one.tokens / len(one.completions), 1),
    Column("TTFT p50, ms", lambda one: one.ttft(50), 1),
    Column("TTFT p99, ms", lambda one: one.ttft(99), 1),
    Column("steps of a turn", lambda one: one.steps),
]


async def run_pass(
    client: AsyncClient, tasks: Sequence[Task], lengths: Sequence[int | None], concurrency: int
) -> Pass:
    """Run tasks with at most `concurrency` requests in flight, or raise QuadrigaError."""
    in_flight = asyncio.Semaphore(concurrency)

    async def run(task: Task, tokens: int | None) -> Completion:
        async with in_flight:
            completion: Completion = await client.generate(task.prompt, task.params(tokens))
            return completion

    steps_before = (await client.info())["steps"]
    began = time.perf_counter()
    jobs = [run(task, tokens) for task, tokens in zip(tasks, lengths, strict=True)]
    completions = await asyncio.gather(*jobs)
    seconds = time.perf_counter() - began
    return Pass(completions, seconds, (await client.info())["steps"] - steps_before)


async def measure(
    client: AsyncClient, arguments: Namespace, load: Load, first: int = 0
) -> tuple[Turns[Pass], list[str]]:
    """Warm up, then run all turns; return them, and a complaint for each invalid answer.

    Args:
        client: of the server.
        arguments: the number of turns and schemas, and the seed.
        load: the requests.
        first: number of the first task; the tasks of earlier loads have lower ones.
    """
    others = schemas(NUM_WARM_UP, arguments.seed + 1)
    warm_up = _tasks(NUM_WARM_UP, others, FIRST_WARM_UP_NUMBER + NUM_WARM_UP * first)
    await _turn(client, warm_up, load.concurrency)
    tasks = _tasks(load.num_requests, schemas(arguments.num_schemas, arguments.seed), first)
    size = -(-len(tasks) // arguments.turns)
    turns: Turns[Pass] = Turns(["free", "schemas"])
    complaints: list[str] = []
    for begin in range(0, len(tasks), size):
        sent = tasks[begin : begin + size]
        constrained, free = await _turn(client, sent, load.concurrency)
        shown = f"{constrained.rate:.0f} tok/s with schemas, {free.rate:.0f} without"
        print(f"from request {begin}: {shown}", file=sys.stderr, flush=True)
        turns.results["schemas"].append(constrained)
        turns.results["free"].append(free)
        pairs = zip(sent, constrained.completions, strict=True)
        complaints += filter(None, (complaint(task.schema, answer) for task, answer in pairs))
    return turns, complaints


def _tasks(count: int, drawn: Sequence[dict[str, Any]], first: int = 0) -> list[Task]:
    return [Task(first + number, drawn[number % len(drawn)]) for number in range(count)]


async def _turn(client: AsyncClient, tasks: Sequence[Task], concurrency: int) -> tuple[Pass, Pass]:
    """Run tasks with their schemas, then others of the same lengths without."""
    constrained = await run_pass(client, tasks, [None] * len(tasks), concurrency)
    lengths = [completion.usage.completion_tokens for completion in constrained.completions]
    fresh = [Task(FIRST_FREE_NUMBER + task.number, task.schema) for task in tasks]
    return constrained, await run_pass(client, fresh, lengths, concurrency)


def text_of(
    arguments: Namespace,
    load: Load,
    info: dict[str, Any],
    turns: Turns[Pass],
    complaints: Sequence[str],
) -> str:
    """Return what is printed of a load."""
    count = load.num_requests
    lines = [
        f"{info['model']} ({info['dtype']}, {info['device']}, {info['attention_backend']}):"
        f" {count} requests of {arguments.num_schemas} schemas, {load.concurrency} at a time",
        f"Valid answers: {count - len(complaints)} of {count}",
        turns.table(COLUMNS),
    ]
    return "\n".join([*lines, *(f"invalid: {text}" for text in complaints[:MAX_SHOWN_COMPLAINTS])])


def row_of(load: Load, turns: Turns[Pass], complaints: Sequence[str]) -> FigureRow:
    """Return the figures of a load, medians of its turns."""
    row: dict[str, str | int | float | None] = {"streams": load.concurrency}
    for name in turns.results:
        row[f"{name} tok/s"] = turns.median(name, lambda one: one.rate)
    ratios = turns.ratios("schemas", lambda one: one.rate)
    row["ratio"] = None if ratios is None else ratios.median
    row["tokens of an answer"] = turns.median(
        "schemas", lambda one: one.tokens / len(one.completions)
    )
    row["valid"] = f"{load.num_requests - len(complaints)} of {load.num_requests}"
    return row


async def bench(arguments: Namespace) -> int:
    """Start or find the server, measure and print, and return the exit code."""
    async with AsyncExitStack() as stack:
        config: server_config.ServerConfig = arguments.server_config
        endpoint = config.frontend.endpoint
        if "endpoint" not in arguments:
            endpoint, _ = await start_server(config, arguments.server_log, stack)
        keys = config.frontend.curve_dir
        client = await stack.enter_async_context(
            AsyncClient(endpoint, CONNECT_TIMEOUT_S, curve_dir=keys)
        )
        info = await client.info()
        rows: list[FigureRow] = []
        is_good, first = True, 0
        for load in arguments.loads:
            turns, complaints = await measure(client, arguments, load, first)
            print(text_of(arguments, load, info, turns, complaints), end="\n\n", flush=True)
            rows.append(row_of(load, turns, complaints))
            ratios = turns.ratios("schemas", lambda one: one.rate)
            missed = ratios is None or ratios.median < MIN_THROUGHPUT_RATIO
            is_good &= not complaints and (not missed or arguments.report_only)
            first += load.num_requests
    show(f"JSON schemas and free text, {info['model']} on {info['device']}", rows, arguments.json)
    return EXIT_OK if is_good else EXIT_FAILED


def _parse(argv: Sequence[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.structured", usage="%(prog)s [FLAGS]", description=__doc__.split("\n")[0]
    )
    group = parser.add_argument_group("load")
    for name, defaults, what in (
        ("--num-requests", [500], "requests of each load"),
        ("--concurrency", [16], "requests in flight, of each load"),
    ):
        shown = f"{what} (default: {defaults[0]})"
        group.add_argument(name, type=int, nargs="+", default=defaults, metavar="N", help=shown)
    for name, default, what in (
        ("--num-schemas", 50, "different schemas"),
        ("--turns", 10, "parts of a load, each sent with and without schemas"),
    ):
        group.add_argument(name, type=int, default=default, help=f"{what} (default: {default})")
    group.add_argument("--seed", type=int, default=0, help="seed of schemas, prompts and sampling")
    group.add_argument(
        "--report-only", action="store_true", help="exit with 0 even below the bound"
    )
    group.add_argument(
        "--server-log", type=Path, metavar="FILE", help="log of the server that the bench starts"
    )
    add_json_flag(parser)
    server_flags.add_flags(parser)
    arguments = parser.parse_args(argv)
    flags.check_positive(arguments, "num_schemas", "turns")
    arguments.loads = loads_of(arguments.num_requests, arguments.concurrency)
    arguments.server_config = server_flags.from_namespace(arguments)
    return arguments


def loads_of(num_requests: Sequence[int], concurrency: Sequence[int]) -> list[Load]:
    """Return the loads of two flags.

    Raises:
        ConfigError: one flag has more numbers than the other one, or one is not positive.
    """
    if len(num_requests) != len(concurrency) or min(*num_requests, *concurrency) < 1:
        raise ConfigError(
            f"--num-requests {_numbers(num_requests)} --concurrency {_numbers(concurrency)}: each"
            " load has a number of both, at least 1"
        )
    return [Load(*pair) for pair in zip(num_requests, concurrency, strict=True)]


def _numbers(values: Sequence[int]) -> str:
    return " ".join(map(str, values))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench of a command line, and return the exit code."""
    return run_command("bench.structured", lambda: run_until_signal(bench(_parse(argv))))


if __name__ == "__main__":
    sys.exit(main())
