"""Measure what guessed tokens save.

    python -m bench.speculation --speculative-method self --seconds 20

Two servers run, one of them with --speculative-method; a server that waits takes no CPU time. They
get the same load in turns, so that a slow minute affects both: by default 20 loads, five kinds with
1, 4, 16 and 64 streams, each until --turns turns are over or the next one would take longer than
--seconds. The table has the median over the turns of the ratio of tokens per second, with and
without guesses, and the smallest and the largest one; the same for tokens per second of CPU time of
the server's processes; how many of the guessed tokens were right; and the tokens of a row and step.
The exit code is 1 if a median of tokens per second is below --min-ratio.

Where other programs keep the machine busy, --worker-threads 1 and the ratios of CPU time tell more:
a thread that waits for another one would count, too.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from bench.cli.command import command_parser
from bench.client.resources import cpu_seconds
from quadriga.client import SamplingParams
from quadriga.llm.llm import LLM
from quadriga.server.config.engine_args import BUILTIN_MODEL

# Loads in which more or less of an answer repeats text that was there before.

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


class GuessTask(NamedTuple):
    """A question, and how it is answered."""

    question: str
    params: SamplingParams


def edit(draw: random.Random, max_tokens: int) -> GuessTask:
    """Return code whose answer repeats most of it."""
    names = draw.sample(NAMES, 4)
    code = "\n".join(
        f"def {name}_of(item):\n    if item.{name} is None:\n        raise ValueError('item has no"
        f" {name}')\n    return item.{name} * {draw.randrange(2, 99)}\n"
        for name in names
    )
    question = f"Repeat this code, but rename item to thing. Write only code.\n\n{code}"
    return GuessTask(question, SamplingParams(temperature=0, max_tokens=max_tokens))


def extraction(draw: random.Random, max_tokens: int) -> GuessTask:
    """Return a text with facts that are wanted as JSON of a schema."""
    orders = ". ".join(
        f"Customer {draw.choice(NAMES).title()} {draw.choice(NAMES).title()} from"
        f" {draw.choice(CITIES)} ordered {draw.randrange(100)} pieces"
        for _ in range(4)
    )
    params = SamplingParams(temperature=0, max_tokens=max_tokens, json_schema=SCHEMA)
    return GuessTask(f"List the orders as JSON: {orders}.", params)


def summary(draw: random.Random, max_tokens: int) -> GuessTask:
    """Return a text to be summarized."""
    text = " ".join(
        f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice(OBJECTS)}." for _ in range(25)
    )
    question = f"Summarize this text about {draw.choice(CITIES)}:\n\n{text}"
    return GuessTask(question, SamplingParams(temperature=0, max_tokens=max_tokens))


def chat(draw: random.Random, max_tokens: int) -> GuessTask:
    """Return a short question, answered in the model's own words."""
    question = f"Tell me something about {draw.choice(TOPICS)} and {draw.choice(CITIES)}."
    params = SamplingParams(temperature=0.8, seed=draw.randrange(2**31), max_tokens=max_tokens)
    return GuessTask(question, params)


def noise(draw: random.Random, max_tokens: int) -> GuessTask:
    """Return a question without sense, whose answer is drawn from nearly all tokens."""
    question = " ".join(f"{draw.choice(NAMES)}{draw.randrange(1000)}" for _ in range(40))
    params = SamplingParams(
        temperature=3.0, seed=draw.randrange(2**31), max_tokens=max_tokens, ignore_eos=True
    )
    return GuessTask(question, params)


LOADS: dict[str, Callable[[random.Random, int], GuessTask]] = {
    "edit": edit,
    "extraction": extraction,
    "summary": summary,
    "chat": chat,
    "random": noise,
}


def tasks_of(load: str, count: int, seed: int, max_tokens: int) -> list[GuessTask]:
    """Return tasks that differ from those of another seed or number."""
    draw = random.Random(f"{load}/{count}/{seed}")
    return [LOADS[load](draw, max_tokens) for _ in range(count)]


EXIT_SLOWER = 1


class TimedRun(NamedTuple):
    """One load on one server.

    Attributes:
        rate: tokens per second.
        cpu_rate: tokens per second of CPU time of the server's processes.
        texts: the answers.
        guesses: rows with guesses, guessed tokens, and right ones.
    """

    rate: float
    cpu_rate: float
    texts: list[str]
    guesses: tuple[int, int, int]


class Limits(NamedTuple):
    """Bounds on the measurement of one load.

    Attributes:
        turns: of both servers.
        seconds: that the turns may take; there is at least one.
        tokens: of an answer.
    """

    turns: int
    seconds: float
    tokens: int


class Ratios(NamedTuple):
    """The rate with guesses over that without, turn by turn."""

    values: list[float]

    @property
    def median(self) -> float:
        """The median over the turns."""
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({min(self.values):.2f} to {max(self.values):.2f})"


