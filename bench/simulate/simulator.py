"""Run the real scheduler in simulated time: `python -m bench.simulate --num-requests N`.

It simulates a million requests in minutes, on one replica or many, to show the effect of a flag of
the scheduler. A step takes the time of a cost model (bench/simulate/cost_model.py); no other
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
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.cli.load_flags import (
    LOAD_DEFAULTS,
    LOAD_FLAGS,
    add_goodput,
    add_load_flags,
    add_trace,
    trace_spec,
)
from bench.command import EXIT_USAGE, run_command, strict_parser
from bench.load.mooncake import read_requests
from bench.load.synthetic import generate
from bench.load.trace import TraceRequest
from bench.metrics.slo import Slo
from bench.report.report_files import now, read_runs
from bench.simulate import cost_model
from bench.simulate.clock import START
from bench.simulate.fleet.flags import FleetChanges, add_fleet_changes
from bench.simulate.report import Figures, block, comparison, figures
from bench.simulate.run import World
from bench.simulate.world_flags import (
    add_flags_of_world,
    config_of,
    num_pages_of,
    parsed,
    source_of,
)
from quadriga.config.flags import flag_name
from quadriga.errors import ConfigError
from quadriga.programs import install_command

# Defaults of the load flags.
DEFAULTS = LOAD_DEFAULTS | {
    "num_requests": 1000,
    "random_input_len": "64",
    "max_new_tokens": "32",
    "request_rate": 8.0,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the simulation of a command line, and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    return run_command("bench.simulate", lambda: simulate(_arguments(argv)), on_failure=EXIT_USAGE)


def simulate(arguments: argparse.Namespace) -> int:
    """Simulate, print and write the figures, and return the exit code."""
    config, model = config_of(arguments), cost_model.load(arguments.cost_model)
    slo = Slo.parse(arguments.goodput)
    draw_plot = _plotter(arguments.plot)
    measured = None if arguments.compare is None else read_runs(arguments.compare)
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
        )
        changes.apply(world)
        began = time.perf_counter()
        gc.disable()  # there are no cycles to find, and the scheduler's process runs without it
        try:
            world.run(arrivals)
        finally:
            gc.enable()
        wall = time.perf_counter() - began
    run = figures(world, model.delays_ms.delivery, slo, wall)
    print(block(run, arguments.replicas, source_of(arguments.cost_model, model)))
    if measured is not None:
        print(comparison(run, [one["summary"] for one in measured]))
    if arguments.json is not None:
        flags = {name: str(value) for name, value in vars(arguments).items()}
        document = {"flags": flags, "summary": dataclasses.asdict(run)}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    title = ("simulated", source_of(arguments.cost_model, model), _load_text(arguments, run))
    draw_plot(world, (*title, now()[:10]), slo)
    return 1 if run.failed else 0


def _arrivals(arguments: argparse.Namespace) -> tuple[int, Iterable[tuple[int, TraceRequest]]]:
    """Return the number of requests, and the requests with indexes in the order of World.run."""
    given = vars(arguments)
    drawn = [flag_name(name) for name in LOAD_FLAGS if name in given]
    if arguments.trace is not None:
        if drawn:
            raise ConfigError(
                f"{', '.join(drawn)} would change nothing about --trace: leave it out"
            )
        requests = read_requests(arguments.trace)
        indexed = sorted(
            enumerate(requests),
            key=lambda item: 0.0 if item[1].follows is not None else item[1].at,
        )
        return len(requests), indexed
    values = DEFAULTS | given
    if "max_concurrency" in given and "request_rate" not in given:
        values |= {"request_rate": math.inf}  # a closed loop has no rate
    spec = trace_spec(values)
    return spec.num_requests, enumerate(generate(spec))


def _load_text(arguments: argparse.Namespace, run: Figures) -> str:
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


def _plotter(path: Path | None) -> Callable[[World, Sequence[str], Slo], None]:
    """Return the function that draws a finished run; fail early if matplotlib is missing."""
    if path is None:
        return lambda *_: None
    try:
        from bench.simulate import plots
    except ImportError as error:
        raise ConfigError(
            f"--plot needs {error.name}, which is not installed: {install_command('plot')}"
        ) from None
    return lambda world, title, slo: plots.draw(
        path, world.records, world.samples, START, title, slo
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
    add("--json", type=Path, metavar="FILE", help="write all figures to this file")
    add("--plot", type=Path, metavar="FILE.png", help="draw the run")
    add(
        "--compare",
        type=Path,
        metavar="RUN.json",
        help="compare with a bench.serving --json of the same trace",
    )
