"""Memory, open files and threads of processes."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Memory may grow by the larger of the two: small processes vary by MIN_GROWTH_MB without a leak.
MAX_GROWTH_SHARE = 0.01
MIN_GROWTH_MB = 2.0
MAX_GROWTH_COUNT = 3  # of files or threads, as the number of open connections varies


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds.

    Attributes:
        megabytes: RssAnon and RssShmem. Pages of files (weights, libraries) come and go as the
            system decides, and PSS changes with the mappings of other processes.
        files: Open file descriptors.
        threads: Threads.
    """

    megabytes: float
    files: float
    threads: float


def footprint(pid: int) -> Footprint:
    """Return the footprint of a process on Linux, or raise OSError if there is none."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
    kilobytes = int(fields["RssAnon"][0]) + int(fields["RssShmem"][0])
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return Footprint(kilobytes * 1024 / 1e6, files, int(fields["Threads"][0]))


def median(prints: Sequence[Footprint]) -> Footprint:
    """Return the median of each of the three figures."""
    return Footprint(
        statistics.median(measured.megabytes for measured in prints),
        statistics.median(measured.files for measured in prints),
        statistics.median(measured.threads for measured in prints),
    )


def growth(name: str, first: Footprint, last: Footprint) -> list[str]:
    """Return a complaint for each figure of a process that has grown too much."""
    complaints = []
    more = last.megabytes - first.megabytes
    if more > max(MIN_GROWTH_MB, MAX_GROWTH_SHARE * first.megabytes):
        complaints.append(f"{name}: {more:.1f} MB more")
    if last.files - first.files > MAX_GROWTH_COUNT:
        complaints.append(f"{name}: {last.files - first.files:g} open files more")
    if last.threads - first.threads > MAX_GROWTH_COUNT:
        complaints.append(f"{name}: {last.threads - first.threads:g} threads more")
    return complaints


def row(name: str, first: Footprint, last: Footprint) -> str:
    """Return a row of the table whose header is HEAD."""
    more = last.megabytes - first.megabytes
    return (
        f"{name:16} {first.megabytes:9.2f} {last.megabytes:9.2f} {more:8.2f}"
        f" {100 * more / first.megabytes:7.2f} {first.files:7g} {last.files:5g}"
        f" {first.threads:9g} {last.threads:5g}"
    )


HEAD = (
    f"{'':16} {'MB first':>9} {'last':>9} {'more':>8} {'%':>7} {'files':>7} {'last':>5}"
    f" {'threads':>9} {'last':>5}"
)
