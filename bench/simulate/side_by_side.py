"""Measure what prompts side by side, a step target and targets of the first token are worth.

    python -m bench.simulate.side_by_side

Two loads in simulated time: 6,000-token prompts among short ones, and one with the shape of
Mooncake's trace. "alone" is the same load without the long prompts. --write-traces saves the loads
for bench.compare, which sends them to real servers in turns.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from bench.command import EXIT_OK, command_parser, run_command
from bench.load.mixed_prompts import LONG_CLIENT, long_among_short, mooncake_like
from bench.load.trace import TraceRequest, write_trace
from bench.metrics.percentiles import MS
from bench.simulate import cost_model
from bench.simulate.run import World
from quadriga.config.server_config import ServerConfig
from quadriga.errors import ConfigError

Flags = dict[str, Any]

ONE: Flags = {"max_num_partial_prefills": 1}
LONG_AMONG_SHORT: dict[str, Flags] = {
    "one after the other": ONE,
    "side by side": {},
    "and --itl-target 80": {"itl_target": 80.0},
    "and --itl-target 45": {"itl_target": 45.0},
}

SHORT_HEADER = """\
| short prompts | | TTFT p50 / p99, ms | p99 over alone | TTFT of 6,000 tokens, s | ITL p99, ms \
| tokens/s |
|---|---|---|---|---|---|---|"""
MOONCAKE_HEADER = """
| requests | | within --ttft | and --tpot | ratio | TTFT p50 / p99, ms | refused | tokens/s |
|---|---|---|---|---|---|---|---|"""


class SimulatedRun(NamedTuple):
    """What a run has brought; arrays by request.

    Attributes:
        ttft_ms: time to the first token; NaN without one.
        tpot_ms: mean time between tokens.
        tokens_per_s: generated tokens per second of the run.
        itl_p99_ms: 99th percentile of the times between tokens.
        num_refused: number of requests that were refused.
    """

    ttft_ms: npt.NDArray[np.float64]
    tpot_ms: npt.NDArray[np.float64]
    tokens_per_s: float
    itl_p99_ms: float
    num_refused: int


def serve(requests: list[TraceRequest], flags: Flags) -> SimulatedRun:
    """Return what a simulated server does with the requests."""
    model = cost_model.load(cost_model.DEFAULT)
    config = ServerConfig().replace(**flags)
    num_pages = model.measured_on.max_total_tokens // config.worker.page_size
    world = World(config, model, num_pages)
    world.run(enumerate(requests))
    records = world.records
    first, last, count = (records[n] for n in ("first_token", "last_token", "completion_tokens"))
    duration = float(records["finished"].max() - records["submitted"].min())
    return SimulatedRun(
        ttft_ms=np.where(first > 0, (first - records["submitted"]) * MS, np.nan),
        tpot_ms=(last - first) / np.maximum(count - 1, 1) * MS,
        tokens_per_s=float(count.sum()) / duration,
        itl_p99_ms=float(np.percentile(records.gaps.values, 99)) * MS,
        num_refused=len(records.errors),
    )


def short_ones(num_short: int, rate: float, num_long: int) -> Iterable[str]:
    """Yield the lines of a table: long prompts among short ones at a rate."""
    alone = serve(long_among_short(num_short, rate, 0), {})
    alone_p99 = float(np.percentile(alone.ttft_ms, 99))
    requests = long_among_short(num_short, rate, num_long)
    is_short = np.array([request.client != LONG_CLIENT for request in requests])
    yield f"| {rate:g}/s | alone | {spread(alone.ttft_ms)} | | | {alone.itl_p99_ms:.0f} | |"
    base_rate = 0.0
    for name, flags in LONG_AMONG_SHORT.items():
        run = serve(requests, flags)
        base_rate = base_rate or run.tokens_per_s
        ratio = float(np.percentile(run.ttft_ms[is_short], 99)) / alone_p99
        yield (
            f"| | {name} | {spread(run.ttft_ms[is_short])} | {ratio:.2f}"
            f" | {np.median(run.ttft_ms[~is_short]) / MS:.1f} | {run.itl_p99_ms:.0f}"
            f" | {run.tokens_per_s / base_rate:.3f} |"
        )


def mooncake(num_requests: int, rate: float, ttft_s: float, tpot_ms: float) -> Iterable[str]:
    """Yield the lines of a table: requests within limits of a load like Mooncake's trace."""
    base, base_good, base_rate = list(mooncake_like(num_requests, rate)), 0, 0.0
    variants: dict[str, tuple[float | None, Flags]] = {
        "one after the other": (None, ONE),
        "side by side": (None, {}),
        "and --itl-target 100": (None, {"itl_target": 100.0}),
        f"side by side, ttft_target {ttft_s:g}": (ttft_s, {}),
    }
    for name, (target_s, flags) in variants.items():
        run = serve([msgspec.structs.replace(r, ttft_target=target_s) for r in base], flags)
        in_time = run.ttft_ms <= ttft_s * MS
        good = int((in_time & (run.tpot_ms <= tpot_ms)).sum())
        base_good, base_rate = base_good or good, base_rate or run.tokens_per_s
        yield (
            f"| {rate:g}/s | {name} | {in_time.mean():.1%} | {good / num_requests:.1%}"
            f" | {good / base_good:.2f} | {spread(run.ttft_ms[~np.isnan(run.ttft_ms)])}"
            f" | {run.num_refused / num_requests:.1%} | {run.tokens_per_s / base_rate:.3f} |"
        )


