"""Find the request rate that this machine serves within latency limits.

    python -m bench.capacity --slo ttft_p99:500 --slo tpot_p50:40 --model smollm2-135m

It measures the steps of the model, starts a server (or uses --endpoint), fits the simulator to a
short run, searches the rate in the simulator, and runs the server at that rate and at 1.3 times the
rate. That takes a few minutes. Exit codes: 0 a rate was found and verified, 1 there is none,
2 bad flags, 3 no server, 130 interrupted.
"""

import argparse
import asyncio
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cli.command import EXIT_FAILED, EXIT_OK, run_command, run_until_signal, strict_parser
from bench.cli.options import parse
from bench.client.server import info_of, start_server
from bench.load.flags import LOAD_DEFAULTS, add_load_flags, trace_spec
from bench.load.synthetic import TraceSpec, generate
from bench.report.metrics import Summary
from bench.report.report import Result
from bench.serving import CONNECT_TIMEOUT_S, open_runs
from bench.simulate.fit_cost_model import calibrate
from quadriga.errors import ConfigError, ServerFailed
from quadriga.programs import PROGRAMS_DIR
from quadriga.server.config import server_config
from quadriga.server.config import server_config as server_flags
from quadriga.server.config.flags import flag_name
from simulator import cost_model, latency, report
from simulator.cost_model import CostModel
from simulator.world import World

# The name on the command line, and the field of Summary and Figures.
METRICS = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "latency"}
SHARES = ("mean", "p50", "p95", "p99", "max")
MAX_FAILED_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """A limit in ms of one percentile (a field of Percentiles) of one metric."""

    metric: str
    share: str
    limit_ms: float

    @classmethod
    def parse(cls, text: str) -> "LatencyTarget":
        """Parse "ttft_p99:500".

        Raises:
            ConfigError: the text has another form.
        """
        name, _, number = text.partition(":")
        metric, _, share = name.partition("_")
        try:
            limit_ms = float(number)
        except ValueError:
            limit_ms = 0.0
        if metric not in METRICS or share not in SHARES or not 0 < limit_ms < math.inf:
            raise ConfigError(
                f"slo is {text!r}: it must be {', '.join(METRICS)}, an underscore,"
                f" {', '.join(SHARES)}, a colon and ms above 0, such as ttft_p99:500"
            )
        return cls(metric, share, limit_ms)

    @property
    def title(self) -> str:
        """The percentile's name in tables and plots."""
        return f"{self.metric.upper()} {self.share}"

    def value_ms(self, run: Summary | report.Figures) -> float | None:
        """Return the percentile of a run in ms, or None if nothing was measured."""
        spread = getattr(run, METRICS[self.metric])
        return None if spread is None else float(getattr(spread, self.share))

    def is_kept(self, run: Summary | report.Figures) -> bool:
        """Return whether the percentile is within the limit. Answers of one token have no TPOT."""
        value = self.value_ms(run)
        return value is None or value <= self.limit_ms


def are_kept(targets: Sequence[LatencyTarget], run: Summary | report.Figures) -> bool:
    """Return whether a run is within all limits and almost no request failed."""
    if run.failed > MAX_FAILED_SHARE * run.requests or run.ttft is None:
        return False
    return all(target.is_kept(run) for target in targets)


def limits_text(targets: Sequence[LatencyTarget]) -> str:
    """Return the limits, such as "TTFT p99 500 ms, TPOT p50 40 ms"."""
    return ", ".join(f"{target.title} {target.limit_ms:g} ms" for target in targets)


RATE_WIDTH, KIND_WIDTH, COLUMN_WIDTH = 12, 11, 13


