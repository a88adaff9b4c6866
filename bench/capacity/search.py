"""Find the highest request rate in the simulator, and fit the simulator to a measured run."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from bench.load.synthetic import TraceSpec, generate
from bench.metrics.slo import Slo
from bench.report.report import Result
from bench.simulate.cost_model import CostModel
from bench.simulate.fit_cost_model import calibrate
from bench.simulate.report import Figures, figures
from bench.simulate.run import World
from quadriga.config.server_config import ServerConfig

MIN_RATE, MAX_RATE = 1 / 64, 4096.0
PRECISION = 1.03  # ratio of two rates that count as the same
MIN_SIMULATED, MAX_SIMULATED = 500, 5000  # requests
SIMULATED_S = 120.0
MAX_FACTOR = 32.0  # of the slowdown, in one fit
NO_GAP = {"step_gap_ms_p50": 0.0}  # of a server that reports none


@dataclass(frozen=True, slots=True)
class Simulation:
    """A server in simulated time, and the load that it gets; `load` is copied for each rate."""

    config: ServerConfig
    model: CostModel
    load: TraceSpec

    def at(self, rate: float) -> Figures:
        """Return the figures of two minutes of the load at a rate, but at least 500 requests."""
        count = min(max(round(rate * SIMULATED_S), MIN_SIMULATED), MAX_SIMULATED)
        return self.run(dataclasses.replace(self.load, request_rate=rate, num_requests=count))

    def run(self, spec: TraceSpec) -> Figures:
        """Return the figures of a load."""
        tokens = self.config.worker.max_total_tokens or self.model.measured_on.max_total_tokens
        num_pages = tokens // self.config.worker.page_size
        world = World(self.config, self.model, num_pages, seed=spec.seed)
        world.run(enumerate(generate(spec)))
        return figures(world, self.model.delays_ms.delivery, Slo(), wall=0.0)

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