def spread(values_ms: npt.NDArray[np.float64]) -> str:
    """Return median and 99th percentile in ms."""
    median, p99 = np.percentile(values_ms, [50, 99])
    return f"{median:.0f} / {p99:.0f}"


def report(arguments: argparse.Namespace) -> int:
    """Print both tables, and return the exit code."""
    print(SHORT_HEADER)
    for rate in arguments.rates:
        num_long = max(1, round(arguments.num_requests / rate / arguments.long_every))
        for line in short_ones(arguments.num_requests, rate, num_long):
            print(line, flush=True)
    print(MOONCAKE_HEADER)
    for rate in arguments.mooncake_rates:
        for line in mooncake(arguments.num_requests, rate, arguments.ttft, arguments.tpot):
            print(line, flush=True)
    return EXIT_OK


def write_traces(arguments: argparse.Namespace) -> int:
    """Write both loads at their first rates, and return the exit code."""
    folder, rate = arguments.write_traces, arguments.rates[0]
    num_long = max(1, round(arguments.num_requests / rate / arguments.long_every))
    short = long_among_short(arguments.num_requests, rate, num_long)
    write_trace(folder / "long-among-short.jsonl", short)
    requests = mooncake_like(arguments.num_requests, arguments.mooncake_rates[0])
    write_trace(folder / "mooncake-like.jsonl", requests)
    return EXIT_OK


def main(argv: list[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    parser = command_parser("bench.simulate.side_by_side", __doc__)
    add = parser.add_argument
    add("--num-requests", type=int, default=600, help="of each run, without the long prompts")
    add("--rates", type=float, nargs="+", default=[1.0, 2.0, 4.0], help="short prompts a second")
    add("--long-every", type=float, default=40.0, metavar="S", help="seconds between long prompts")
    add(
        "--mooncake-rates", type=float, nargs="+", default=[0.6, 0.8, 1.0], help="requests a second"
    )
    add("--ttft", type=float, default=2.0, metavar="S", help="limit of the time to the first token")
    add("--tpot", type=float, default=200.0, metavar="MS", help="limit of the time per token")
    add("--write-traces", type=Path, metavar="DIR", help="write the loads and run nothing")

    def work() -> int:
        arguments = parser.parse_args(argv)
        if arguments.num_requests < 1:
            raise ConfigError(f"--num-requests is {arguments.num_requests}: it must be positive")
        return report(arguments) if arguments.write_traces is None else write_traces(arguments)

    return run_command("bench.simulate.side_by_side", work)


if __name__ == "__main__":
    sys.exit(main())
