"""Draw a simulated run. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.metrics.percentiles import MS
from bench.report.run_plots import Figure, label
from bench.simulate.records import Records, RecordSample

Floats = npt.NDArray[np.float64]
NUM_BINS = 100
MAX_POINTS = 1000  # of a drawn distribution


def draw(path: Path, records: Records, samples: Sequence[RecordSample], start: float) -> None:
    """Draw TTFT, requests and KV pages over time, and distributions, into one picture.

    `start` is the simulated time at which the run began, shown as 0.
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


def _ttft_over_time(axes: Any, records: Records, start: float) -> None:
    submitted, ttft = _first_tokens(records)
    if len(submitted) == 0:
        return
    edges = np.linspace(submitted.min(), submitted.max(), NUM_BINS + 1)
    places = np.clip(np.searchsorted(edges, submitted, side="right") - 1, 0, NUM_BINS - 1)
    filled = np.unique(places)
    for percent in (50, 95, 99):
        values = [np.percentile(ttft[places == place], percent) for place in filled]
        axes.plot(edges[filled] - start, values, label=f"p{percent}")
    label(axes, "TTFT by time of sending", "seconds", "ms")


def _distributions(axes: Any, records: Records) -> None:
    done = records["completion_tokens"] > 1
    first, last = records["first_token"][done], records["last_token"][done]
    tpot = (last - first) / (records["completion_tokens"][done] - 1) * MS
    gaps = records.gaps.values.astype(np.float64) * MS
    for name, values in (("TTFT", _first_tokens(records)[1]), ("TPOT", tpot), ("ITL", gaps)):
        if len(values):
            share = np.linspace(0, 100, min(len(values), MAX_POINTS))
            axes.plot(np.maximum(np.percentile(values, share), 0.01), share, label=name)
    axes.set_xscale("log")
    label(axes, "distributions", "ms", "% of requests or gaps")


def _first_tokens(records: Records) -> tuple[Floats, Floats]:
    """Return the submit times and TTFTs in ms of the requests that got a token."""
    has_token = records["first_token"] > 0
    submitted = records["submitted"][has_token]
    return submitted, (records["first_token"][has_token] - submitted) * MS
