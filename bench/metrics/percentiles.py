"""Percentiles of durations: seconds in, milliseconds out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MS = 1000.0  # per second


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The distribution of `count` durations in ms."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


def percentile(values: Sequence[float], q: float) -> float:
    """Return the q-th percentile (0 to 100), interpolated between the two nearest ranks."""
    if not values:
        raise ValueError("no values to take a percentile of")
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100.0
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def spread(seconds: Iterable[float]) -> Percentiles | None:
    """Return the distribution in ms of durations in seconds, or None if there are none."""
    values = [max(0.0, value) * MS for value in seconds]
    if not values:
        return None
    return Percentiles(
        count=len(values),
        mean=sum(values) / len(values),
        p50=percentile(values, 50),
        p95=percentile(values, 95),
        p99=percentile(values, 99),
        max=max(values),
    )


def spread_text(spread: Percentiles | None, digits: int = 2) -> str:
    """Return "p50/p95/p99 ms", or "n/a"."""
    if spread is None:
        return "n/a"
    return "/".join(f"{ms:.{digits}f}" for ms in (spread.p50, spread.p95, spread.p99)) + " ms"
