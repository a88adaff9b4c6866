"""Draw a simulated run. Needs matplotlib."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.metrics.percentiles import MS
from bench.metrics.slo import Slo
from bench.report.plot_style import (
    FILL,
    MUTED,
    PERCENTILES,
    distribution,
    label,
    limit_line,
    log_ms,
    new_figure,
    save,
)
from bench.simulate.records import Records, RecordSample

Floats = npt.NDArray[np.float64]
NUM_BINS = 60


def draw(
    path: Path,
    records: Records,
    samples: Sequence[RecordSample],
    start: float,
    title: Iterable[str] = (),
    slo: Slo | None = None,
) -> None:
    """Draw distributions, and TTFT, requests and KV pages over time, into one picture.

    `start` is the simulated time at which the run began, shown as 0.
    """
    limits = (slo or Slo()).limits()
    figure = new_figure(title)
    above, below = figure.subfigures(2, 1)
    for axes, (name, values) in zip(above.subplots(1, 3), _spans(records).items(), strict=True):
        unit = "gaps" if name == "ITL" else "requests"
        distribution(axes, name, values, unit, limits.get(name.lower()))
    over_time, requests, pages = below.subplots(1, 3)
    _ttft_over_time(over_time, records, start, limits.get("ttft"))
    seconds = [sample.time - start for sample in samples]
    for axes, text, names in (
        (requests, "requests", ("running", "waiting")),
        (pages, "KV pages", ("pages_held", "pages_cached")),
    ):
        amounts = [[getattr(sample, name) for sample in samples] for name in names]
        labels = [name.replace("pages_", "") for name in names]
        axes.stackplot(seconds, amounts, labels=labels, colors=(FILL, MUTED))
        axes.margins(x=0.01)
        axes.set_ylim(bottom=0)
        label(axes, f"{text} over time", "seconds", text)
    save(figure, path)


def _ttft_over_time(axes: Any, records: Records, start: float, limit_ms: float | None) -> None:
    submitted, ttft = _first_tokens(records)
    if len(submitted) == 0:
        return
    edges = np.linspace(submitted.min(), submitted.max(), NUM_BINS + 1)
    places = np.clip(np.searchsorted(edges, submitted, side="right") - 1, 0, NUM_BINS - 1)
    filled = np.unique(places)
    for percent, color in PERCENTILES.items():
        values = [np.percentile(ttft[places == place], percent) for place in filled]
        axes.plot(edges[filled] - start, values, label=f"p{percent}", color=color)
    if limit_ms is not None:
        limit_line(axes, limit_ms)
    axes.set_yscale("log")
    log_ms(axes.yaxis)
    label(axes, "TTFT by time of sending", "seconds", "ms")


def _spans(records: Records) -> dict[str, Floats]:
    """Return the TTFTs, TPOTs and ITLs in ms."""
    done = records["completion_tokens"] > 1
    first, last = records["first_token"][done], records["last_token"][done]
    return {
        "TTFT": _first_tokens(records)[1],
        "TPOT": (last - first) / (records["completion_tokens"][done] - 1) * MS,
        "ITL": records.gaps.values.astype(np.float64) * MS,
    }


def _first_tokens(records: Records) -> tuple[Floats, Floats]:
    """Return the submit times and TTFTs in ms of the requests that got a token."""
    has_token = records["first_token"] > 0
    submitted = records["submitted"][has_token]
    return submitted, (records["first_token"][has_token] - submitted) * MS
