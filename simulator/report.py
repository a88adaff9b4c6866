"""Figures of a simulated run: of its requests, its replicas and its losses."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.clock import START
from simulator.fleet import Routing
from simulator.latency import MS, Goodput, Percentiles, Slo, latency_lines
from simulator.records import Records, RecordSample
from simulator.replica import Replica
from simulator.world import World

# Figures of the replicas of a simulated server: losses, moves, their number, and their balance.

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


# Spreads that are compared with a measured run.
COMPARED = ("ttft", "tpot", "itl", "queue_wait", "latency")


# Share of failed requests beyond which latencies are not printed.
MAX_FAILED_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one simulated run, with spreads in ms; shared names mean the same in Summary.

    Attributes:
        errors: failed requests by error code.
        duration: simulated seconds from the first submit to the last end.
        rows: mean rows of a step.
        busy: share of the duration in which the workers ran steps.
        pages_held: mean share of all pages that requests held, 0 to 1.
        pages_peak: highest sampled share of held pages.
        pages_cached: mean share of cached pages.
        wall: seconds that the simulation took.
    """

    requests: int
    failed: int
    errors: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache_hit_rate: float
    duration: float
    throughput: float
    request_rate: float
    queue_wait: Percentiles | None
    prefill: Percentiles | None
    ttft: Percentiles | None
    tpot: Percentiles | None
    itl: Percentiles | None
    latency: Percentiles | None
    goodput: Goodput | None
    steps: int
    rows: float
    busy: float
    retractions: int
    pages_total: int
    pages_held: float
    pages_peak: float
    pages_cached: float
    wall: float
    routing: Routing | None = None
    fleet: FleetReport | None = None


def spread(seconds: npt.NDArray[Any]) -> Percentiles | None:
    """Return the distribution in ms of durations in seconds, or None if there are none."""
    if len(seconds) == 0:
        return None
    ms = np.maximum(seconds, 0.0) * MS
    p50, p95, p99 = (float(value) for value in np.percentile(ms, [50, 95, 99]))
    return Percentiles(len(ms), float(ms.mean()), p50, p95, p99, float(ms.max()))


def figures(world: World, delivery_ms: float, slo: Slo, wall: float) -> Figures:
    """Return the figures of a finished run."""
    records, replicas = world.records, [*world.replicas, *world.fleet.gone]
    done = np.ones(records.length, dtype=bool)
    done[list(records.errors)] = False
    column = {name: records[name][done] for name in (*Records.TIMES, *Records.TOKENS)}
    delivery = delivery_ms / MS
    ttft = column["first_token"] + delivery - column["submitted"]
    several = column["completion_tokens"] > 1
    tpot = np.zeros(len(ttft))
    tpot[several] = (column["last_token"] - column["first_token"])[several] / (
        column["completion_tokens"][several] - 1
    )
    duration = float(records["finished"].max() - records["submitted"].min())
    prompt, cached = int(column["prompt_tokens"].sum()), int(column["cached_tokens"].sum())
    completion = int(column["completion_tokens"].sum())
    latency = column["finished"] - column["submitted"]
    kept = _within(ttft, slo.ttft_ms) & _within(tpot, slo.tpot_ms) & _within(latency, slo.e2el_ms)
    good = int(kept.sum())
    steps, samples = sum(r.worker.steps for r in replicas), world.samples
    pages = max(sample.replicas for sample in samples) * replicas[0].num_pages
    end = float(records["finished"].max())
    lifetime = max(duration * len(world.replicas), 1e-9)
    if world.fleet.gone:
        lifetime = replica_seconds(world, end)
    return Figures(
        requests=records.length,
        failed=len(records.errors),
        errors=dict(Counter(records.errors.values())),
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=cached,
        cache_hit_rate=cached / max(prompt, 1),
        duration=duration,
        throughput=completion / duration if duration else 0.0,
        request_rate=len(ttft) / duration if duration else 0.0,
        queue_wait=spread(column["admitted"] - column["tokenized"]),
        prefill=spread(column["first_token"] - column["admitted"]),
        ttft=spread(ttft),
        tpot=spread(tpot[several]),
        itl=spread(records.gaps.values),
        latency=spread(latency),
        goodput=Goodput(good, good / records.length, good / duration if duration else None)
        if slo
        else None,
        steps=steps,
        rows=sum(r.worker.rows for r in replicas) / max(steps, 1),
        busy=sum(r.worker.busy for r in replicas) / lifetime,
        retractions=sum(r.info["retractions"] for r in replicas),
        pages_total=pages,
        pages_held=statistics.fmean(s.pages_held for s in samples) / pages,
        pages_peak=max(s.pages_held for s in samples) / pages,
        pages_cached=statistics.fmean(s.pages_cached for s in samples) / pages,
        wall=wall,
        routing=None if world.dispatcher is None else world.dispatcher.figures(),
        fleet=None if world.dispatcher is None else fleet_report(world, end),
    )


