"""Measure what short prompts wait among a long one, on real servers.

    python -m bench.side_by_side --model smollm2-135m

Each variant is a server of its own; all run at the same time and take turns with the load, so that
a slow minute affects all of them. A turn has short prompts alone, and then the same number among
which is one of 6,000 tokens. The table has, over all turns, the TTFT of the short ones in both
parts, the p99 among the long one over the p99 alone, the TTFT of the long one, and the generated
tokens per second of the second part, over those of the first variant. With the default flags it
takes about four minutes on two cores. bench.simulate.side_by_side is the same in simulated time.
Exit codes: 0 all requests finished, 1 some failed, 2 bad flags, 3 no server.
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from bench import serving
from bench.cli.options import Options, parse
from bench.command import EXIT_FAILED, EXIT_OK, command_parser, named_flags, run_command
from bench.load.mixed_prompts import LONG_CLIENT, long_among_short
from bench.load.trace import TraceRequest, write_trace
from bench.metrics.percentiles import MS, percentile
from bench.metrics.records import RequestRecord
from bench.report.markdown import markdown_table
from quadriga.config.model_args import BUILTIN_MODEL
from quadriga.errors import ConfigError

VARIANTS = (
    "one after the other: --max-num-partial-prefills 1",
    "side by side: ",
    "--itl-target 45: --itl-target 45",
)
PAUSE_S = 3.0  # between the two parts, in which the last answers of the first one end
HEADER = (
    "short prompts", "TTFT alone p50 / p99, ms", "among p50 / p99, ms", "p99 among / alone",
    "TTFT of 6,000 tokens, s", "tokens/s", "ratio",
)  # fmt: skip


class MixedLoad(NamedTuple):
    """The requests of a turn: those before `first_among` are the short ones alone."""

    requests: list[TraceRequest]
    first_among: int


class MixedFigures(NamedTuple):
    """What the turns of a variant have brought.

    Attributes:
        alone_s: TTFT of the short prompts alone.
        among_s: TTFT of the short prompts among the long one.
        long_s: TTFT of the long prompt, one of each turn.
        tokens_per_s: generated tokens per second of the second part, one of each turn.
        num_failed: number of requests that failed.
    """

    alone_s: list[float]
    among_s: list[float]
    long_s: list[float]
    tokens_per_s: list[float]
    num_failed: int

    @property
    def ratio(self) -> float:
        """The p99 of the TTFT among the long prompt over that alone."""
        return percentile(self.among_s, 99) / percentile(self.alone_s, 99)


def mixed_load(num_short: int, rate: float) -> MixedLoad:
    """Return `num_short` short prompts alone, and then as many with a long one among them.

    The long one is sent after a tenth of the second part, so that many arrive beside it.
    """
    alone = long_among_short(num_short, rate, 0)
    among = long_among_short(num_short, rate, 0, seed=1)
    begins_at = alone[-1].at + PAUSE_S
    long = msgspec.structs.replace(
        long_among_short(0, rate, 1)[0], at=begins_at + 0.1 * among[-1].at
    )
    requests = list(alone)
    for number, request in enumerate(among):
        segments = ((2 * num_short + number, request.num_own_tokens),)
        at = begins_at + request.at
        requests.append(msgspec.structs.replace(request, at=at, segments=segments))
    requests.append(msgspec.structs.replace(long, segments=((num_short, long.num_own_tokens),)))
    return MixedLoad(sorted(requests, key=lambda request: request.at), num_short)


def figures_of(turns: Sequence[Sequence[RequestRecord]], first_among: int) -> MixedFigures:
    """Return the figures of a variant: the records of each of its turns, by request."""
    figures = MixedFigures([], [], [], [], sum(r.error is not None for t in turns for r in t))
    for records in turns:
        done = [record for record in records if record.error is None]
        among = [record for record in done if record.index >= first_among]
        for record in done:
            ttft_s = record.first_received - record.submit_start
            if record.client == LONG_CLIENT:
                figures.long_s.append(ttft_s)
            elif record.index < first_among:
                figures.alone_s.append(ttft_s)
            else:
                figures.among_s.append(ttft_s)
        if among:
            began_at = min(record.submit_start for record in among)
            seconds = max(record.finished for record in among) - began_at
            num_tokens = sum(record.completion_tokens for record in among)
            figures.tokens_per_s.append(num_tokens / seconds)
    return figures


def table(figures: dict[str, MixedFigures]) -> str:
    """Return the figures of the variants as a markdown table."""
    base = median(next(iter(figures.values())).tokens_per_s)
    rows = [
        [
            name,
            _spread(of_variant.alone_s),
            _spread(of_variant.among_s),
            f"{of_variant.ratio:.2f}",
            f"{median(of_variant.long_s):.1f}",
            f"{median(of_variant.tokens_per_s):.1f}",
            f"{median(of_variant.tokens_per_s) / base:.3f}",
        ]
        for name, of_variant in figures.items()
    ]
    return markdown_table(list(HEADER), rows)


def _spread(seconds: list[float]) -> str:
    return f"{MS * percentile(seconds, 50):.0f} / {MS * percentile(seconds, 99):.0f}"


async def measure(
    variants: dict[str, Options], load: MixedLoad, num_turns: int
) -> dict[str, MixedFigures]:
    """Let the servers of the variants take turns with the load."""
    turns: dict[str, list[Sequence[RequestRecord]]] = {name: [] for name in variants}
    async with AsyncExitStack() as stack:
        runs = {}
        for name, options in variants.items():
            print(f"starting {name}", file=sys.stderr, flush=True)
            runs[name] = await serving.open_runs(options, stack)
            await runs[name].warm_up(0)
        for turn in range(num_turns):
            names = list(variants)
            for name in names if turn % 2 == 0 else reversed(names):
                records = (await runs[name].measure(turn)).records
                turns[name].append(records)
                ratio = figures_of([records], load.first_among).ratio
                print(f"turn {turn + 1}, {name}: {ratio:.2f}", file=sys.stderr, flush=True)
    return {name: figures_of(of_variant, load.first_among) for name, of_variant in turns.items()}


def main(argv: list[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    parser = command_parser("bench.side_by_side", __doc__)
    parser.add_argument("--model", default=BUILTIN_MODEL)
    parser.add_argument("--num-short", type=int, default=60, help="short prompts of each part")
    parser.add_argument("--rate", type=float, default=4.0, help="short prompts a second")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument(
        "--variant", action="append", metavar="NAME: FLAGS", help="of a server; may be repeated"
    )

    def work() -> int:
        arguments = parser.parse_args(argv)
        if min(arguments.num_short, arguments.turns) < 1 or not arguments.rate > 0:
            raise ConfigError("--num-short, --rate and --turns must be positive")
        load = mixed_load(arguments.num_short, arguments.rate)
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.jsonl"
            write_trace(trace, load.requests)
            common = ["--model", arguments.model, "--trace", str(trace), "--no-stop-on-eos"]
            common += ["--repeat-runs", str(arguments.turns)]
            named = [named_flags(text) for text in arguments.variant or VARIANTS]
            variants = {name: parse([*common, *flags]) for name, flags in named}
            figures = asyncio.run(measure(variants, load, arguments.turns))
        print(table(figures))
        failed = any(of_variant.num_failed for of_variant in figures.values())
        return EXIT_FAILED if failed else EXIT_OK

    return run_command("bench.side_by_side", work)


if __name__ == "__main__":
    sys.exit(main())
