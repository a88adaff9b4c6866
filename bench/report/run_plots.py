"""Draw a measured run. Needs matplotlib."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.metrics.percentiles import MS
from bench.metrics.records import RequestRecord
from bench.metrics.slo import Slo
from bench.metrics.timeline import awaiting_first_token, in_flight, token_rates
from bench.report.plot_style import DARK, FILL, MUTED, distribution, label, new_figure, save

NUM_SLICES = 120  # of the run's duration, each drawn with its tokens per second
MIN_SLICE_S = 0.25
NO_SLO = Slo()


def draw(
    path: Path, records: Sequence[RequestRecord], title: Iterable[str], slo: Slo = NO_SLO
) -> None:
    """Draw the distributions of TTFT, TPOT and ITL, requests in flight and tokens per second.

    Failed requests are left out. The limits of `slo` are lines.
    """
    done = [record for record in records if record.error is None]
    figure = new_figure(title)
    above, below = figure.subfigures(2, 1)
    limits = slo.limits()
    for axes, (name, values) in zip(above.subplots(1, 3), _spans(done).items(), strict=True):
        unit = "gaps" if name == "ITL" else "requests"
        distribution(axes, name, values, unit, limits.get(name.lower()))
    requests, rates = below.subplots(1, 2)
    _requests(requests, done)
    _tokens(rates, done)
    save(figure, path)


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
