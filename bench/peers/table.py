"""Outcomes of the comparison: kept as JSON lines, printed as a table in markdown."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from bench.metrics.metrics import Summary
from bench.peers.comparison import Outcome
from quadriga.errors import ConfigError

Figure = Callable[[Summary], float | None]
FIGURES: list[tuple[str, int, Figure]] = [
    ("tok/s", 0, lambda s: s.throughput),
    ("TTFT p50 ms", 0, lambda s: s.ttft.p50 if s.ttft else None),
    ("TTFT p99 ms", 0, lambda s: s.ttft.p99 if s.ttft else None),
    ("TPOT p50 ms", 1, lambda s: s.tpot.p50 if s.tpot else None),
]
"""Title, digits after the point, and what it is of a run."""


def append(path: Path, outcomes: Iterable[Outcome]) -> None:
    """Add the outcomes to a file, one a line."""
    with path.open("ab") as file:
        for outcome in outcomes:
            file.write(msgspec.json.encode(dataclasses.asdict(outcome)) + b"\n")


def read(path: Path) -> list[Outcome]:
    """The outcomes of a file. ConfigError where it is none."""
    try:
        lines = path.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Outcome) for line in lines]
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} holds no results: {error}") from None


def table(outcomes: Sequence[Outcome]) -> str:
    """A line for each outcome; in each cell ours / theirs in the median, and the median of the
    ratios of runs that came one after the other, with the lowest and the highest."""
    titles = ["workload", "peer", "weights", *(title for title, _, _ in FIGURES)]
    lines = [_line(titles), _line(["---"] * len(titles))]
    for outcome in sorted(outcomes, key=lambda o: (o.workload, o.weights, o.peer)):
        cells = [_cell(outcome, places, of) for _, places, of in FIGURES]
        lines.append(_line([outcome.workload, outcome.peer, outcome.weights, *cells]))
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(outcome: Outcome, places: int, figure: Figure) -> str:
    pairs = [(figure(o), figure(t)) for o, t in zip(outcome.ours, outcome.theirs, strict=True)]
    whole = [(ours, theirs) for ours, theirs in pairs if ours and theirs]
    if not whole:
        return "n/a"
    ratios = [ours / theirs for ours, theirs in whole]
    ours, theirs = (statistics.median(pair[side] for pair in whole) for side in (0, 1))
    middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
    return f"{ours:.{places}f} / {theirs:.{places}f} = {middle:.2f} x ({low:.2f} to {high:.2f})"
