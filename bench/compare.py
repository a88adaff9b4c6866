"""Compare server configurations: `python -m bench.compare "NAME: FLAGS" ... -- FLAGS`.

Each variant is a server of its own, started with the common flags after `--` and the flags after
its name; `NAME: @DIR FLAGS` starts that of another checkout. All servers run at the same time and
take turns with the load (--repeat-runs), so that a slow minute of the machine affects all of them.
The table shows medians over the runs, and throughput as a ratio to the first variant. For example

    python -m bench.compare "mixed: " "first: --batch-mode prefill-first" -- --num-requests 64
"""

import asyncio
import contextlib
import io
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TypeVar

from bench import serving
from bench.cli.command import EXIT_FAILED, EXIT_OK, run_command
from bench.cli.options import Options, parse
from bench.report.metrics import ClientSummary
from bench.report.report import Result
from bench.turns import Column, Turns, split_common, variant_of
from quadriga.errors import ConfigError
from simulator.latency import Percentiles

T = TypeVar("T")


def spread_columns(
    title: str, get: Callable[[Result], Percentiles | None], shares: int = 2
) -> list[Column[Result]]:
    """Return columns of p50, p99 and max in ms, or of the first `shares` of them."""

    def reader(share: str) -> Callable[[Result], float | None]:
        return lambda result: getattr(get(result), share, None)

    return [Column(f"{title} {share}", reader(share)) for share in ("p50", "p99", "max")[:shares]]


COLUMNS: list[Column[Result]] = [
    Column("tok/s", lambda r: r.summary.throughput, has_ratio=True),
    *spread_columns("TTFT", lambda r: r.summary.ttft),
    *spread_columns("queue", lambda r: r.summary.queue_wait),
    *spread_columns("prefill", lambda r: r.summary.prefill),
    *spread_columns("ITL", lambda r: r.summary.itl, 3),
    *spread_columns("TPOT", lambda r: r.summary.tpot, 1),
    *spread_columns("latency", lambda r: r.summary.latency)[1:],
    Column("steps", lambda r: r.cost.steps),
    Column("busy %", lambda r: None if r.cost.busy_share is None else 100 * r.cost.busy_share, 1),
    Column("hits %", lambda r: 100 * (r.summary.cache_hit_rate or 0.0), 1),
    Column("failed", lambda r: r.summary.failed),
]


def client_columns(clients: Sequence[ClientSummary]) -> list[Column[Result]]:
    """Return the columns of each client, if there are two to four."""
    if not 2 <= len(clients) <= 4:
        return []

    def reader(index: int, name: str) -> Callable[[Result], Percentiles | None]:
        return lambda result: getattr(result.summary.clients[index], name)

    columns = []
    for index, client in enumerate(clients):
        columns += spread_columns(f"TTFT of {client.client}", reader(index, "ttft"))
        columns += spread_columns(f"ITL of {client.client}", reader(index, "itl"), 3)
    return columns


def cpu_columns(result: Result) -> list[Column[Result]]:
    """Return the CPU time of a token in each kind of process, the bench client's too."""

    def reader(kind: str) -> Callable[[Result], float | None]:
        def read(result: Result) -> float | None:
            of_kind = [s for name, s in result.cost.cpu.items() if name.partition("/")[0] == kind]
            seconds, tokens = sum(filter(None, of_kind)), result.summary.completion_tokens
            return 1e6 * seconds / tokens if seconds and tokens else None

        return read

    kinds = dict.fromkeys(name.partition("/")[0] for name in result.cost.cpu)
    columns = [Column(f"CPU us/token {kind}", reader(kind), 1) for kind in kinds]
    return [*columns, Column("busy cores", _busy_cores, 2)]


def _busy_cores(result: Result) -> float | None:
    seconds = result.summary.duration
    return sum(filter(None, result.cost.cpu.values())) / seconds if seconds else None


async def compare(variants: dict[str, Options]) -> Turns[Result]:
    """Run the variants in turns and return their results, without printing the single runs."""
    turns: Turns[Result] = Turns(list(variants))
    async with AsyncExitStack() as stack:
        runs = {}
        for name, options in variants.items():
            print(f"starting {name}", file=sys.stderr, flush=True)
            runs[name] = await serving.open_runs(options, stack)
        first = next(iter(variants.values()))
        for number in range(first.warmup_runs):
            for name in variants:
                await _quietly(runs[name].warm_up(number))
        for number, name in turns.order(first.repeat_runs):
            result = await _quietly(runs[name].measure(number))
            turns.results[name].append(result)
            rate = f"{result.summary.throughput or 0:.1f} tok/s"
            print(f"run {number + 1}/{first.repeat_runs} {name}: {rate}", file=sys.stderr)
    return turns


async def _quietly(run: Awaitable[T]) -> T:
    with contextlib.redirect_stdout(io.StringIO()):
        return await run


def table(turns: Turns[Result]) -> str:
    """Return the medians of all figures."""
    first = next(iter(turns.results.values()))[0]
    columns = [*COLUMNS, *cpu_columns(first), *client_columns(first.summary.clients)]
    return turns.table(columns, "ms where not said")


def variants_of(argv: list[str]) -> dict[str, Options]:
    """Return the options of each variant, or raise ConfigError for a malformed command line."""
    named, common = split_common(argv)
    variants = {}
    for variant in map(variant_of, named):
        options = parse([*common, *variant.flags])
        if options.target.config is None:
            raise ConfigError("--endpoint measures one server: leave it out to compare several")
        target = replace(options.target, launcher=variant.launcher)
        variants[variant.name] = replace(options, target=target)
    if len(variants) < 2:
        raise ConfigError('at least two variants are compared: "NAME: FLAGS" "NAME: FLAGS" -- ...')
    return variants


def main() -> int:
    """Compare the variants of the command line, and return the exit code."""
    if "--help" in sys.argv[1:] or "-h" in sys.argv[1:]:
        print(__doc__)
        return EXIT_OK
    return run_command("bench.compare", _main)


def _main() -> int:
    turns = asyncio.run(compare(variants_of(sys.argv[1:])))
    print(table(turns))
    failed = any(result.summary.failed for runs in turns.results.values() for result in runs)
    return EXIT_FAILED if failed else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
