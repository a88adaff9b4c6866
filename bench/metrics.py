"""Records of requests → summary. Pure: no clock, no I/O.

All times are Unix seconds on one clock; all spreads are in milliseconds. A difference that comes
out negative (clocks were set, or two stamps were taken in the other order) counts as 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

MS = 1000.0


@dataclass(slots=True)
class Record:
    """What was seen of one request. A time of 0.0: the request never came there.

    due: when the absolute schedule wanted it sent; None under the relative schedule.
    received, tokenized, admitted, first_token: stamped by the server.
    token_times: the end of the step that gave each token, stamped by the server.
    arrivals: when the client got each token; the tokens of one chunk arrive together.
    finished: when the client got the end marker.
    """

    index: int
    submit_start: float
    submit_end: float
    due: float | None = None
    received: float = 0.0
    tokenized: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    token_times: list[float] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""
    error: str | None = None

    @property
    def first_received(self) -> float:
        """When the client got the first token."""
        return self.arrivals[0] if self.arrivals else 0.0


@dataclass(frozen=True, slots=True)
class Spread:
    """How `count` durations are spread, in ms."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. Spreads in ms; None where nothing was measured.

    submit_wall: seconds to submit everything. duration: seconds from the first submit to the last
    finish. throughput: completion tokens per second of it.
    ttft: the client's clock, and the sum of to_server, tokenize, queue_wait, prefill and delivery;
    parts_gap is the largest difference between the two over all requests, in ms.
    tpot: between the arrivals of the first and the last token. itl: gaps between the times at which
    consecutive tokens were made, whatever the stream interval; itl_received: between arrivals.
    """

    requests: int
    failed: int
    first_error: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    submit_wall: float
    duration: float
    throughput: float | None
    submit_lag: Spread | None
    add_request: Spread | None
    to_server: Spread | None
    tokenize: Spread | None
    queue_wait: Spread | None
    prefill: Spread | None
    delivery: Spread | None
    ttft: Spread | None
    parts_gap: float | None
    tpot: Spread | None
    itl: Spread | None
    itl_received: Spread | None
    latency: Spread | None


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), by linear interpolation between the two nearest ranks."""
    if not values:
        raise ValueError("no values to take a percentile of")
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100.0
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def spread(seconds: Iterable[float]) -> Spread | None:
    """The spread in ms of durations in seconds; None if there are none."""
    values = [max(0.0, value) * MS for value in seconds]
    if not values:
        return None
    return Spread(
        count=len(values),
        mean=sum(values) / len(values),
        p50=percentile(values, 50),
        p95=percentile(values, 95),
        p99=percentile(values, 99),
        max=max(values),
    )


def summarize(records: Sequence[Record], submit_wall: float) -> Summary:
    """The figures of one run. Failed requests count only for what concerns submitting."""
    done = [record for record in records if record.error is None]
    errors = [record.error for record in records if record.error is not None]
    completion_tokens = sum(record.completion_tokens for record in done)
    duration = _duration(records, done)
    return Summary(
        requests=len(records),
        failed=len(errors),
        first_error=errors[0] if errors else None,
        prompt_tokens=sum(record.prompt_tokens for record in done),
        completion_tokens=completion_tokens,
        cached_tokens=sum(record.cached_tokens for record in done),
        submit_wall=submit_wall,
        duration=duration,
        throughput=completion_tokens / duration if duration > 0 else None,
        submit_lag=spread(r.submit_start - r.due for r in records if r.due is not None),
        add_request=spread(r.submit_end - r.submit_start for r in records),
        to_server=_between(done, "submit_start", "received"),
        tokenize=_between(done, "received", "tokenized"),
        queue_wait=_between(done, "tokenized", "admitted"),
        prefill=_between(done, "admitted", "first_token"),
        delivery=_between(done, "first_token", "first_received"),
        ttft=_between(done, "submit_start", "first_received"),
        parts_gap=_parts_gap(done),
        tpot=spread(time for r in done for time in _time_per_token(r)),
        itl=spread(gap for r in done for gap in _gaps(r.token_times)),
        itl_received=spread(gap for r in done for gap in _gaps(r.arrivals)),
        latency=_between(done, "submit_start", "finished"),
    )


def _duration(records: Sequence[Record], done: Sequence[Record]) -> float:
    if not done:
        return 0.0
    return max(0.0, max(r.finished for r in done) - min(r.submit_start for r in records))


def _between(records: Iterable[Record], start: str, end: str) -> Spread | None:
    """From one stamp to another, over the requests that have both."""
    stamps = [(getattr(record, start), getattr(record, end)) for record in records]
    return spread(after - before for before, after in stamps if before and after)


def _time_per_token(record: Record) -> list[float]:
    """(last - first) / (n - 1), for a request of two tokens or more."""
    arrivals = record.arrivals
    if len(arrivals) < 2:
        return []
    return [max(0.0, arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)]


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def _parts_gap(records: Iterable[Record]) -> float | None:
    """How far the parts of a TTFT are from it at most, in ms: 0 unless a stamp is out of order."""
    gaps = []
    for r in records:
        stamps = [r.submit_start, r.received, r.tokenized, r.admitted, r.first_token]
        stamps.append(r.first_received)
        if all(stamps):
            total = sum(max(0.0, gap) for gap in _gaps(stamps))
            gaps.append(abs(total - max(0.0, stamps[-1] - stamps[0])))
    return max(gaps) * MS if gaps else None
