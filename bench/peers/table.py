"""Store outcomes of the comparison as JSON lines, and print them as a markdown table."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bench.metrics.metrics import Summary
from bench.peers.comparison import Outcome
from bench.report.markdown import markdown_table
from quadriga.errors import ConfigError

Figure = Callable[[Summary], float | None]
# Title, digits after the point, and the figure of a run.
FIGURES: list[tuple[str, int, Figure]] = [
    ("tok/s", 0, lambda s: s.throughput),
    ("TTFT p50 ms", 0, lambda s: s.ttft.p50 if s.ttft else None),
    ("TTFT p99 ms", 0, lambda s: s.ttft.p99 if s.ttft else None),
    ("TPOT p50 ms", 1, lambda s: s.tpot.p50 if s.tpot else None),
]


def append(path: Path, outcome: Outcome) -> None:
    """Append an outcome to a file, as a line."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(dataclasses.asdict(outcome)) + b"\n")


def read(path: Path) -> list[Outcome]:
    """Return the outcomes of a file, or raise ConfigError."""
    try:
        lines = path.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Outcome) for line in lines]
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} holds no results: {error}") from None


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a table with a row per outcome.

    Each cell has the medians of ours and theirs, and the median of the ratios of neighbouring runs
    with the lowest and the highest ratio.
    """
    rows = []
    for outcome in sorted(outcomes, key=lambda o: (o.workload, o.weights, o.peer)):
        cells = [_cell(outcome, places, figure) for _, places, figure in FIGURES]
        rows.append([outcome.workload, outcome.peer, outcome.weights, *cells])
    titles = [title for title, _, _ in FIGURES]
    return markdown_table(["workload", "peer", "weights", *titles], rows)


def _cell(outcome: Outcome, places: int, figure: Figure) -> str:
    pairs = [(figure(o), figure(t)) for o, t in zip(outcome.ours, outcome.theirs, strict=True)]
    complete = [(ours, theirs) for ours, theirs in pairs if ours and theirs]
    if not complete:
        return "n/a"
    ratios = [ours / theirs for ours, theirs in complete]
    ours, theirs = (statistics.median(pair[side] for pair in complete) for side in (0, 1))
    middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
    return f"{ours:.{places}f} / {theirs:.{places}f} = {middle:.2f} x ({low:.2f} to {high:.2f})"
