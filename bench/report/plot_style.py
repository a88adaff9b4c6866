"""The style of all plots: sizes, colors, titles, distributions and limits. Needs matplotlib."""

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# pyplot would look for a screen; the figure alone does not.
Figure: Any = importlib.import_module("matplotlib.figure").Figure
TICKER: Any = importlib.import_module("matplotlib.ticker")

SERIES = ("#1f5fa8", "#d9822b", "#3a9a5c", "#8e5ea2")  # for different metrics in one plot
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
