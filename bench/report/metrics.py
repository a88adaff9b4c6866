"""Summarize the records of a run's requests: latencies, and what was in flight over time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from bench.client.load_generator import RequestRecord
from simulator.latency import MS, Goodput, Percentiles, Slo, spread

# All times are Unix seconds on one clock, all spreads are in ms. A negative difference (two
# stamps were taken in the other order) counts as 0.


@dataclass(frozen=True, slots=True)
class Sizes:
    """Token counts over the requests."""

    mean: float
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class ClientSummary:
    """Figures of one of several clients, with spreads as in Summary."""

    client: int
    requests: int
    failed: int
    completion_tokens: int
    ttft: Percentiles | None
    tpot: Percentiles | None
    itl: Percentiles | None
    latency: Percentiles | None


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one run, with spreads in ms; None if nothing was measured.

    Attributes:
        submit_wall: seconds until all requests were sent.
        duration: seconds from the first submit to the last end.
        throughput: completion tokens per second of the duration.
        ttft: by the client's clock; the sum of to_server, tokenize, queue_wait, prefill, delivery.
        parts_gap: largest difference between the TTFT and that sum over all requests, in ms.
        tpot: between the arrivals of the first and the last token, per token.
        itl: gaps between the times at which consecutive tokens were sampled.
        itl_received: gaps between the arrivals of consecutive tokens.
        request_rate: finished requests per second of the duration.
        cache_hit_rate: share of the prompt tokens that were cached, 0 to 1.
        goodput: None without limits.
        clients: empty if there is only one client.
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
    submit_lag: Percentiles | None
    add_request: Percentiles | None
    to_server: Percentiles | None
    tokenize: Percentiles | None
    queue_wait: Percentiles | None
    prefill: Percentiles | None
    delivery: Percentiles | None
    ttft: Percentiles | None
    parts_gap: float | None
    tpot: Percentiles | None
    itl: Percentiles | None
    itl_received: Percentiles | None
    latency: Percentiles | None
    request_rate: float | None
    input_len: Sizes | None
    output_len: Sizes | None
    cache_hit_rate: float | None
    goodput: Goodput | None
    clients: tuple[ClientSummary, ...]


NO_SLO = Slo()


def summarize(records: Sequence[RequestRecord], submit_wall: float, slo: Slo = NO_SLO) -> Summary:
    """Return the figures of one run.

    Failed requests count only in the figures about submitting, and against the goodput.
    """
    sent = [record for record in records if record.submit_start]
    done = [record for record in records if record.error is None]
    errors = [record.error for record in records if record.error is not None]
    prompt_tokens = sum(record.prompt_tokens for record in done)
    completion_tokens = sum(record.completion_tokens for record in done)
    cached_tokens = sum(record.cached_tokens for record in done)
    duration = _duration(sent, done)
    return Summary(
        requests=len(records),
        failed=len(errors),
        first_error=errors[0] if errors else None,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=cached_tokens,
        submit_wall=submit_wall,
        duration=duration,
        throughput=_ratio(completion_tokens, duration),
        submit_lag=spread(r.submit_start - r.due for r in sent if r.due is not None),
        add_request=spread(r.submit_end - r.submit_start for r in sent),
        to_server=_between(done, "submit_start", "received"),
        tokenize=_between(done, "received", "tokenized"),
        queue_wait=_between(done, "tokenized", "admitted"),
        prefill=_between(done, "admitted", "first_token"),
        delivery=_between(done, "first_token", "first_received"),
        ttft=_between(done, "submit_start", "first_received"),
        parts_gap=_parts_gap(done),
        tpot=_time_per_token(done),
        itl=spread(gap for r in done for gap in _gaps(r.token_times)),
        itl_received=spread(gap for r in done for gap in _gaps(r.arrivals)),
        latency=_between(done, "submit_start", "finished"),
        request_rate=_ratio(len(done), duration),
        input_len=_sizes([record.prompt_tokens for record in done]),
        output_len=_sizes([record.completion_tokens for record in done]),
        cache_hit_rate=_ratio(cached_tokens, prompt_tokens),
        goodput=_goodput(records, slo, duration) if slo else None,
        clients=_by_client(records),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _sizes(tokens: Sequence[int]) -> Sizes | None:
    return Sizes(sum(tokens) / len(tokens), min(tokens), max(tokens)) if tokens else None


def _goodput(records: Sequence[RequestRecord], slo: Slo, duration: float) -> Goodput:
    good = sum(is_within(slo, record) for record in records)
    return Goodput(good, good / len(records), _ratio(good, duration))


def is_within(slo: Slo, record: RequestRecord) -> bool:
    """Return whether a request finished within all limits."""
    if record.error is not None or not record.arrivals:
        return False
    seconds = {
        "ttft": record.first_received - record.submit_start,
        "tpot": record.time_per_token or 0.0,
        "e2el": record.finished - record.submit_start,
    }
    return all(MS * seconds[name] <= limit for name, limit in slo.limits().items())


def _by_client(records: Sequence[RequestRecord]) -> tuple[ClientSummary, ...]:
    clients: dict[int, list[RequestRecord]] = {}
    for record in records:
        clients.setdefault(record.client, []).append(record)
    if len(clients) == 1:
        return ()
    return tuple(_of_client(client, clients[client]) for client in sorted(clients))


def _of_client(client: int, records: Sequence[RequestRecord]) -> ClientSummary:
    done = [record for record in records if record.error is None]
    return ClientSummary(
        client=client,
        requests=len(records),
        failed=len(records) - len(done),
        completion_tokens=sum(record.completion_tokens for record in done),
        ttft=_between(done, "submit_start", "first_received"),
        tpot=_time_per_token(done),
        itl=spread(gap for r in done for gap in _gaps(r.token_times)),
        latency=_between(done, "submit_start", "finished"),
    )


def _duration(sent: Sequence[RequestRecord], done: Sequence[RequestRecord]) -> float:
    if not done:
        return 0.0
    return max(0.0, max(r.finished for r in done) - min(r.submit_start for r in sent))


def _between(records: Iterable[RequestRecord], start: str, end: str) -> Percentiles | None:
    """Return the spread from one stamp to another, over the requests that have both."""
    stamps = [(getattr(record, start), getattr(record, end)) for record in records]
    return spread(after - before for before, after in stamps if before and after)


def _time_per_token(records: Iterable[RequestRecord]) -> Percentiles | None:
    times = [record.time_per_token for record in records]
    return spread(time for time in times if time is not None)


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def _parts_gap(records: Iterable[RequestRecord]) -> float | None:
    """Return the largest difference in ms of a TTFT and its parts: 0 if all stamps are in order."""
    gaps = []
    for r in records:
        stamps = [r.submit_start, r.received, r.tokenized, r.admitted, r.first_token]
        stamps.append(r.first_received)
        if all(stamps):
            total = sum(max(0.0, gap) for gap in _gaps(stamps))
            gaps.append(abs(total - max(0.0, stamps[-1] - stamps[0])))
    return max(gaps) * MS if gaps else None


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
