"""The answer to a search: limits of latency, measured points, the printed table and the JSON."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.report.metrics import Summary
from quadriga.errors import ConfigError
from simulator.report import Figures

# Limits of latency percentiles, such as ttft_p99:500.

# The name on the command line, and the field of Summary and Figures.
METRICS = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "latency"}
SHARES = ("mean", "p50", "p95", "p99", "max")
MAX_FAILED_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """A limit in ms of one percentile (a field of Percentiles) of one metric."""

    metric: str
    share: str
    limit_ms: float

    @classmethod
    def parse(cls, text: str) -> "LatencyTarget":
        """Parse "ttft_p99:500".

        Raises:
            ConfigError: the text has another form.
        """
        name, _, number = text.partition(":")
        metric, _, share = name.partition("_")
        try:
            limit_ms = float(number)
        except ValueError:
            limit_ms = 0.0
        if metric not in METRICS or share not in SHARES or not 0 < limit_ms < math.inf:
            raise ConfigError(
                f"slo is {text!r}: it must be {', '.join(METRICS)}, an underscore,"
                f" {', '.join(SHARES)}, a colon and ms above 0, such as ttft_p99:500"
            )
        return cls(metric, share, limit_ms)

    @property
    def title(self) -> str:
        """The percentile's name in tables and plots."""
        return f"{self.metric.upper()} {self.share}"

    def value_ms(self, run: Summary | Figures) -> float | None:
        """Return the percentile of a run in ms, or None if nothing was measured."""
        spread = getattr(run, METRICS[self.metric])
        return None if spread is None else float(getattr(spread, self.share))

    def is_kept(self, run: Summary | Figures) -> bool:
        """Return whether the percentile is within the limit. Answers of one token have no TPOT."""
        value = self.value_ms(run)
        return value is None or value <= self.limit_ms


def are_kept(targets: Sequence[LatencyTarget], run: Summary | Figures) -> bool:
    """Return whether a run is within all limits and almost no request failed."""
    if run.failed > MAX_FAILED_SHARE * run.requests or run.ttft is None:
        return False
    return all(target.is_kept(run) for target in targets)


def limits_text(targets: Sequence[LatencyTarget]) -> str:
    """Return the limits, such as "TTFT p99 500 ms, TPOT p50 40 ms"."""
    return ", ".join(f"{target.title} {target.limit_ms:g} ms" for target in targets)


# The answer of bench.capacity: its points, the printed table and the JSON document.

RATE_WIDTH, KIND_WIDTH, COLUMN_WIDTH = 12, 11, 13


@dataclass(frozen=True, slots=True)
class Point:
    """A run at a rate in requests per second: measured (Summary) or simulated (Figures)."""

    rate: float
    run: Summary | Figures

    @property
    def measured(self) -> bool:
        """Whether a real server ran it."""
        return isinstance(self.run, Summary)

    @property
    def kind(self) -> str:
        """How the point is known: measured or simulated."""
        return "measured" if self.measured else "simulated"


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a search.

    Attributes:
        server: model, device and number format.
        load: lengths and arrivals of the requests.
        rate: requests per second within the limits; None if no rate is.
        verified: a real run at the rate was within the limits.
        points: all runs, measured ones in the order of their time.
    """

    targets: Sequence[LatencyTarget]
    server: str
    load: str
    rate: float | None
    verified: bool
    points: Sequence[Point]


def text(answer: Answer) -> str:
    """Return the answer in one line, and the table of all points."""
    return "\n".join(
        [
            *_headline(answer),
            f"{answer.server}; {answer.load}",
            "",
            *_table(answer),
        ]
    )


def _headline(answer: Answer) -> list[str]:
    """Return the rate and how it is known, or that there is none."""
    limits = limits_text(answer.targets)
    if answer.rate is None:
        lowest = min(answer.points, key=lambda point: point.rate)
        values = (f"{t.title} {t.value_ms(lowest.run) or 0:.0f} ms" for t in answer.targets)
        at_lowest = f"at {lowest.rate:.3g} requests/s it is {', '.join(values)}"
        return [f"no rate is within {limits}: {at_lowest} ({lowest.kind})"]
    source = "measured" if answer.verified else "simulated; no measured run was within the limits"
    first = f"{answer.rate:.3g} requests/s within {limits} ({source})"
    return [first, *_above(answer, answer.rate)]


def _above(answer: Answer, rate: float) -> list[str]:
    """Return a line about the lowest rate above `rate`, the answer's, that was measured."""
    above = [point for point in answer.points if point.measured and point.rate > rate]
    if not above:
        return []
    point = min(above, key=lambda point: point.rate)
    state = "still within the limits" if are_kept(answer.targets, point.run) else "beyond them"
    return [f"at {point.rate / rate:.2g} times the rate it was {state} (measured)"]


def _table(answer: Answer) -> list[str]:
    header = f"{'requests/s':>{RATE_WIDTH}}  {'run':{KIND_WIDTH}}"
    header += "".join(f"{target.title:>{COLUMN_WIDTH}}" for target in answer.targets)
    header += f"{'failed':>{COLUMN_WIDTH}}  within"
    limits = f"{'':{RATE_WIDTH}}  {'limit, ms':{KIND_WIDTH}}"
    limits += "".join(f"{target.limit_ms:{COLUMN_WIDTH}.1f}" for target in answer.targets)
    points = sorted(answer.points, key=lambda point: (point.rate, point.measured))
    return [header, limits, *(_row(answer.targets, point) for point in points)]


def _row(targets: Sequence[LatencyTarget], point: Point) -> str:
    values = (target.value_ms(point.run) for target in targets)
    cells = (f"{'n/a' if ms is None else f'{ms:.1f}':>{COLUMN_WIDTH}}" for ms in values)
    failed = f"{point.run.failed}/{point.run.requests}"
    within = "yes" if are_kept(targets, point.run) else "no"
    return (
        f"{point.rate:{RATE_WIDTH}.2f}  {point.kind:{KIND_WIDTH}}{''.join(cells)}"
        f"{failed:>{COLUMN_WIDTH}}  {within}"
    )


def document(answer: Answer) -> dict[str, Any]:
    """Return the answer as JSON: percentiles in ms by their names, rates in requests per second."""
    return {
        "slo": {f"{t.metric}_{t.share}": t.limit_ms for t in answer.targets},
        "server": answer.server,
        "load": answer.load,
        "request_rate": answer.rate,
        "verified": answer.verified,
        "points": [
            {
                "request_rate": point.rate,
                "measured": point.measured,
                "requests": point.run.requests,
                "failed": point.run.failed,
                "within": are_kept(answer.targets, point.run),
                **{f"{t.metric}_{t.share}": t.value_ms(point.run) for t in answer.targets},
            }
            for point in answer.points
        ],
    }