def run(llm: LLM, tasks: list[GuessTask]) -> TimedRun:
    """Send all tasks at once, and wait for the answers."""
    before, cpu_before_s = guesses_of(llm), cpu_of(llm)
    chats = [[{"role": "user", "content": task.question}] for task in tasks]
    began_at = time.perf_counter()
    answers = llm.chat(chats, [task.params for task in tasks])
    took_s = time.perf_counter() - began_at
    num_tokens = sum(answer.usage.completion_tokens for answer in answers)
    after, cpu_s = guesses_of(llm), cpu_of(llm) - cpu_before_s
    rows, guessed, right = (end - begin for begin, end in zip(before, after, strict=True))
    texts = [answer.text for answer in answers]
    return TimedRun(num_tokens / took_s, num_tokens / cpu_s, texts, (rows, guessed, right))


def cpu_of(llm: LLM) -> float:
    """Return the CPU seconds of the server's processes since their start."""
    info: dict[str, Any] = llm.client.info()
    return sum(filter(None, cpu_seconds(info["pids"]).values()))


def guesses_of(llm: LLM) -> list[int]:
    """Return the server's counters of rows with guesses, guesses and right guesses."""
    info: dict[str, Any] = llm.client.info()
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return [info.get(f"spec_decode_{name}_total", 0) for name in names]


def measure(plain: LLM, guessing: LLM, load: str, streams: int, limits: Limits) -> float:
    """Run a load in turns, print its line, and return the median ratio."""
    runs: dict[LLM, list[TimedRun]] = {plain: [], guessing: []}
    began_at = time.perf_counter()
    for turn in range(limits.turns):
        tasks = tasks_of(load, streams, turn, limits.tokens)
        for llm in (plain, guessing) if turn % 2 else (guessing, plain):
            runs[llm].append(run(llm, tasks))
        took_s = time.perf_counter() - began_at
        if took_s * (turn + 2) / (turn + 1) > limits.seconds:
            break
    pairs = list(zip(runs[guessing], runs[plain], strict=True))
    rows, guessed, right = (
        sum(counts) for counts in zip(*(one.guesses for one, _ in pairs), strict=True)
    )
    num_equal = sum(
        a == b for one, other in pairs for a, b in zip(one.texts, other.texts, strict=True)
    )
    ratios = Ratios([one.rate / other.rate for one, other in pairs])
    cells = (
        load,
        f"{streams}",
        f"{statistics.median(one.rate for one in runs[plain]):.0f}",
        f"{ratios}",
        f"{Ratios([one.cpu_rate / other.cpu_rate for one, other in pairs])}",
        f"{100 * right / max(guessed, 1):.0f} % of {guessed}",
        f"{1 + right / max(rows, 1):.1f}",
        f"{num_equal} of {streams * len(pairs)}",
    )
    print(f"| {' | '.join(cells)} |", flush=True)
    return ratios.median


def main() -> None:
    """Run the command line."""
    parser = command_parser("bench.speculation", __doc__)
    parser.add_argument("--model", default=BUILTIN_MODEL)
    parser.add_argument("--speculative-method", default="auto", choices=("auto", "ngram", "self"))
    parser.add_argument("--num-speculative-tokens", type=int, default=15)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--streams", default="1,4,16,64", help="requests at one time")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--turns", type=int, default=9, help="largest number of turns of a load")
    parser.add_argument("--seconds", type=float, default=20.0, help="for the turns of a load")
    parser.add_argument("--worker-threads", type=int)
    parser.add_argument("--max-total-tokens", type=int, help="of each of the two KV pools")
    parser.add_argument("--enable-deterministic-inference", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--min-ratio", type=float, default=0.98)
    args = parser.parse_args()
    names = ("dtype", "quantization", "worker_threads", "max_total_tokens")
    common: dict[str, Any] = {name: value for name in names if (value := getattr(args, name))}
    common["enable_deterministic_inference"] = args.enable_deterministic_inference
    limits = Limits(args.turns, args.seconds, args.max_tokens)
    guesses: dict[str, Any] = {
        "speculative_method": args.speculative_method,
        "num_speculative_tokens": args.num_speculative_tokens,
    }
    with (
        LLM(args.model, **common, speculative_method="none") as plain,
        LLM(args.model, **common, **guesses) as guessing,
    ):
        for llm in (plain, guessing):
            run(llm, tasks_of("chat", 1, -1, 16))
        print(
            "| load | streams | tokens/s without | ratio | of CPU time | right | tokens a row |"
            " equal texts |"
        )
        print("|---|---|---|---|---|---|---|---|")
        ratios = [
            measure(plain, guessing, load, int(streams), limits)
            for load in args.loads.split(",")
            for streams in args.streams.split(",")
        ]
    num_slower = sum(ratio < args.min_ratio for ratio in ratios)
    print(
        f"{len(ratios)} loads: smallest ratio {min(ratios):.2f}, {num_slower} below"
        f" {args.min_ratio}"
    )
    sys.exit(EXIT_SLOWER if num_slower else 0)


if __name__ == "__main__":
    main()
