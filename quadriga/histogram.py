"""Counts by upper bounds, as Prometheus shows them."""

from bisect import bisect_left
from itertools import accumulate

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)
"""Bounds for what a stage of a request takes."""
SUM = "sum"


class Histogram:
    """Cheap enough for every token of every request."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count it. Clocks that were set make no time negative."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += max(0.0, value)

    def as_map(self) -> dict[str, float]:
        """How many were not above each bound, and `sum`."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return {**dict(zip(bounds, accumulate(self._counts), strict=True)), SUM: self._sum}


def buckets(told: dict[str, float]) -> tuple[list[tuple[str, float]], float]:
    """What prometheus_client takes: the counts by bound, and the sum."""
    return [(bound, count) for bound, count in told.items() if bound != SUM], told[SUM]
