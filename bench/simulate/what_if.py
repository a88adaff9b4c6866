"""Simulate the load of a server's log with other flags, beside what happened.

    python -m bench.simulate.what_if server.log --vary "4 slots: --max-running-requests 4"

The log is that of a server with --log-format json and --log-requests. Give the flags that it ran
with; each --vary adds flags to these. The steps of the cost model are stretched by one factor, so
that the time per token is the measured one. If "as it was" is not near to "measured" even so, the
cost model is not that of this server (docs/capacity.md). Exit codes: 0 done, 1 a request failed in
a simulation, 2 bad flags.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.command import EXIT_FAILED, EXIT_OK, EXIT_USAGE, named_flags, run_command, strict_parser
from bench.load.server_log import MeasuredLoad, load_of, measured, read_server_log
from bench.load.trace import TraceRequest
from bench.metrics.slo import Slo
from bench.simulate import cost_model
from bench.simulate.report import Figures, figures
from bench.simulate.run import World
from bench.simulate.simulator import (
    SERVER_FLAGS,
    add_world,
    config_of,
    num_pages_of,
    parsed,
    source_of,
)
from quadriga.config import server_config as server_flags
from quadriga.errors import ConfigError

SPREADS = {"queue_wait": "queue wait", "ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}
SHARES = ("p50", "p95", "p99")
MAX_FITS, FIT_TOLERANCE = 8, 0.02
TITLE_CHARS, MIN_COLUMN_CHARS = 24, 10


class FlagVariant(NamedTuple):
    """A column of the table."""

    name: str
    arguments: argparse.Namespace


def main(argv: Sequence[str] | None = None) -> int:
    """Run the simulations of a command line, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_command("bench.simulate.what_if", lambda: compare(words), on_failure=EXIT_USAGE)


def compare(words: list[str]) -> int:
    """Print the figures of all variants beside the measured ones."""
    arguments = arguments_of(words)
    variants = [FlagVariant("as it was", arguments)]
    for text in arguments.vary:
        name, flags = named_flags(text)
        if name in (variant.name for variant in variants):
            raise ConfigError(f"two columns have the name {name!r}: give each its own")
        variants.append(FlagVariant(name, arguments_of([*words, *flags])))
    if arguments.last is not None and not arguments.last > 0:
        raise ConfigError(f"--last is {arguments.last}: give seconds, such as 600")
    requests = read_server_log(arguments.log, arguments.last)
    load, happened = load_of(requests), measured(requests)
    slowdown = fit_slowdown(arguments, load, happened)
    runs = {one.name: simulate(one.arguments, load, slowdown) for one in variants}
    model = cost_model.load(arguments.cost_model)
    print(
        f"Cost model: {source_of(arguments.cost_model, model)}, steps {slowdown:.2f} times as long"
    )
    print(f"{len(requests)} requests in {happened.duration:.1f} s")
    print("\n".join(table(happened, runs)))
    return EXIT_FAILED if any(run.failed for run in runs.values()) else EXIT_OK


def arguments_of(words: list[str]) -> argparse.Namespace:
    """Parse a command line, or raise ConfigError."""
    return parsed(_parser(), words)


def fit_slowdown(
    arguments: argparse.Namespace, load: list[TraceRequest], happened: MeasuredLoad
) -> float:
    """Return the factor of the steps with which the median time per token is the measured one."""
    slowdown = 1.0
    for _ in range(MAX_FITS):
        run = simulate(arguments, load, slowdown)
        if happened.tpot is None or run.tpot is None or not run.tpot.p50:
            break  # requests of one token say nothing about it
        ratio = happened.tpot.p50 / run.tpot.p50
        slowdown *= ratio
        if abs(ratio - 1) < FIT_TOLERANCE:
            break
    return slowdown


def simulate(arguments: argparse.Namespace, load: list[TraceRequest], slowdown: float) -> Figures:
    """Return the figures of a load with these flags, and steps that are longer by a factor."""
    config, model = config_of(arguments), cost_model.load(arguments.cost_model)
    model = msgspec.structs.replace(model, slowdown=model.slowdown * slowdown)
    world = World(
        config,
        model,
        num_pages_of(arguments, config, model),
        arguments.replicas,
        arguments.load_balance_method,
    )
    began = time.perf_counter()
    world.run(enumerate(load))
    return figures(world, model.delays_ms.delivery, Slo(), time.perf_counter() - began)


def table(happened: MeasuredLoad, runs: dict[str, Figures]) -> Iterable[str]:
    """Yield the lines of the table: a column for what happened, and one for each variant."""
    columns: list[MeasuredLoad | Figures] = [happened, *runs.values()]
    names = ["measured", *runs]
    widths = [max(MIN_COLUMN_CHARS, len(name)) + 2 for name in names]

    def line(title: str, cells: Iterable[str]) -> str:
        row = "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return title.ljust(TITLE_CHARS) + row

    yield line("", names)
    for name, title in SPREADS.items():
        for share in SHARES:
            values = (getattr(getattr(column, name), share, None) for column in columns)
            yield line(f"{title} {share}, ms", map(_ms, values))
    yield line("generated tokens/s", (f"{column.throughput:.1f}" for column in columns))
    yield line("cached tokens", (str(column.cached_tokens) for column in columns))
    yield line("retractions", (str(column.retractions) for column in columns))
    failed = ("", *(str(run.failed) for run in runs.values()))
    yield line("failed", failed)


def _ms(value: Any) -> str:
    return "n/a" if value is None else f"{value:.1f}"


def _parser() -> argparse.ArgumentParser:
    parser = strict_parser("bench.simulate.what_if", "LOG [FLAGS]", __doc__)
    parser.add_argument("log", type=Path, metavar="LOG", help="the server's log, in JSON")
    parser.add_argument(
        "--last", type=float, metavar="SECONDS", help="only the last ones (default: all requests)"
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar='"NAME: FLAGS"',
        help="another column, with these flags, too",
    )
    add_world(parser.add_argument_group("server"))
    server_flags.add_flags(parser, only=SERVER_FLAGS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
