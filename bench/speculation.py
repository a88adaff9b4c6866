"""Measure what draft tokens save, and whether another version of the project saves as much.

    python -m bench.speculation --seconds 20 -- --worker-threads 1
    python -m bench.speculation "old: @../before" "new: " --turns 8

Variants are written as in bench.compare; without any, a server with `--speculative-method none` is
compared with one with `auto`. All servers run, and one that waits takes no CPU time. They get the
same load in turns: by default 20 loads, five kinds with 1, 4, 16 and 64 streams, each until --turns
turns are over or the next one would take longer than --seconds. The table has, for each variant,
the tokens per second as a ratio to the first variant (median over the turns, smallest and largest);
the same for tokens per second of CPU time of the server's processes; how many draft tokens were
right; the tokens of a row and step; and how many texts are those of the first variant. The exit
code is 1 if a median of tokens per second is below --min-ratio.

Where other programs keep the machine busy, `-- --worker-threads 1` and the ratios of CPU time tell
more: a thread that waits for another one would count, too.
"""

import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from bench.cli.command import EXIT_FAILED, EXIT_OK, command_parser, run_command, run_until_signal
from bench.client import resources, server
from bench.report.table import markdown_table
from bench.serving import CONNECT_TIMEOUT_S
from bench.turns import VARIANTS_HELP, Turns, Variant, split_common, variant_of
from quadriga.client import AsyncClient, SamplingParams
from quadriga.errors import ConfigError

NAMES = ("area", "volume", "weight", "price", "length", "height", "speed", "score", "rate", "total")
CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Delhi", "Quito", "Paris", "Tunis", "Dakar", "Seoul")
TOPICS = ("volcanoes", "bread", "the moon", "trains", "honey bees", "chess", "rivers", "glass")
SUBJECTS = (
    "The city",
    "A new bridge",
    "The old library",
    "Its harbour",
    "The market",
    "A festival",
)
VERBS = ("attracts", "employs", "connects", "feeds", "surprises", "protects", "outlives", "needs")
OBJECTS = ("many visitors", "the northern valley", "two hundred people", "the whole region")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "orders": {
            "type": "array",
            "minItems": 4,
            "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {
                    "customer_name": {"type": "string", "maxLength": 20},
                    "city": {"type": "string", "maxLength": 12},
                    "quantity": {"type": "integer", "minimum": 0, "maximum": 999},
                    "is_delivered": {"type": "boolean"},
                },
                "required": ["customer_name", "city", "quantity", "is_delivered"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["orders"],
    "additionalProperties": False,
}


class DraftTask(NamedTuple):
    """A question, and how it is answered."""

    question: str
    params: SamplingParams


def edit(draw: random.Random, max_tokens: int) -> DraftTask:
    """Return code whose answer repeats most of it."""
    names = draw.sample(NAMES, 4)
    code = "\n".join(
        f"def {name}_of(item):\n    if item.{name} is None:\n        raise ValueError('item has no"
        f" {name}')\n    return item.{name} * {draw.randrange(2, 99)}\n"
        for name in names
    )
    question = f"Repeat this code, but rename item to thing. Write only code.\n\n{code}"
    return DraftTask(question, SamplingParams(temperature=0, max_tokens=max_tokens))


def extraction(draw: random.Random, max_tokens: int) -> DraftTask:
    """Return a text with facts that are wanted as JSON of a schema."""
    orders = ". ".join(
        f"Customer {draw.choice(NAMES).title()} {draw.choice(NAMES).title()} from"
        f" {draw.choice(CITIES)} ordered {draw.randrange(100)} pieces"
        for _ in range(4)
    )
    params = SamplingParams(temperature=0, max_tokens=max_tokens, json_schema=SCHEMA)
    return DraftTask(f"List the orders as JSON: {orders}.", params)


def summary(draw: random.Random, max_tokens: int) -> DraftTask:
    """Return a text to be summarized."""
    text = " ".join(
        f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice(OBJECTS)}." for _ in range(25)
    )
    question = f"Summarize this text about {draw.choice(CITIES)}:\n\n{text}"
    return DraftTask(question, SamplingParams(temperature=0, max_tokens=max_tokens))


def chat(draw: random.Random, max_tokens: int) -> DraftTask:
    """Return a short question, answered in the model's own words."""
    question = f"Tell me something about {draw.choice(TOPICS)} and {draw.choice(CITIES)}."
    params = SamplingParams(temperature=0.8, seed=draw.randrange(2**31), max_tokens=max_tokens)
    return DraftTask(question, params)


def noise(draw: random.Random, max_tokens: int) -> DraftTask:
    """Return a question without sense, whose answer is drawn from nearly all tokens."""
    question = " ".join(f"{draw.choice(NAMES)}{draw.randrange(1000)}" for _ in range(40))
    params = SamplingParams(
        temperature=3.0, seed=draw.randrange(2**31), max_tokens=max_tokens, ignore_eos=True
    )
    return DraftTask(question, params)


LOADS: dict[str, Callable[[random.Random, int], DraftTask]] = {
    "edit": edit,
    "extraction": extraction,
    "summary": summary,
    "chat": chat,
    "random": noise,
}


def tasks_of(load: str, count: int, seed: int, max_tokens: int) -> list[DraftTask]:
    """Return tasks that differ from those of another seed or number."""
    draw = random.Random(f"{load}/{count}/{seed}")
    return [LOADS[load](draw, max_tokens) for _ in range(count)]


DEFAULT_VARIANTS = ["without: --speculative-method none", "with: --speculative-method auto"]
HEADER = (
    "load", "streams", "variant", "tokens/s", "ratio", "of CPU time", "right", "tokens a row",
    "equal texts",
)  # fmt: skip


