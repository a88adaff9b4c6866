"""Figures of the replicas of a simulated server: losses, moves, their number, and their balance."""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.metrics.percentiles import MS
from bench.simulate.clock import START
from bench.simulate.records import Records, RecordSample
from bench.simulate.run import World
from bench.simulate.server import Replica

Floats = npt.NDArray[np.float64]

# TTFT is back after a loss where its p99 of a second is at most this times that before the loss.
BACK_FACTOR = 1.2


@dataclass(frozen=True, slots=True)
class FleetReport:
    """Figures of the replicas of a run.

    Attributes:
        num_lost, num_left: replicas that were lost, and that gave their requests back and left.
        num_moved: requests that moved to another replica.
        num_computed_again: their tokens that had been computed and were not cached there.
        replicas_min, replicas_mean, replicas_max: number of replicas that serve, over time.
        replica_hours: simulated hours of all replicas together.
        uneven_rows, uneven_queues: as in RecordSample, means over time.
        back_after_s: seconds from the first loss until the requests sent in a second have the TTFT
            p99 that they had before; None: no loss, or not in this run.
    """

    num_lost: int
    num_left: int
    num_moved: int
    num_computed_again: int
    replicas_min: int
    replicas_mean: float
    replicas_max: int
    replica_hours: float
    uneven_rows: float
    uneven_queues: float
    back_after_s: int | None

    def lines(self) -> Iterator[str]:
        """Yield the printed lines."""
        yield (
            f"Uneven load, p99/mean: rows {self.uneven_rows:.2f}, queued prompt tokens"
            f" {self.uneven_queues:.2f}"
        )
        if self.replicas_min == self.replicas_max:
            return
        yield (
            f"Replicas min/mean/max: {self.replicas_min}/{self.replicas_mean:.1f}"
            f"/{self.replicas_max}, {self.replica_hours:.2f} replica-hours"
        )
        yield (
            f"Replicas lost: {self.num_lost}, left: {self.num_left}; requests moved:"
            f" {self.num_moved}, {self.num_computed_again} of their tokens computed again"
        )
        if self.num_lost:
            back = "not in this run" if self.back_after_s is None else f"{self.back_after_s} s"
            yield f"TTFT p99 back to {BACK_FACTOR} times that before the loss after: {back}"


def fleet_report(world: World, end: float) -> FleetReport:
    """Return the figures of a finished run. end: simulated time of the last end."""
    counts, samples = world.fleet.counts, world.samples
    numbers = [sample.replicas for sample in samples]
    ended = [replica.ended_at for replica in world.fleet.gone]
    return FleetReport(
        num_lost=counts.num_lost,
        num_left=counts.num_left,
        num_moved=counts.num_moved,
        num_computed_again=counts.num_computed_again,
        replicas_min=min(numbers),
        replicas_mean=replica_seconds(world, end) / max(end - START, 1e-9),
        replicas_max=max(numbers),
        replica_hours=replica_seconds(world, end) / 3600,
        uneven_rows=_mean_under_load(samples, "uneven_rows"),
        uneven_queues=_mean_under_load(samples, "uneven_queues"),
        back_after_s=_back_after(world.records, min(ended)) if counts.num_lost else None,
    )


def replica_seconds(world: World, end: float) -> float:
    """Return the simulated seconds of all replicas together."""
    replicas: Iterable[Replica] = (*world.replicas, *world.fleet.gone)
    return sum(max(0.0, min(one.ended_at, end) - one.began_at) for one in replicas)


def _mean_under_load(samples: list[RecordSample], name: str) -> float:
    values = [getattr(sample, name) for sample in samples if sample.running]
    return statistics.fmean(values) if values else 1.0


def _back_after(records: Records, lost_at: float) -> int | None:
    """Return the seconds from a loss to the first second whose TTFT p99 is as before."""
    done = records["first_token"] > 0
    submitted = records["submitted"][done]
    ttft: Floats = (records["first_token"][done] - submitted) * MS
    seconds = np.floor(submitted - lost_at).astype(np.int64)
    p99 = {int(s): float(np.percentile(ttft[seconds == s], 99)) for s in np.unique(seconds)}
    # The requests of the last seconds before the loss feel it, too.
    before = [value for second, value in p99.items() if -11 <= second <= -2]
    if not before:
        return None
    limit = BACK_FACTOR * statistics.median(before)
    worst = max(p99, key=lambda second: p99[second] if second >= -1 else 0.0)
    return next((s for s in sorted(p99) if s > worst and p99[s] <= limit), None)
