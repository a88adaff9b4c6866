"""Limits of latency percentiles, such as ttft_p99:500."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.metrics.metrics import Summary
from bench.simulate.report import Figures
from quadriga.errors import ConfigError

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
            ConfigError: The text has another form.
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