class TimedRun(NamedTuple):
    """One load on one server.

    Attributes:
        rate: tokens per second.
        cpu_rate: tokens per second of CPU time of the server's processes.
        texts: the answers.
        drafts: rows with draft tokens, draft tokens, and right ones.
    """

    rate: float
    cpu_rate: float
    texts: list[str]
    drafts: tuple[int, int, int]


class Limits(NamedTuple):
    """Bounds on the measurement of one load.

    Attributes:
        turns: of each server.
        seconds: that the turns may take; there is at least one.
        tokens: of an answer.
    """

    turns: int
    seconds: float
    tokens: int


async def run(client: AsyncClient, tasks: Sequence[DraftTask]) -> TimedRun:
    """Send all tasks at once, and wait for the answers."""
    before, cpu_before_s = await counters_of(client)
    began_at = time.perf_counter()
    chats = [([{"role": "user", "content": task.question}], task.params) for task in tasks]
    answers = await asyncio.gather(*(client.generate(chat, params) for chat, params in chats))
    took_s = time.perf_counter() - began_at
    after, cpu_after_s = await counters_of(client)
    num_tokens = sum(answer.usage.completion_tokens for answer in answers)
    rows, drafted, right = (end - begin for begin, end in zip(before, after, strict=True))
    texts, cpu_s = [answer.text for answer in answers], cpu_after_s - cpu_before_s
    return TimedRun(num_tokens / took_s, num_tokens / cpu_s, texts, (rows, drafted, right))


async def counters_of(client: AsyncClient) -> tuple[list[int], float]:
    """Return counters of rows with drafts, drafts and right drafts, and the CPU seconds so far."""
    info = await client.info()
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    counters = [info.get(f"spec_decode_{name}_total", 0) for name in names]
    return counters, sum(filter(None, resources.cpu_seconds(info["pids"]).values()))


async def measure(
    clients: dict[str, AsyncClient], load: str, streams: int, limits: Limits
) -> Turns[TimedRun]:
    """Run a load in turns."""
    turns: Turns[TimedRun] = Turns(list(clients))
    for turn, name in turns.order(limits.turns, limits.seconds):
        tasks = tasks_of(load, streams, turn, limits.tokens)
        turns.results[name].append(await run(clients[name], tasks))
    return turns


def rows_of(load: str, streams: int, turns: Turns[TimedRun]) -> list[list[str]]:
    """Return a row of the table for each variant."""
    rows = []
    first = next(iter(turns.results.values()))
    for name, runs in turns.results.items():
        num_rows, drafted, right = (sum(c) for c in zip(*(one.drafts for one in runs), strict=True))
        pairs = [pair for one, other in zip(runs, first, strict=True)
                 for pair in zip(one.texts, other.texts, strict=True)]  # fmt: skip
        rows.append(
            [
                *(load, str(streams), name, f"{turns.median(name, lambda one: one.rate):.0f}"),
                str(turns.ratios(name, lambda one: one.rate)),
                str(turns.ratios(name, lambda one: one.cpu_rate)),
                f"{100 * right / max(drafted, 1):.0f} % of {drafted}",
                f"{1 + right / max(num_rows, 1):.1f}",
                f"{sum(text == other for text, other in pairs)} of {len(pairs)}",
            ]
        )
    return rows


async def bench(variants: Sequence[Variant], common: Sequence[str], args: Any) -> int:
    """Measure all loads, print the table, and return the exit code."""
    limits = Limits(args.turns, args.seconds, args.max_tokens)
    clients: dict[str, AsyncClient] = {}
    rows: list[list[str]] = []
    ratios: list[float] = []
    async with AsyncExitStack() as stack:
        for variant in variants:
            config = variant.config(common)
            endpoint, _ = await server.start_server(config, None, stack, variant.launcher)
            client = AsyncClient(endpoint, CONNECT_TIMEOUT_S, curve_dir=config.frontend.curve_dir)
            clients[variant.name] = await stack.enter_async_context(client)
            await run(client, tasks_of("chat", 1, -1, 16))
        for load in args.loads.split(","):
            for streams in map(int, args.streams.split(",")):
                turns = await measure(clients, load, streams, limits)
                found = rows_of(load, streams, turns)
                for row in found:
                    print(" | ".join(row), file=sys.stderr, flush=True)
                rows += found
                for variant in variants[1:]:
                    ratio = turns.ratios(variant.name, lambda one: one.rate)
                    ratios += [ratio.median] if ratio else []
    print(markdown_table(HEADER, rows))
    num_slower = sum(ratio < args.min_ratio for ratio in ratios)
    print(f"smallest ratio {min(ratios):.2f}, {num_slower} of {len(ratios)} below {args.min_ratio}")
    return EXIT_FAILED if num_slower else EXIT_OK


def main() -> int:
    """Run the command line, and return the exit code."""
    parser = command_parser("bench.speculation", __doc__)
    parser.add_argument("variants", nargs="*", default=DEFAULT_VARIANTS, help=VARIANTS_HELP)
    parser.add_argument("--streams", default="1,4,16,64", help="requests at one time")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--turns", type=int, default=9, help="largest number of turns of a load")
    parser.add_argument("--seconds", type=float, default=20.0, help="for the turns of a load")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--min-ratio", type=float, default=0.98)
    own, common = split_common(sys.argv[1:])
    args = parser.parse_args(own)

    def work() -> int:
        variants = [variant_of(text) for text in args.variants]
        if len(variants) < 2:
            raise ConfigError('at least two variants are compared: "NAME: FLAGS" "NAME: FLAGS"')
        return run_until_signal(bench(variants, common, args))

    return run_command("bench.speculation", work)


if __name__ == "__main__":
    sys.exit(main())
