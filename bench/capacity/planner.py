"""The steps of a search: measure, fit, simulate, verify."""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.capacity.answer import Answer, Point
from bench.capacity.real_runs import RealServer, measure_cost_model
from bench.capacity.search import Simulation, highest_rate
from bench.capacity.targets import LatencyTarget, are_kept
from bench.cli.load_flags import LOAD_DEFAULTS, trace_spec
from bench.client.transport import info_of, start_server
from bench.load.synthetic import TraceSpec
from bench.report.report import Result
from bench.serving import CONNECT_TIMEOUT_S
from bench.simulate import cost_model
from bench.simulate.cost_model import CostModel
from quadriga.config.flags import flag_name
from quadriga.config.server_config import ServerConfig

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
        config: Flags of the server, for the simulator too if a running server is used.
        endpoint: Endpoint of a running server, or "".
        names_model: `config` has the model of the running server.
        load: Values of WORKLOAD_FLAGS.
        verify_s: Seconds of each real run.
        cost_model: File of the steps' durations, or None.
    """

    targets: Sequence[LatencyTarget]
    config: ServerConfig
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

    async def _cost_model(self, config: ServerConfig, folder: Path) -> CostModel:
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