@dataclass(frozen=True, slots=True)
class Point:
    """A run at a rate in requests per second: measured (Summary) or simulated (Figures)."""

    rate: float
    run: Summary | report.Figures

    @property
    def measured(self) -> bool:
        """Whether a real server ran it."""
        return isinstance(self.run, Summary)

    @property
    def kind(self) -> str:
        """How the point is known: measured or simulated."""
        return "measured" if self.measured else "simulated"


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a search.

    Attributes:
        server: model, device and number format.
        load: lengths and arrivals of the requests.
        rate: requests per second within the limits; None if no rate is.
        verified: a real run at the rate was within the limits.
        points: all runs, measured ones in the order of their time.
    """

    targets: Sequence[LatencyTarget]
    server: str
    load: str
    rate: float | None
    verified: bool
    points: Sequence[Point]


def text(answer: Answer) -> str:
    """Return the answer in one line, and the table of all points."""
    return "\n".join([*_headline(answer), f"{answer.server}; {answer.load}", "", *_table(answer)])


def _headline(answer: Answer) -> list[str]:
    """Return the rate and how it is known, or that there is none."""
    limits = limits_text(answer.targets)
    if answer.rate is None:
        lowest = min(answer.points, key=lambda point: point.rate)
        values = (f"{t.title} {t.value_ms(lowest.run) or 0:.0f} ms" for t in answer.targets)
        at_lowest = f"at {lowest.rate:.3g} requests/s it is {', '.join(values)}"
        return [f"no rate is within {limits}: {at_lowest} ({lowest.kind})"]
    source = "measured" if answer.verified else "simulated; no measured run was within the limits"
    first = f"{answer.rate:.3g} requests/s within {limits} ({source})"
    return [first, *_above(answer, answer.rate)]


def _above(answer: Answer, rate: float) -> list[str]:
    """Return a line about the lowest rate above `rate`, the answer's, that was measured."""
    above = [point for point in answer.points if point.measured and point.rate > rate]
    if not above:
        return []
    point = min(above, key=lambda point: point.rate)
    state = "still within the limits" if are_kept(answer.targets, point.run) else "beyond them"
    return [f"at {point.rate / rate:.2g} times the rate it was {state} (measured)"]


def _table(answer: Answer) -> list[str]:
    header = f"{'requests/s':>{RATE_WIDTH}}  {'run':{KIND_WIDTH}}"
    header += "".join(f"{target.title:>{COLUMN_WIDTH}}" for target in answer.targets)
    header += f"{'failed':>{COLUMN_WIDTH}}  within"
    limits = f"{'':{RATE_WIDTH}}  {'limit, ms':{KIND_WIDTH}}"
    limits += "".join(f"{target.limit_ms:{COLUMN_WIDTH}.1f}" for target in answer.targets)
    points = sorted(answer.points, key=lambda point: (point.rate, point.measured))
    return [header, limits, *(_row(answer.targets, point) for point in points)]


def _row(targets: Sequence[LatencyTarget], point: Point) -> str:
    values = (target.value_ms(point.run) for target in targets)
    cells = (f"{'n/a' if ms is None else f'{ms:.1f}':>{COLUMN_WIDTH}}" for ms in values)
    failed = f"{point.run.failed}/{point.run.requests}"
    within = "yes" if are_kept(targets, point.run) else "no"
    return (
        f"{point.rate:{RATE_WIDTH}.2f}  {point.kind:{KIND_WIDTH}}{''.join(cells)}"
        f"{failed:>{COLUMN_WIDTH}}  {within}"
    )


def document(answer: Answer) -> dict[str, Any]:
    """Return the answer as JSON: percentiles in ms by their names, rates in requests per second."""
    return {
        "slo": {f"{t.metric}_{t.share}": t.limit_ms for t in answer.targets},
        "server": answer.server,
        "load": answer.load,
        "request_rate": answer.rate,
        "verified": answer.verified,
        "points": [
            {
                "request_rate": point.rate,
                "measured": point.measured,
                "requests": point.run.requests,
                "failed": point.run.failed,
                "within": are_kept(answer.targets, point.run),
                **{f"{t.metric}_{t.share}": t.value_ms(point.run) for t in answer.targets},
            }
            for point in answer.points
        ],
    }


MIN_REQUESTS = 20
FIT_REPEATS = 2
MAX_SHOWN_LINES = 10


