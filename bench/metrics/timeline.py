"""Requests in flight and token rates over the time of a run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from bench.metrics.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Steps:
    """A step function: values[i] holds from times[i] (Unix seconds) until times[i + 1]."""

    times: list[float]
    values: list[int]

    @property
    def peak(self) -> int:
        """Highest value, or 0."""
        return max(self.values, default=0)


def in_flight(records: Iterable[RequestRecord]) -> Steps:
    """Return the number of requests that were sent and had not ended."""
    return _overlap((r.submit_start, r.finished) for r in records if r.submit_start)


def awaiting_first_token(records: Iterable[RequestRecord]) -> Steps:
    """Return the number of requests in flight that had no token yet."""
    spans = ((r.submit_start, r.first_received or r.finished) for r in records if r.submit_start)
    return _overlap(spans)


def _overlap(spans: Iterable[tuple[float, float]]) -> Steps:
    changes: dict[float, int] = {}
    for start, end in spans:
        changes[start] = changes.get(start, 0) + 1
        changes[max(start, end)] = changes.get(max(start, end), 0) - 1
    times = sorted(changes)
    return Steps(times, list(accumulate(changes[time] for time in times)))


def token_rates(
    records: Sequence[RequestRecord], start: float, end: float, width: float
) -> list[float]:
    """Return the tokens per second in each `width` seconds from start to end.

    A chunk without token ids counts as its share of the request's tokens.
    """
    counts = [0.0] * max(1, -int(-(end - start) // width))
    for record in records:
        share = max(len(record.arrivals), record.completion_tokens) / max(1, len(record.arrivals))
        for arrival in record.arrivals:
            counts[min(len(counts) - 1, max(0, int((arrival - start) / width)))] += share
    return [count / width for count in counts]
