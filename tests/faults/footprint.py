"""What processes hold: memory, open files, threads."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_GROWTH = 0.01
MIN_GROWTH_MB = 2.0
"""More than both is too much. The second is what allocators and counters of a small process move
by without a leak."""
MAX_MORE = 3
"""Files or threads: so many connections more or less may be open at a moment."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """megabytes: RssAnon and RssShmem, what a process holds by itself. The rest of its resident
    memory are pages of files (weights, libraries), which come and go as the system pleases, and
    PSS, which shares them out, changes with what other processes map."""

    megabytes: float
    files: float
    threads: float


def footprint(pid: int) -> Footprint:
    """Of a process as it is now, on Linux. Raises OSError where there is none."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
    kilobytes = int(fields["RssAnon"][0]) + int(fields["RssShmem"][0])
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return Footprint(kilobytes * 1024 / 1e6, files, int(fields["Threads"][0]))


def median(prints: Sequence[Footprint]) -> Footprint:
    """Of each of the three by itself."""
    return Footprint(
        statistics.median(one.megabytes for one in prints),
        statistics.median(one.files for one in prints),
        statistics.median(one.threads for one in prints),
    )


def growth(name: str, first: Footprint, last: Footprint) -> list[str]:
    """What of a process has grown too much, in words."""
    found = []
    more = last.megabytes - first.megabytes
    if more > max(MIN_GROWTH_MB, MAX_GROWTH * first.megabytes):
        found.append(f"{name}: {more:.1f} MB more")
    if last.files - first.files > MAX_MORE:
        found.append(f"{name}: {last.files - first.files:g} open files more")
    if last.threads - first.threads > MAX_MORE:
        found.append(f"{name}: {last.threads - first.threads:g} threads more")
    return found


def row(name: str, first: Footprint, last: Footprint) -> str:
    """A line of the table that `HEAD` begins."""
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
