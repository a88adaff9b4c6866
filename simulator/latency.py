"""Distributions of latencies, and the limits within which a request counts as good."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quadriga.errors import ConfigError

# Percentiles of durations: seconds in, milliseconds out.

MS = 1000.0  # per second


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The distribution of `count` durations in ms."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


def percentile(values: Sequence[float], q: float) -> float:
    """Return the q-th percentile (0 to 100), interpolated between the two nearest ranks."""
    if not values:
        raise ValueError("no values to take a percentile of")
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100.0
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def spread(seconds: Iterable[float]) -> Percentiles | None:
    """Return the distribution in ms of durations in seconds, or None if there are none."""
    values = [max(0.0, value) * MS for value in seconds]
    if not values:
        return None
    return Percentiles(
        count=len(values),
        mean=sum(values) / len(values),
        p50=percentile(values, 50),
        p95=percentile(values, 95),
        p99=percentile(values, 99),
        max=max(values),
    )


def spread_text(spread: Percentiles | None, digits: int = 2) -> str:
    """Return "p50/p95/p99 ms", or "n/a"."""
    if spread is None:
        return "n/a"
    return "/".join(f"{ms:.{digits}f}" for ms in (spread.p50, spread.p95, spread.p99)) + " ms"


# The spreads that a measured run and a simulated one have, by their titles.
LATENCIES = {
    "queue_wait": "Queue wait (post-tok)",
    "prefill": "Prefill->first token",
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "latency": "Latency",
}


def latency_lines(run: object) -> list[str]:
    """Return the printed lines of a run that has these spreads."""
    return [
        f"{title} p50/p95/p99: {spread_text(getattr(run, name))}"
        for name, title in LATENCIES.items()
    ]


# Limits of latency, and the share of the requests within them.


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits within which a request counts as good, in ms; None: no limit.

    A request of one token has no TPOT and is within any limit of it.

    Attributes:
        e2el_ms: limit of the time from the submit to the end marker.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    @classmethod
    def parse(cls, limits: Sequence[str]) -> "Slo":
        """Parse limits such as "ttft:200", "tpot:30" and "e2el:5000".

        Raises:
            ConfigError: a limit has another form.
        """
        limits_ms: dict[str, float] = {}
        for limit in limits:
            name, _, text = limit.partition(":")
            try:
                value = float(text)
            except ValueError:
                value = 0.0
            if f"{name}_ms" not in cls.__slots__ or not 0 < value < math.inf:
                raise ConfigError(
                    f"goodput is {limit!r}: a limit is ttft, tpot or e2el, a colon and ms above 0,"
                    " such as ttft:200"
                )
            limits_ms[f"{name}_ms"] = value
        return cls(**limits_ms)

    def __bool__(self) -> bool:
        return bool(self.limits())

    def limits(self) -> dict[str, float]:
        """Return the limits in ms by their names on the command line."""
        named = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2el": self.e2el_ms}
        return {name: ms for name, ms in named.items() if ms is not None}


@dataclass(frozen=True, slots=True)
class Goodput:
    """The requests within the limits of an Slo, as a share of all (0 to 1) and per second."""

    requests: int
    share: float
    rate: float | None
