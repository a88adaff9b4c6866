"""Draw percentiles against the request rate. Needs matplotlib."""

from pathlib import Path
from typing import Any

from bench.capacity.answer import Answer, LatencyTarget, Point, limits_text
from bench.report.files import now
from bench.report.plots import DARK, LIMIT, SERIES, label, log_ms, new_figure, save


def draw(path: Path, answer: Answer) -> None:
    """Draw a panel for each limit: simulated line, measured points, and the rate that was found."""
    headline = f"{_rate(answer)} within {limits_text(answer.targets)}"
    title = (headline, answer.server, answer.load, now()[:10])
    figure = new_figure(title, width=max(9.0, 6.5 * len(answer.targets)), height=5)
    panels = figure.subplots(1, len(answer.targets), squeeze=False)[0]
    for axes, target, color in zip(panels, answer.targets, SERIES * len(panels), strict=False):
        _panel(axes, answer, target, color)
    save(figure, path)


def _rate(answer: Answer) -> str:
    """Return the rate as text, or that there is none."""
    return "no rate is" if answer.rate is None else f"{answer.rate:.3g} requests/s"


def _panel(axes: Any, answer: Answer, target: LatencyTarget, color: str) -> None:
    simulated = _values(answer, target, measured=False)
    measured = _values(answer, target, measured=True)
    axes.plot(*zip(*simulated, strict=True), color=color, linewidth=2, label="simulated")
    if measured:
        axes.plot(
            *zip(*measured, strict=True), "o", color=color, markeredgecolor=DARK, markersize=9,
            label="measured",
        )  # fmt: skip
    limit = f"limit {target.limit_ms:g} ms"
    axes.axhline(target.limit_ms, color=LIMIT, linestyle="--", label=limit)
    if answer.rate is not None:
        axes.axvline(answer.rate, color=DARK, linestyle=":", label=_rate(answer))
    axes.set_yscale("log")
    log_ms(axes.yaxis)
    axes.set_xlim(left=0)
    label(axes, target.title, "requests per second", "ms", legend="upper left")


def _values(answer: Answer, target: LatencyTarget, measured: bool) -> list[tuple[float, float]]:
    points: list[Point] = [point for point in answer.points if point.measured == measured]
    values = [(point.rate, target.value_ms(point.run)) for point in points]
    return sorted((rate, ms) for rate, ms in values if ms is not None)
