"""How durations are spread: seconds in, milliseconds out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MS = 1000.0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """How `count` durations are spread, in ms."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), by linear interpolation between the two nearest ranks."""
    if not values:
        raise ValueError("no values to take a percentile of")
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100.0
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def spread(seconds: Iterable[float]) -> Percentiles | None:
    """The spread in ms of durations in seconds; None if there are none."""
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