class RealServer:
    """A running server that is measured at several rates with the load of the `flags`."""

    def __init__(self, endpoint: str, curve_dir: str, flags: Sequence[str], seed: int) -> None:
        keys = ["--curve-dir", curve_dir] if curve_dir else []
        self._argv = [
            "--endpoint",
            endpoint,
            *keys,
            *flags,
            "--no-stop-on-eos",
            "--report",
            "table",
        ]
        self._seed = seed

    async def run(self, rate: float, seconds: float) -> tuple[TraceSpec, Result]:
        """Return the load and the result of a run of about `seconds` at a rate.

        Every run has prompts of its own, so that the prefix cache holds none of them.
        """
        count = max(MIN_REQUESTS, round(rate * seconds))
        self._seed += 1
        argv = ["--request-rate", f"{rate:.4g}", "--num-requests", str(count)]
        options = parse([*self._argv, *argv, "--seed", str(self._seed)])
        assert options.load.spec is not None
        async with AsyncExitStack() as stack:
            runs = await open_runs(options, stack)
            await runs.warm_up(0)
            return options.load.spec, await runs.measure(0)


async def measure_cost_model(config: server_config.ServerConfig, path: Path) -> CostModel:
    """Measure the model's steps on this machine in a process of its own, and write them to `path`.

    Raises:
        ServerFailed: the measurement failed; has the end of its output.
    """
    command = ["-m", "bench.simulate.fit_cost_model", "--quick", "--repeats", str(FIT_REPEATS)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--out", str(path), *config.to_argv(),
        cwd=PROGRAMS_DIR,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=None if sys.stderr.isatty() else asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        lines = output.decode(errors="replace").splitlines()[-MAX_SHOWN_LINES:]
        raise ServerFailed("the model's steps were not measured:\n" + "\n".join(lines))
    return cost_model.load(path)


MIN_RATE, MAX_RATE = 1 / 64, 4096.0
PRECISION = 1.03  # ratio of two rates that count as the same
MIN_SIMULATED, MAX_SIMULATED = 500, 5000  # requests
SIMULATED_S = 120.0
MAX_FACTOR = 32.0  # of the slowdown, in one fit
NO_GAP = {"step_gap_ms_p50": 0.0}  # of a server that reports none


@dataclass(frozen=True, slots=True)
class Simulation:
    """A server in simulated time, and the load that it gets; `load` is copied for each rate."""

    config: server_config.ServerConfig
    model: CostModel
    load: TraceSpec

    def at(self, rate: float) -> report.Figures:
        """Return the figures of two minutes of the load at a rate, but at least 500 requests."""
        count = min(max(round(rate * SIMULATED_S), MIN_SIMULATED), MAX_SIMULATED)
        return self.run(dataclasses.replace(self.load, request_rate=rate, num_requests=count))

    def run(self, spec: TraceSpec) -> report.Figures:
        """Return the figures of a load."""
        tokens = self.config.worker.max_total_tokens or self.model.measured_on.max_total_tokens
        num_pages = tokens // self.config.worker.page_size
        world = World(self.config, self.model, num_pages, seed=spec.seed)
        world.run(enumerate(generate(spec)))
        return report.figures(world, self.model.delays_ms.delivery, latency.Slo(), wall=0.0)

    def fitted_to(self, spec: TraceSpec, measured: Result) -> "Simulation":
        """Return a simulation with the delays and the latency of a measured run of `spec`.

        The duration of a step is scaled until the mean latency is the measured one: a step in a
        server takes longer than in a worker alone, and the machine may have other work.
        """
        if measured.summary.latency is None:
            return self
        info = NO_GAP | dict(measured.info)
        run = {"summary": dataclasses.asdict(measured.summary), "server_info": info}
        latency_ms = measured.summary.latency.mean
        low, high = (factor * self.model.slowdown for factor in (1 / MAX_FACTOR, MAX_FACTOR))
        while high / low > PRECISION:
            middle = math.sqrt(low * high)
            simulated = self._with(calibrate(self.model, [run], middle)).run(spec).latency
            if simulated is not None and simulated.mean < latency_ms:
                low = middle
            else:
                high = middle
        return self._with(calibrate(self.model, [run], float(f"{low:.4g}")))

    def _with(self, model: CostModel) -> "Simulation":
        return dataclasses.replace(self, model=model)


def highest_rate(is_kept: Callable[[float], bool]) -> float | None:
    """Return the highest rate for which `is_kept`, by bisection; None if there is none.

    Rates are requests per second from MIN_RATE to MAX_RATE, compared by their ratio.
    """
    low = 1.0
    while not is_kept(low):
        low /= 2
        if low < MIN_RATE:
            return None
    high = 2 * low
    while low < MAX_RATE and is_kept(high):
        low, high = high, 2 * high
    high = min(high, MAX_RATE)
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        if is_kept(middle):
            low = middle
        else:
            high = middle
    return low


WORKLOAD_FLAGS = (
    *("random_input_len", "max_new_tokens", "burstiness"),
    *("prefix_groups", "prefix_len", "prefix_order"),
)
LOAD_DEFAULTS_HERE: dict[str, Any] = {name: LOAD_DEFAULTS[name] for name in WORKLOAD_FLAGS} | {
    "random_input_len": "64",
    "max_new_tokens": "32",
}

PROBE_S, PROBE_SHARE, LOWEST_PROBE_RATE = 15.0, 0.4, 0.25
MAX_ATTEMPTS = 3
RETRY_SHARE = 0.85  # of a rate that failed, which the next attempt does not exceed
OVERLOAD = 1.3
CURVE = (0.3, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.5)  # of the rate that was found


@dataclass(frozen=True, slots=True)
class CapacityRequest:
    """A search.

    Attributes:
        config: flags of the server, for the simulator too if a running server is used.
        endpoint: endpoint of a running server, or "".
        names_model: `config` has the model of the running server.
        load: values of WORKLOAD_FLAGS.
        verify_s: seconds of each real run.
        cost_model: file of the steps' durations, or None.
    """

    targets: Sequence[LatencyTarget]
    config: server_config.ServerConfig
    endpoint: str
    names_model: bool
    load: Mapping[str, Any]
    seed: int
    verify_s: float
    cost_model: Path | None
    server_log: Path | None

    def spec(self) -> TraceSpec:
        """Return the load, at any rate."""
        return trace_spec(LOAD_DEFAULTS | dict(self.load) | {"seed": self.seed})

    def load_argv(self) -> list[str]:
        """Return the flags of bench.serving that make the load."""
        changed = {name: value for name, value in self.load.items() if value != LOAD_DEFAULTS[name]}
        return [word for name, value in changed.items() for word in (flag_name(name), str(value))]


class Planner:
    """One search, with a server that runs from its first real run to its end."""

    def __init__(self, request: CapacityRequest) -> None:
        self._request = request
        self._spec = request.spec()
        self._points: list[Point] = []
        self._kept_rate = 0.0  # the highest one of a real run within the limits

    async def search(self) -> Answer:
        """Return the answer, which has no rate if even the lowest one is beyond the limits."""
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            config, endpoint = self._request.config, self._request.endpoint
            info: dict[str, Any] = {}
            if endpoint:
                keys = config.frontend.curve_dir
                info = await info_of(endpoint, keys, CONNECT_TIMEOUT_S, CONNECT_TIMEOUT_S)
                if not self._request.names_model:
                    config = config.replace(model=str(info["model"]))
            model = await self._cost_model(config, folder)
            if not endpoint:
                _say("starting the server")
                log = self._request.server_log or folder / "server.log"
                endpoint, info = await start_server(config, log, stack)
            flags = self._request.load_argv()
            server = RealServer(endpoint, config.frontend.curve_dir, flags, self._request.seed)
            simulation = await self._fitted(Simulation(config, model, self._spec), server)
            return self._answer(info, *await self._verified_rate(simulation, server))

    async def _cost_model(self, config: server_config.ServerConfig, folder: Path) -> CostModel:
        path = self._request.cost_model
        if path is not None and path.exists():
            return cost_model.load(path)
        _say("measuring the model's steps on this machine (about a minute)")
        return await measure_cost_model(config, path or folder / "cost_model.json")

    async def _fitted(self, simulation: Simulation, server: RealServer) -> Simulation:
        """Fit the simulator to a run at less than half the rate that it predicts."""
        rate = max(PROBE_SHARE * (self._highest(simulation) or 0.0), LOWEST_PROBE_RATE)
        _say(f"fitting the simulator to a run at {rate:.3g} requests/s")
        spec, result = await server.run(rate, PROBE_S)
        self._note(rate, result)
        return simulation.fitted_to(spec, result)

    def _highest(self, simulation: Simulation) -> float | None:
        """Return the highest rate within the limits in the simulator or in a real run."""
        targets = self._request.targets
        found = highest_rate(lambda rate: are_kept(targets, simulation.at(rate)))
        return max(found or 0.0, self._kept_rate) or None

    def _note(self, rate: float, result: Result) -> bool:
        """Return whether a real run was within the limits, and remember its rate if it was."""
        kept = are_kept(self._request.targets, result.summary)
        if kept:
            self._kept_rate = max(self._kept_rate, rate)
        return kept

    async def _verified_rate(
        self, simulation: Simulation, server: RealServer
    ) -> tuple[float | None, bool, Simulation]:
        """Return the rate, whether a real run at it was within the limits, and the last simulation.

        The simulator is fitted again to a run that is beyond the limits, and to one that is within
        them at OVERLOAD times the rate; both show that its prediction was wrong.
        """
        rate, verified = self._highest(simulation), None
        for attempt in range(MAX_ATTEMPTS):
            if rate is None:
                break
            _say(f"run {attempt + 1} at the predicted {rate:.3g} requests/s")
            kept, refitted = await self._run(simulation, server, rate)
            if kept:
                verified = rate
                _say(f"run at {OVERLOAD} times the rate")
                at_rate = refitted
                over_kept, refitted = await self._run(simulation, server, OVERLOAD * rate)
                if not over_kept:
                    return verified, True, at_rate
                verified = OVERLOAD * rate
            elif verified is not None:
                break
            simulation, found = refitted, self._highest(refitted)
            if verified is None:
                rate = None if found is None else min(found, RETRY_SHARE * rate)
            elif found is None or found <= verified:
                break
            else:
                rate = found
        if verified is not None:
            return verified, True, simulation
        return rate, False, simulation

    async def _run(
        self, simulation: Simulation, server: RealServer, rate: float
    ) -> tuple[bool, Simulation]:
        """Run the server; return whether it kept the limits, and the simulation fitted to it."""
        spec, result = await server.run(rate, self._request.verify_s)
        self._points.append(Point(rate, result.summary))
        return self._note(rate, result), simulation.fitted_to(spec, result)

    def _answer(
        self, info: Mapping[str, Any], rate: float | None, verified: bool, simulation: Simulation
    ) -> Answer:
        _say("simulating the curve")
        rates = [LOWEST_PROBE_RATE] if rate is None else [share * rate for share in CURVE]
        curve = [Point(simulated, simulation.at(simulated)) for simulated in rates]
        device = f"{info.get('device', 'unknown')} ({info.get('dtype', 'unknown')})"
        load, burstiness = self._request.load, self._spec.burstiness
        arrivals = "Poisson arrivals" if burstiness == 1 else f"burstiness {burstiness:g}"
        return Answer(
            targets=self._request.targets,
            server=f"{info.get('model', 'unknown model')} on {device}",
            load=f"prompts of {load['random_input_len']} tokens, answers of"
            f" {load['max_new_tokens']}, {arrivals}",
            rate=rate,
            verified=verified,
            points=[*self._points, *curve],
        )


def _say(message: str) -> None:
    print(f"capacity: {message}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the search of a command line, and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    return run_command("bench.capacity", lambda: _main(argv))


def _main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    return run_until_signal(_search(Planner(_request(arguments)), arguments.json))


async def _search(planner: Planner, json_path: Path | None) -> int:
    answer = await planner.search()
    print(text(answer), flush=True)
    if json_path is not None:
        json_path.write_text(json.dumps(document(answer), indent=2) + "\n")
    return EXIT_OK if answer.verified else EXIT_FAILED


def _request(arguments: argparse.Namespace) -> CapacityRequest:
    if not arguments.verify_seconds > 0:
        raise ConfigError(f"verify_seconds must be positive (it is {arguments.verify_seconds})")
    for path in (arguments.json, arguments.cost_model, arguments.server_log):
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
    output.add_argument(
        "--server-log", type=Path, metavar="FILE", help="log of the server that the bench starts"
    )
    server_flags.add_flags(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
