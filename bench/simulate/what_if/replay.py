"""Simulate what a server has measured: a load, the flags, and steps as long as they were."""

import argparse
import math
import time
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from bench.load.server_log import LoggedRequest, MeasuredLoad
from bench.load.trace import TraceRequest
from bench.metrics.slo import Slo
from bench.simulate.clock import START
from bench.simulate.cost_model import CostModel
from bench.simulate.records import Records
from bench.simulate.report import Figures, figures
from bench.simulate.run import World
from bench.simulate.world_flags import config_of, num_pages_of

Floats = npt.NDArray[np.float64]

AS_IT_WAS = "as it was"
MAX_FITS, FIT_TOLERANCE = 8, 0.03


class RequestTimes(NamedTuple):
    """Seconds since the first arrival, by request: when it was queued and admitted, and its end."""

    queued: Floats
    admitted: Floats
    ended: Floats

    @property
    def duration(self) -> float:
        """Seconds until the last end."""
        return float(self.ended.max(initial=0.0))

    def in_flight(self, at: Floats) -> tuple[list[int], list[int]]:
        """Return how many requests wait, and how many run, at each of these times."""
        passed = [np.searchsorted(np.sort(times), at, side="right") for times in self]
        queued, admitted, ended = passed
        return (queued - admitted).tolist(), (admitted - ended).tolist()


class ReplayedLoad(NamedTuple):
    """A simulated run of a load."""

    figures: Figures
    times: RequestTimes


def replay(
    arguments: argparse.Namespace, load: list[TraceRequest], slowdown: float, model: CostModel
) -> ReplayedLoad:
    """Run a load with these flags, and steps that are longer than the model's by a factor."""
    config = config_of(arguments)
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
    run = figures(world, model.delays_ms.delivery, Slo(), time.perf_counter() - began)
    return ReplayedLoad(run, _times(world.records))


def _times(records: Records) -> RequestTimes:
    """Return the times of the requests that were not refused."""
    done = records["admitted"] > 0
    times = (records[name][done] - START for name in ("tokenized", "admitted", "finished"))
    return RequestTimes(*times)


def measured_times(requests: list[LoggedRequest]) -> RequestTimes:
    """Return the times of logged requests, which have all been admitted."""
    began_at = requests[0].arrived_at
    rows: list[tuple[float, float, float]] = []
    for arrived_at, line in requests:
        queued = arrived_at - began_at + line.stages_s.get("tokenize", 0.0)
        admitted = queued + line.stages_s.get("queue", 0.0)
        rows.append((queued, admitted, max(admitted, arrived_at - began_at + line.seconds)))
    return RequestTimes(*np.array(rows).T)


def fit_slowdown(
    arguments: argparse.Namespace,
    load: list[TraceRequest],
    happened: MeasuredLoad,
    model: CostModel,
) -> float:
    """Return the factor of the steps with which the median time per token is the measured one."""
    slowdown, low, high = 1.0, 0.0, math.inf
    tried: list[tuple[float, float]] = []
    for _ in range(MAX_FITS):
        tpot = replay(arguments, load, slowdown, model).figures.tpot
        if happened.tpot is None or tpot is None or not tpot.p50:
            return slowdown  # requests of one token say nothing about it
        ratio = happened.tpot.p50 / tpot.p50
        tried.append((abs(math.log(ratio)), slowdown))
        if abs(ratio - 1) < FIT_TOLERANCE:
            break
        low, high = (slowdown, high) if ratio > 1 else (low, slowdown)
        slowdown *= ratio
        if not low < slowdown < high:  # near its limit a server slows down more than its steps
            slowdown = math.sqrt(low * high)
    return min(tried)[1]
