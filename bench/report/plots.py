"""Draws a simulated run, on matplotlib."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from bench.simulate.records import Records, RecordSample

Figure: Any = importlib.import_module("matplotlib.figure").Figure
"""Not through pyplot, which looks for a screen."""

Floats = npt.NDArray[np.float64]
BINS = 100
MAX_POINTS = 1000
"""Of a distribution."""


def draw(path: Path, records: "Records", samples: Sequence["RecordSample"], start: float) -> None:
    """TTFT over time, the distributions, requests and pages over time, as one picture.

    start: the simulated time at which the run began, shown as 0.
    """
    figure = Figure(figsize=(12, 8), layout="constrained")
    (over_time, shares), (requests, pages) = figure.subplots(2, 2)
    _ttft_over_time(over_time, records, start)
    _distributions(shares, records)
    seconds = [sample.time - start for sample in samples]
    for axes, title, names in (
        (requests, "requests", ("running", "waiting")),
        (pages, "KV pages", ("pages_held", "pages_cached")),
    ):
        amounts = [[getattr(sample, name) for sample in samples] for name in names]
        axes.stackplot(seconds, amounts, labels=[name.replace("pages_", "") for name in names])
        label(axes, title, "seconds", "")
    figure.savefig(path)


def _ttft_over_time(axes: Any, records: "Records", start: float) -> None:
    when, ttft = _first_tokens(records)
    if len(when) == 0:
        return
    edges = np.linspace(when.min(), when.max(), BINS + 1)
    places = np.clip(np.searchsorted(edges, when, side="right") - 1, 0, BINS - 1)
    filled = np.unique(places)
    for percent in (50, 95, 99):
        values = [np.percentile(ttft[places == place], percent) for place in filled]
        axes.plot(edges[filled] - start, values, label=f"p{percent}")
    label(axes, "TTFT by time of sending", "seconds", "ms")


def _distributions(axes: Any, records: "Records") -> None:
    done = records["completion_tokens"] > 1
    first, last = records["first_token"][done], records["last_token"][done]
    tpot = (last - first) / (records["completion_tokens"][done] - 1) * 1000
    gaps = records.gaps.values.astype(np.float64) * 1000
    for name, values in (("TTFT", _first_tokens(records)[1]), ("TPOT", tpot), ("ITL", gaps)):
        if len(values):
            share = np.linspace(0, 100, min(len(values), MAX_POINTS))
            axes.plot(np.maximum(np.percentile(values, share), 0.01), share, label=name)
    axes.set_xscale("log")
    label(axes, "distributions", "ms", "% of requests or gaps")


def _first_tokens(records: "Records") -> tuple[Floats, Floats]:
    """When those that got a token were sent, and the ms until the server had it."""
    got = records["first_token"] > 0
    sent = records["submitted"][got]
    return sent, (records["first_token"][got] - sent) * 1000


def label(axes: Any, title: str, x: str, y: str) -> None:
    """Title, names of the axes, legend and a faint grid."""
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(framealpha=0.95)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.3)
