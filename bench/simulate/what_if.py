"""Simulate the load of a server's log with other flags, beside what happened.

    python -m bench.simulate.what_if server.log --vary "4 slots: --max-running-requests 4"

The log is that of a server with --log-format json and --log-requests. Give the flags that it ran
with; each --vary adds flags to these. The steps of the cost model are stretched by one factor, so
that the time per token is the measured one. If "as it was" is not near to "measured" even so, the
cost model is not that of this server (docs/tune.md). Exit codes: 0 done, 1 a request failed in
a simulation, 2 bad flags.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.cli.command import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    named_flags,
    run_command,
    strict_parser,
)
from quadriga.errors import ConfigError
from simulator.flags import add_flags_of_world, model_of, parsed, source_of
from simulator.report import Figures
from simulator.what_if import (
    AS_IT_WAS,
    MeasuredLoad,
    doubt,
    fit_model,
    load_of,
    measured,
    read_server_log,
    replay,
)

SPREADS = {"queue_wait": "queue wait", "ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}
SHARES = ("p50", "p95", "p99")
TITLE_CHARS, MIN_COLUMN_CHARS = 24, 10


class LogVariant(NamedTuple):
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
    variants = [LogVariant(AS_IT_WAS, arguments)]
    for text in arguments.vary:
        name, flags = named_flags(text)
        if name in (variant.name for variant in variants):
            raise ConfigError(f"two columns have the name {name!r}: give each its own")
        variants.append(LogVariant(name, arguments_of([*words, *flags])))
    if arguments.last is not None and not arguments.last > 0:
        raise ConfigError(f"--last is {arguments.last}: give seconds, such as 600")
    requests = read_server_log(arguments.log, arguments.last)
    load, happened = load_of(requests), measured(requests)
    model = model_of(arguments)
    fitted = fit_model(arguments, load, happened, model)
    slowdown = fitted.slowdown / model.slowdown
    runs = {}
    for one in variants:
        is_other = one.arguments.cost_model != arguments.cost_model
        used, factor = (model_of(one.arguments), slowdown) if is_other else (fitted, 1.0)
        runs[one.name] = replay(one.arguments, load, factor, used).figures
    print(
        f"Cost model: {source_of(arguments.cost_model, model)}, steps {slowdown:.2f} times as long"
    )
    print(f"{len(requests)} requests in {happened.duration:.1f} s")
    print("\n".join(table(happened, runs)))
    if why := doubt(len(requests), happened, runs[AS_IT_WAS]):
        print(f"This cannot tell yet what other flags would do: {why}")
    return EXIT_FAILED if any(run.failed for run in runs.values()) else EXIT_OK


def arguments_of(words: list[str]) -> argparse.Namespace:
    """Parse a command line, or raise ConfigError."""
    return parsed(_parser(), words)


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
    add_flags_of_world(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
