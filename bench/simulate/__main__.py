"""Run the real scheduler in simulated time: `python -m bench.simulate --num-requests N`.

It simulates a million requests in minutes, on one replica or many, to show the effect of a flag of
the scheduler. A step takes the time of a cost model (simulator/cost_model.py); no other
process runs. Exit codes: 0 all requests finished, 1 some failed, 2 bad flags.
"""

import argparse
import dataclasses
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.cli.command import EXIT_USAGE, named_flags, run_command, strict_parser
from bench.load import synthetic
from bench.load.flags import (
    LOAD_DEFAULTS,
    LOAD_FLAGS,
    add_goodput,
    add_load_flags,
    add_trace,
    requests_of_trace,
    trace_spec,
)
from bench.report.files import now, read_runs
from bench.report.table import FigureRow, show
from cluster_proc.scaling import Scaling, ScalingLimits
from quadriga.errors import ConfigError
from quadriga.programs import install_command
from quadriga.server.config.engine_args import DOWN_AFTER_S, TARGET_REQUESTS, UP_AFTER_S
from quadriga.server.config.flags import check_positive, flag_name
from simulator import clock, cost_model, fleet, latency, report, trace
from simulator.flags import add_flags_of_world, config_of, num_pages_of, parsed, source_of
from simulator.world import World

# The flags of replicas that come and go in a simulation.

# From the decision to add a replica until it serves: a machine that is there, and a small model.
START_S = 20.0


def add_fleet_changes(group: Any) -> None:
    """Add the flags."""
    add = group.add_argument
    add(
        "--lose",
        action="append",
        default=[],
        metavar="COUNT@SECONDS",
        help="lose replicas at a time; may be given several times",
    )
    add("--return-after", type=float, metavar="SECONDS", help="lost replicas come back after this")
    add("--scale", metavar="MIN:MAX", help="the number of replicas follows the load")
    add("--target-ongoing-requests", type=int, default=TARGET_REQUESTS, metavar="N",
        help="open requests for each replica, with --scale")  # fmt: skip
    add("--scale-up-after", type=float, default=UP_AFTER_S, metavar="SECONDS",
        help="of too much load, before replicas are added")  # fmt: skip
    add("--scale-down-after", type=float, default=DOWN_AFTER_S, metavar="SECONDS",
        help="of too little load, before a replica leaves")  # fmt: skip
    add("--replica-start", type=float, default=START_S, metavar="SECONDS",
        help="until a replica that is added serves")  # fmt: skip


