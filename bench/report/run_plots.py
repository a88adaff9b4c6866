"""Draw a measured run. Needs matplotlib."""

import importlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.metrics.percentiles import MS
from bench.metrics.records import RequestRecord
from bench.metrics.timeline import awaiting_first_token, in_flight, token_rates

# pyplot would look for a screen; the figure alone does not.
Figure: Any = importlib.import_module("matplotlib.figure").Figure

MIN_BINS, MAX_BINS = 10, 60
NUM_SLICES = 120  # of the run's duration, each drawn with its tokens per second
MIN_SLICE_S = 0.05
FILL, LINE, MUTED = "#4c72b0", "#1f3b66", "#c9d5e8"
PERCENTILES = {50: "-", 95: "--", 99: ":"}


def draw(path: Path, records: Sequence[RequestRecord], title: str) -> None:
    """Draw the distributions of TTFT, TPOT and ITL, requests in flight and tokens per second.

    Failed requests are left out.
    """
    done = [record for record in records if record.error is None]
    figure = Figure(figsize=(14, 8), layout="constrained")
    figure.suptitle(title, fontsize=11)
    above, below = figure.subfigures(2, 1)
    for axes, (name, values) in zip(above.subplots(1, 3), _spans(done).items(), strict=True):
        _distribution(axes, name, values)
    requests, rates = below.subplots(1, 2)
    _requests(requests, done)
    _tokens(rates, done)
    figure.savefig(path, dpi=110)


def _spans(done: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Return the TTFTs, TPOTs and ITLs in ms."""
    several = [r for r in done if r.completion_tokens > 1 and r.arrivals]
    return {
        "TTFT": [(r.first_received - r.submit_start) * MS for r in done if r.arrivals],
        "TPOT": [
            (r.arrivals[-1] - r.first_received) * MS / (r.completion_tokens - 1) for r in several
        ],
        "ITL": [(after - before) * MS for r in done for before, after in pairwise(r.chunks)],
    }


def _distribution(axes: Any, name: str, values: Sequence[float]) -> None:
    """Draw a histogram up to twice the p99, and lines at the percentiles."""
    if not values:
        label(axes, f"{name}: nothing to show", "ms", "")
        return
    ordered = np.sort(np.asarray(values))
    marks = {percent: float(np.percentile(ordered, percent)) for percent in PERCENTILES}
    low = float(ordered[0])
    high = float(max(min(ordered[-1], 2 * marks[99]), low + 1e-3))
    bins = min(max(int(2 * len(ordered) ** 0.5), MIN_BINS), MAX_BINS)
    axes.hist(np.minimum(ordered, high), bins=bins, range=(low, high), color=FILL, alpha=0.75)
    axes.yaxis.get_major_locator().set_params(integer=True)
    for percent, style in PERCENTILES.items():
        text = f"p{percent}  {marks[percent]:.1f} ms"
        axes.axvline(marks[percent], color=LINE, linestyle=style, label=text)
    unit = "gaps" if name == "ITL" else "requests"
    beyond = f", longest {ordered[-1]:.0f} ms" if ordered[-1] > high else ""
    label(axes, f"{name} of {len(ordered)} {unit}{beyond}", "ms", unit)


def _requests(axes: Any, done: Sequence[RequestRecord]) -> None:
    flying, waiting = in_flight(done), awaiting_first_token(done)
    start = flying.times[0] if flying.times else 0.0
    for steps, color, text in (
        (flying, FILL, "streaming"),
        (waiting, MUTED, "waiting for the first token"),
    ):
        seconds = [time - start for time in steps.times]
        axes.fill_between(seconds, steps.values, step="post", color=color, label=text, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.get_major_locator().set_params(integer=True)
    label(axes, f"requests in flight, {flying.peak} at most", "seconds", "requests")


def _tokens(axes: Any, done: Sequence[RequestRecord]) -> None:
    if not done:
        label(axes, "tokens per second: nothing to show", "seconds", "")
        return
    start, end = min(r.submit_start for r in done), max(r.finished for r in done)
    width = max((end - start) / NUM_SLICES, MIN_SLICE_S)
    rates = token_rates(done, start, end, width)
    seconds = [min(place * width, end - start) for place in range(len(rates) + 1)]
    axes.stairs(rates, seconds, fill=True, color=FILL, alpha=0.75)
    mean = sum(r.completion_tokens for r in done) / (end - start) if end > start else 0.0
    axes.axhline(mean, color=LINE, linestyle="--", label=f"mean {mean:.0f}")
    axes.set_ylim(bottom=0)
    label(axes, f"output tokens per second, in slices of {width * MS:.0f} ms", "seconds", "tok/s")


def label(axes: Any, title: str, x: str, y: str) -> None:
    """Set title and axis names, and add a legend and a faint grid."""
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(framealpha=0.95)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.3)
