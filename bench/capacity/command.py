"""Find the request rate that this machine serves within latency limits.

    python -m bench.capacity --slo ttft_p99:500 --slo tpot_p50:40 --model smollm2-135m

It measures the steps of the model, starts a server (or uses --endpoint), fits the simulator to a
short run, searches the rate in the simulator, and runs the server at that rate and at 1.3 times the
rate. That takes a few minutes. Exit codes: 0 a rate was found and verified, 1 there is none,
2 bad flags, 3 no server, 130 interrupted.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.capacity.answer import Answer, document, text
from bench.capacity.planner import LOAD_DEFAULTS_HERE, WORKLOAD_FLAGS, CapacityRequest, Planner
from bench.capacity.targets import LatencyTarget
from bench.cli.checks import PLOT_SUFFIXES
from bench.cli.load_flags import add_load_flags
from bench.command import EXIT_FAILED, EXIT_OK, run_command, run_until_signal, strict_parser
from quadriga.config import server_config as server_flags
from quadriga.errors import ConfigError
from quadriga.programs import install_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the search of a command line, and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    return run_command("bench.capacity", lambda: _main(argv))


def _main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    draw = _plotter(arguments.plot)
    planner = Planner(_request(arguments))
    return run_until_signal(_search(planner, arguments.json, draw))


async def _search(planner: Planner, json_path: Path | None, draw: Callable[[Answer], None]) -> int:
    answer = await planner.search()
    print(text(answer), flush=True)
    if json_path is not None:
        json_path.write_text(json.dumps(document(answer), indent=2) + "\n")
    draw(answer)
    return EXIT_OK if answer.verified else EXIT_FAILED


def _request(arguments: argparse.Namespace) -> CapacityRequest:
    if not arguments.verify_seconds > 0:
        raise ConfigError(f"verify_seconds must be positive (it is {arguments.verify_seconds})")
    for path in (arguments.json, arguments.plot, arguments.cost_model, arguments.server_log):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no directory {path.parent}")
    given = {name: value for name, value in vars(arguments).items() if name in WORKLOAD_FLAGS}
    return CapacityRequest(
        targets=[LatencyTarget.parse(limit) for limit in arguments.slo],
        config=server_flags.from_namespace(arguments),
        endpoint=getattr(arguments, "endpoint", ""),
        names_model="model" in arguments,
        load={**LOAD_DEFAULTS_HERE, **given},
        seed=arguments.seed,
        verify_s=arguments.verify_seconds,
        cost_model=arguments.cost_model,
        server_log=arguments.server_log,
    )


def _plotter(path: Path | None) -> Callable[[Answer], None]:
    """Return the function that draws the answer; fail early if it cannot."""
    if path is None:
        return lambda _: None
    if path.suffix not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot {path}: it must end in {', '.join(PLOT_SUFFIXES)}")
    try:
        from bench.capacity import plot
    except ImportError as error:
        raise ConfigError(
            f"--plot needs {error.name}, which is not installed: {install_command('plot')}"
        ) from None
    return lambda answer: plot.draw(path, answer)


def _parser() -> argparse.ArgumentParser:
    parser = strict_parser("bench.capacity", "--slo NAME_PERCENTILE:MS [FLAGS]", __doc__)
    parser.add_argument(
        "--slo",
        action="append",
        required=True,
        metavar="NAME_PERCENTILE:MS",
        help="limit of ttft, tpot, itl or e2el, and its mean, p50, p95, p99 or max, such as"
        " ttft_p99:500; may be given several times",
    )
    load = parser.add_argument_group("requests")
    add_load_flags(load, WORKLOAD_FLAGS, LOAD_DEFAULTS_HERE)
    load.add_argument("--seed", type=int, default=0, help="seed of the load (default: 0)")
    search = parser.add_argument_group("search")
    search.add_argument(
        "--verify-seconds", type=float, default=30.0, help="duration of each real run (default: 30)"
    )
    search.add_argument(
        "--cost-model",
        type=Path,
        metavar="FILE",
        help="durations of steps: read if the file exists, otherwise measured and written",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="write all points to this file")
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="draw rates and percentiles")
    output.add_argument(
        "--server-log", type=Path, metavar="FILE", help="log of the server that the bench starts"
    )
    server_flags.add_flags(parser)
    return parser