@dataclass(frozen=True, slots=True)
class FleetChanges:
    """What happens to the replicas of a simulation.

    Attributes:
        losses: replicas that are lost.
        return_after_s: seconds after which they come back; None: not at all.
        scaling: how their number follows the load; None: it does not.
        start_s: seconds until a replica that is added serves.
    """

    losses: list[fleet.Loss]
    return_after_s: float | None
    scaling: ScalingLimits | None
    start_s: float

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "FleetChanges":
        """Read the flags, or raise ConfigError."""
        check_positive(arguments, "target_ongoing_requests")
        for name in ("return_after", "scale_up_after", "scale_down_after", "replica_start"):
            value = getattr(arguments, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{flag_name(name)} must be 0 or more (it is {value})")
        losses = [fleet.Loss.parse(text) for text in arguments.lose]
        num_lost = max((loss.count for loss in losses), default=0)
        if losses and num_lost >= arguments.replicas:
            raise ConfigError(
                f"--lose {num_lost} replicas of --replicas {arguments.replicas}: one has to stay"
            )
        if arguments.return_after is not None and not losses:
            raise ConfigError("--return-after works with --lose only")
        scaling = None if arguments.scale is None else _limits_of(arguments)
        return cls(losses, arguments.return_after, scaling, arguments.replica_start)

    def apply(self, world: World) -> None:
        """Let all this happen in a world that has not run yet."""
        for loss in self.losses:
            world.lose(loss, self.return_after_s)
        if self.scaling is not None:
            scaling = Scaling(self.scaling, len(world.replicas))
            world.fleet.follow_load(scaling, self.start_s)


def _limits_of(arguments: argparse.Namespace) -> ScalingLimits:
    low, _, high = arguments.scale.partition(":")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise ConfigError(f"--scale is {arguments.scale!r}: give MIN:MAX, such as 1:8")
    if not int(low) <= arguments.replicas <= int(high):
        raise ConfigError(
            f"--replicas {arguments.replicas} is not within --scale {arguments.scale}"
        )
    return ScalingLimits(
        min_replicas=int(low),
        max_replicas=int(high),
        target=arguments.target_ongoing_requests,
        up_after_s=arguments.scale_up_after,
        down_after_s=arguments.scale_down_after,
    )


# Defaults of the load flags.
DEFAULTS = LOAD_DEFAULTS | {
    "num_requests": 1000,
    "random_input_len": "64",
    "max_new_tokens": "32",
    "request_rate": 8.0,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the simulation of a command line, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)

    def work() -> int:
        arguments = _arguments(words)
        return compare(words, arguments) if arguments.vary else simulate(arguments)

    return run_command("bench.simulate", work, on_failure=EXIT_USAGE)


def simulate(arguments: argparse.Namespace) -> int:
    """Simulate, print and write the figures, and return the exit code."""
    model = cost_model.load(arguments.cost_model)
    draw_plot = _plotter(arguments.plot)
    measured = None if arguments.compare is None else read_runs(arguments.compare)
    run, world = run_world(arguments)
    print(report.block(run, arguments.replicas, source_of(arguments.cost_model, model)))
    if measured is not None:
        print(report.comparison(run, [one["summary"] for one in measured]))
    if arguments.json is not None:
        flags = {name: str(value) for name, value in vars(arguments).items()}
        document = {"flags": flags, "summary": dataclasses.asdict(run)}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    title = ("simulated", source_of(arguments.cost_model, model), _load_text(arguments, run))
    draw_plot(world, (*title, now()[:10]), latency.Slo.parse(arguments.goodput))
    return 1 if run.failed else 0


def compare(words: list[str], arguments: argparse.Namespace) -> int:
    """Simulate the same load with each variant's flags, and print a table with a row for each."""
    variants = [named_flags(text) for text in arguments.vary]
    parsed_flags = [(name, _arguments([*words, *flags])) for name, flags in variants]
    rows, num_failed = [], 0
    for name, given in parsed_flags:
        run, world = run_world(given)
        num_failed += run.failed
        rows.append(_row(name, run, world))
    title = f"{arguments.replicas} replicas, {rows[0]['requests']} requests"
    limits = f", {' '.join(arguments.goodput)}" if arguments.goodput else ""
    show(title + limits, rows, arguments.json)
    return 1 if num_failed else 0


def _row(name: str, run: report.Figures, world: World) -> FigureRow:
    """Return the row of a variant."""

    def ms(spread: latency.Percentiles | None, share: str) -> float | None:
        return None if spread is None else getattr(spread, share)

    return {
        "": name,
        "requests": run.requests,
        "failed": run.failed,
        "s": run.duration,
        "goodput, %": None if run.goodput is None else 100 * run.goodput.share,
        "TTFT p50, ms": ms(run.ttft, "p50"),
        "TTFT p95, ms": ms(run.ttft, "p95"),
        "TPOT p50, ms": ms(run.tpot, "p50"),
        "TPOT p95, ms": ms(run.tpot, "p95"),
        "ITL p99, ms": ms(run.itl, "p99"),
        "cached, %": 100 * run.cache_hit_rate,
        "handed over": world.fleet.counts.num_handed_over,
        "role changes": world.fleet.counts.num_role_changes,
        "simulated in, s": run.wall,
    }


def run_world(arguments: argparse.Namespace) -> tuple[report.Figures, World]:
    """Run the simulation of a command line."""
    config, model = config_of(arguments), cost_model.load(arguments.cost_model)
    slo = latency.Slo.parse(arguments.goodput)
    num_requests, arrivals = _arrivals(arguments)
    changes = FleetChanges.of(arguments)
    with tqdm(total=num_requests, desc="simulate", unit="req", leave=False, disable=None) as bar:
        world = World(
            config,
            model,
            num_pages_of(arguments, config, model),
            arguments.replicas,
            arguments.load_balance_method,
            arguments.seed,
            on_end=bar.update,
            max_replicas=None if changes.scaling is None else changes.scaling.max_replicas,
            prefill_replicas=arguments.prefill_replicas,
            copy_share=arguments.copy_share,
        )
        changes.apply(world)
        began = time.perf_counter()
        gc.disable()  # there are no cycles to find, and the scheduler's process runs without it
        try:
            world.run(arrivals)
        finally:
            gc.enable()
        wall = time.perf_counter() - began
    return report.figures(world, model.delays_ms.delivery, slo, wall), world


def _arrivals(
    arguments: argparse.Namespace,
) -> tuple[int, Iterable[tuple[int, trace.TraceRequest]]]:
    """Return the number of requests, and the requests with indexes in the order of World.run."""
    given = vars(arguments)
    drawn = [flag_name(name) for name in LOAD_FLAGS if name in given]
    if arguments.trace is not None:
        if drawn:
            raise ConfigError(
                f"{', '.join(drawn)} would change nothing about --trace: leave it out"
            )
        requests = requests_of_trace(arguments)
        indexed = sorted(
            enumerate(requests), key=lambda item: 0.0 if item[1].follows is not None else item[1].at
        )
        return len(requests), indexed
    values = DEFAULTS | given
    if "max_concurrency" in given and "request_rate" not in given:
        values |= {"request_rate": math.inf}  # a closed loop has no rate
    spec = trace_spec(values)
    return spec.num_requests, enumerate(synthetic.generate(spec))


def _load_text(arguments: argparse.Namespace, run: report.Figures) -> str:
    """Return the load in a few words, for the title of a plot."""
    given = vars(arguments)
    if arguments.trace is not None:
        text = f"{run.requests:,} requests of a trace"
    elif (lanes := given.get("max_concurrency")) is not None:
        text = f"{run.requests:,} requests, {lanes} in flight"
    else:
        rate = given.get("request_rate", DEFAULTS["request_rate"])
        text = f"{run.requests:,} requests at {rate:g} requests/s"
    return text + (f" on {arguments.replicas} replicas" if arguments.replicas > 1 else "")


def _plotter(path: Path | None) -> Callable[[World, Sequence[str], latency.Slo], None]:
    """Return the function that draws a finished run; fail early if matplotlib is missing."""
    if path is None:
        return lambda *_: None
    try:
        from bench.report import plots
    except ImportError as error:
        raise ConfigError(
            f"--plot needs {error.name}, which is not installed: {install_command('plot')}"
        ) from None
    return lambda world, title, slo: plots.draw_simulation(
        path, world.records, world.samples, clock.START, title, slo
    )


def _arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line, or raise ConfigError."""
    return parsed(_parser(), argv)


def _parser() -> argparse.ArgumentParser:
    parser = strict_parser("bench.simulate", "[FLAGS]", __doc__)
    load = parser.add_argument_group("load")
    add_trace(load)
    load.add_argument("--seed", type=int, default=0, help="seed of the load")
    add_load_flags(load, defaults=DEFAULTS)
    add_flags_of_world(parser)
    add_fleet_changes(parser.add_argument_group("replicas that come and go"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_output(group: Any) -> None:
    add = group.add_argument
    add_goodput(group)
    add("--vary", action="append", default=[], metavar='"NAME: FLAGS"',
        help="a row of a table, with these flags, too; --json has a line for each")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write all figures to this file")
    add("--plot", type=Path, metavar="FILE.png", help="draw the run")
    add(
        "--compare",
        type=Path,
        metavar="RUN.json",
        help="compare with a bench.serving --json of the same trace",
    )


if __name__ == "__main__":
    sys.exit(main())