def _within(seconds: Floats, limit_ms: float | None) -> npt.NDArray[np.bool_]:
    return seconds * MS <= (math.inf if limit_ms is None else limit_ms)


def block(run: Figures, replicas: int, source: str) -> str:
    """Return the printed lines of a run, named as in bench.serving."""
    errors = ", ".join(f"{number} {code}" for code, number in run.errors.items())
    return "\n".join(
        [
            "=== simulation ===",
            f"Cost model: {source}",
            f"Replicas: {replicas}",
            f"Requests: {run.requests}",
            f"Prompt tokens (total): {run.prompt_tokens}",
            f"Completion tokens (total): {run.completion_tokens}",
            f"Duration: {run.duration:.2f} s",
            *_latency_lines(run),
            f"Prefix cache hits: {run.cached_tokens} tokens ({run.cache_hit_rate:.1%})",
            f"KV pages held mean/peak: {run.pages_held:.1%}/{run.pages_peak:.1%}"
            f" of {run.pages_total}, cached {run.pages_cached:.1%}",
            f"Retractions: {run.retractions}",
            f"Worker busy: {run.busy:.1%} ({run.steps} steps of {run.rows:.1f} rows)",
            *([] if run.routing is None else run.routing.lines(run.duration)),
            *([] if run.fleet is None else run.fleet.lines()),
            f"Failed requests: {run.failed}" + (f" ({errors})" if errors else ""),
            f"Simulated in: {run.wall:.1f} s ({run.requests / max(run.wall, 1e-9):.0f} requests/s,"
            f" {run.steps / max(run.wall, 1e-9):.0f} steps/s)",
        ]
    )


def _latency_lines(run: Figures) -> list[str]:
    """Return latencies and rates, or the reason why they would mislead.

    A server that refuses requests is quick with the others, so that their latencies are no answer.
    """
    if run.failed > MAX_FAILED_SHARE * run.requests:
        codes = ", ".join(run.errors)
        verb = "refused" if "queue_full" in run.errors else "failed"
        return [
            f"{run.failed} of {run.requests} requests {verb}: {codes}; {_remedy(run)}. Latencies"
            " of the others are left out, as they are no measure of this load."
        ]
    goodput = run.goodput
    lines = [
        *latency_lines(run),
        f"Throughput (completion,total): {run.throughput:.2f} tokens/s",
        f"Request rate: {run.request_rate:.2f} requests/s",
    ]
    if goodput is not None:
        lines.append(f"Goodput: {goodput.rate or 0:.2f} requests/s ({goodput.share:.1%} of all)")
    return lines


def _remedy(run: Figures) -> str:
    """Return what to change about the load, by the error of most requests."""
    match max(run.errors, key=run.errors.__getitem__):
        case "queue_full" | "deadline_exceeded":
            return f"the servers finished {run.request_rate:.1f} requests/s: give --request-rate"
        case "prompt_too_long" | "not_sent":
            return "give a shorter --random-input-len, fewer --turns, or --allow-auto-truncate"
        case _:
            return "--json has all figures"


def comparison(run: Figures, measured: Sequence[dict[str, Any]]) -> str:
    """Compare a simulated run with the medians of the runs of a bench.serving --json."""
    rows = [
        ("throughput, tokens/s", run.throughput, [summary["throughput"] for summary in measured])
    ]
    for name in COMPARED:
        simulated = getattr(run, name)
        for share in ("p50", "p99"):
            values = [summary[name][share] for summary in measured if summary.get(name)]
            if simulated is not None and values:
                rows.append((f"{name} {share}, ms", getattr(simulated, share), values))
    lines = [f"=== simulated against measured (median of {len(measured)} runs) ==="]
    for title, simulated, values in rows:
        real = statistics.median(values)
        ratio = f"{simulated / real:.3f}" if real else "n/a"
        lines.append(f"{title:22} {simulated:12.2f} {real:12.2f}   ratio {ratio}")
    return "\n".join(lines)
