"""Histograms in the form of Prometheus: counts by upper bounds."""

from bisect import bisect_left
from itertools import accumulate

# Upper bounds for the duration of a stage of a request, in seconds.
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)
SUM = "sum"


class Histogram:
    """A histogram that is cheap enough to observe every token."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value; a negative one adds nothing to the sum."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += max(0.0, value)

    def as_map(self) -> dict[str, float]:
        """Return the cumulative count for each bound, and `sum`."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return {**dict(zip(bounds, accumulate(self._counts), strict=True)), SUM: self._sum}


def buckets(counts: dict[str, float]) -> tuple[list[tuple[str, float]], float]:
    """Return the counts by bound and the sum, as prometheus_client takes them."""
    return [(bound, count) for bound, count in counts.items() if bound != SUM], counts[SUM]
