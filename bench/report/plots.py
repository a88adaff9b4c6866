"""Draw a measured run and a simulated one. Needs matplotlib.

The style of all plots comes first: sizes, colors, titles, distributions and limits.
"""

import importlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.client.load_generator import RequestRecord
from bench.report.metrics import awaiting_first_token, in_flight, token_rates
from simulator.latency import MS, Slo
from simulator.records import Records, RecordSample

# pyplot would look for a screen; the figure alone does not.
Figure: Any = importlib.import_module("matplotlib.figure").Figure
TICKER: Any = importlib.import_module("matplotlib.ticker")

FILL, MUTED, DARK = "#4c72b0", "#c9d5e8", "#1f3b66"
LIMIT = "#c0392b"
PERCENTILES = {50: "#1f3b66", 95: "#4c72b0", 99: "#93b5dd"}
MAX_POINTS = 1000  # of a drawn distribution
MIN_MS = 0.01
DPI = 110


def new_figure(title: Iterable[str], width: float = 14, height: float = 8) -> Any:
    """Return a figure in inches with the non-empty parts of the title above it."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(" · ".join(part for part in title if part), fontsize=11)
    return figure


def save(figure: Any, path: Path) -> None:
    """Write a figure to a file."""
    figure.savefig(path, dpi=DPI)


def label(axes: Any, title: str, x: str, y: str, legend: str = "best") -> None:
    """Set title and axis names, and add a legend and a faint grid."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(framealpha=0.95, fontsize=9, loc=legend)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def log_ms(axis: Any) -> None:
    """Show an axis of milliseconds in powers of ten, with plain numbers."""
    axis.set_major_locator(TICKER.LogLocator(subs=(1.0, 2.0, 5.0), numticks=14))
    axis.set_major_formatter(TICKER.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(TICKER.NullFormatter())


def distribution(
    axes: Any, name: str, values: Sequence[float] | Any, unit: str, limit_ms: float | None
) -> None:
    """Draw the cumulative distribution of values in ms, its percentiles and a limit.

    The axis of ms is logarithmic, so that a few long gaps leave the others readable.
    """
    if len(values) == 0:
        label(axes, f"{name}: nothing to show", "ms", "")
        return
    ordered = np.maximum(np.sort(np.asarray(values, np.float64)), MIN_MS)
    shares = np.linspace(0, 100, min(max(len(ordered), 2), MAX_POINTS))
    axes.plot(np.percentile(ordered, shares), shares, color=FILL, linewidth=2)
    for percent, color in PERCENTILES.items():
        ms = float(np.percentile(ordered, percent))
        axes.plot([ms], [percent], "o", color=color, markersize=7, label=f"p{percent}  {ms:.1f} ms")
    if limit_ms is not None:
        within = 100 * float((ordered <= limit_ms).mean())
        axes.axvline(
            limit_ms, color=LIMIT, linestyle="--", label=f"limit {limit_ms:g} ms: {within:.0f} %"
        )
    axes.set_xscale("log")
    low, high = float(ordered[0]), float(max(ordered[-1], limit_ms or 0.0))
    axes.set_xlim(low / 1.15, high * 1.15)
    axes.set_ylim(0, 103)
    log_ms(axes.xaxis)
    axes.tick_params(axis="x", labelsize=8)
    label(axes, f"{name} of {len(ordered):,} {unit}", "ms", f"% of the {unit}")


def limit_line(axes: Any, limit_ms: float) -> None:
    """Draw a limit on an axis of ms that is vertical."""
    axes.axhline(limit_ms, color=LIMIT, linestyle="--", label=f"limit {limit_ms:g} ms")


NUM_SLICES = 120  # of the run's duration, each drawn with its tokens per second
MIN_SLICE_S = 0.25
NO_SLO = Slo()


def draw_run(
    path: Path, records: Sequence[RequestRecord], title: Iterable[str], slo: Slo = NO_SLO
) -> None:
    """Draw the distributions of TTFT, TPOT and ITL, requests in flight and tokens per second.

    Failed requests are left out. The limits of `slo` are lines.
    """
    done = [record for record in records if record.error is None]
    figure = new_figure(title)
    above, below = figure.subfigures(2, 1)
    limits = slo.limits()
    for axes, (name, values) in zip(above.subplots(1, 3), _run_spans(done).items(), strict=True):
        unit = "gaps" if name == "ITL" else "requests"
        distribution(axes, name, values, unit, limits.get(name.lower()))
    requests, rates = below.subplots(1, 2)
    _requests(requests, done)
    _tokens(rates, done)
    save(figure, path)


def _run_spans(done: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Return the TTFTs, TPOTs and ITLs in ms."""
    several = [r for r in done if r.completion_tokens > 1 and r.arrivals]
    return {
        "TTFT": [(r.first_received - r.submit_start) * MS for r in done if r.arrivals],
        "TPOT": [
            (r.arrivals[-1] - r.first_received) * MS / (r.completion_tokens - 1) for r in several
        ],
        "ITL": [(after - before) * MS for r in done for before, after in pairwise(r.chunks)],
    }


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
    axes.margins(x=0.01)
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
    axes.axhline(mean, color=DARK, linestyle="--", label=f"mean {mean:.0f}")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    label(axes, "output tokens per second", "seconds", "tokens/s")


Floats = npt.NDArray[np.float64]
NUM_BINS = 60


def draw_simulation(
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
    for axes, (name, values) in zip(
        above.subplots(1, 3), _simulation_spans(records).items(), strict=True
    ):
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


def _simulation_spans(records: Records) -> dict[str, Floats]:
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
