"""Kernels on a device by time: how long it was busy, and how long it waited."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Kernel:
    """A kernel that ran, with times in microseconds."""

    began: float
    ended: float
    name: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """What kernels say of a device between the first one's start and the last one's end.

    Attributes:
        wall_us: The time.
        busy_us: The time in which a kernel ran.
        gaps_us: The times between, ascending.
    """

    wall_us: float
    busy_us: float
    gaps_us: tuple[float, ...]

    @classmethod
    def of(cls, kernels: Iterable[Kernel]) -> "Timeline":
        """Return the timeline of kernels, which may overlap and come in any order."""
        ordered = sorted(kernels)
        if not ordered:
            return cls(0.0, 0.0, ())
        first, gaps = ordered[0], []
        reached = first.ended
        for kernel in ordered[1:]:
            if kernel.began > reached:
                gaps.append(kernel.began - reached)
            reached = max(reached, kernel.ended)
        wall = reached - first.began
        return cls(wall, wall - sum(gaps), tuple(sorted(gaps)))

    @property
    def busy_share(self) -> float:
        """Busy time over all time; 0 without kernels."""
        return self.busy_us / self.wall_us if self.wall_us else 0.0


def longest(kernels: Sequence[Kernel], count: int) -> list[tuple[str, int, float]]:
    """Return name, number of runs and microseconds in all of the kernels that took longest."""
    runs: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        runs[kernel.name].append(kernel.ended - kernel.began)
    found = [(name, len(times), sum(times)) for name, times in runs.items()]
    return sorted(found, key=lambda one: -one[2])[:count]
