"""What is observed of a call: its line in the log, its metrics, its trace, and where its time went.

At the end come the choices that have ended lately, for simulations.
"""

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from http_proc.core.errors import ApiError
from quadriga import clock
from quadriga.client.async_client import AsyncClient
from quadriga.client.types import Completion, Timings
from quadriga.sampling.params import SamplingParams
from quadriga.server.config.frontend_args import TraceArgs
from quadriga.server.histogram import SECONDS, Histogram
from quadriga.server.processes.logs import (
    MAX_LOGGED_CHARS,
    MAX_REASON_CHARS,
    RequestLogLevel,
    first_token_times,
    in_a_line,
    log_fields,
    seconds_of,
    stages_text,
    token_counts,
)
from quadriga.server.tenants import parent_name
from quadriga.server.tracing.context import HeadSampling, traceparent_of
from quadriga.server.tracing.export import Exporter
from quadriga.wire.client import MAX_TRACE_IDS
from quadriga.wire.trace import Attributes, RequestTrace, Span, TraceContext
from quadriga.wire.what_if import MeasuredChoice

SERVER_TIMING = "Server-Timing"
# Of a call with many texts, in a line of the log.
MAX_LOGGED_CHOICES = 128

Stage = tuple[str, float]


class TimingsBody(msgspec.Struct):
    """Milliseconds and speed of an answer. Times that it did not come to are null.

    queue_ms, prefill_ms and ttft_ms are those of the choice whose first token came first: from the
    end of tokenization to admission, from admission to the first token, and from the arrival at the
    gateway to the first token. decode_ms: from the first token of any choice to the last of any.
    tokens_per_second: tokens of all choices after the first of each, per second of decode_ms.
    cached_tokens: tokens of that choice's prompt that came from the prefix cache.
    """

    queue_ms: float | None
    prefill_ms: float | None
    ttft_ms: float | None
    decode_ms: float | None
    tokens_per_second: float | None
    cached_tokens: int


def timings_body(completions: Sequence[Completion]) -> TimingsBody:
    """Return the timings of an answer, which has at least one choice."""
    with_tokens = [completion for completion in completions if completion.timings.token_times]
    if not with_tokens:
        queue_s = completions[0].timings.queue
        cached = completions[0].usage.cached_tokens
        return TimingsBody(_ms(queue_s), None, None, None, None, cached)
    first = min(with_tokens, key=lambda completion: completion.timings.token_times[0])
    times = first.timings
    first_at = times.token_times[0]
    decode_s = max(completion.timings.token_times[-1] for completion in with_tokens) - first_at
    num_later = sum(len(completion.timings.token_times) - 1 for completion in with_tokens)
    return TimingsBody(
        queue_ms=_ms(times.queue),
        prefill_ms=_ms(max(0.0, first_at - times.admitted) if times.admitted else None),
        ttft_ms=_ms(first_at - times.submitted),
        decode_ms=_ms(decode_s),
        tokens_per_second=round(num_later / decode_s, 3) if num_later and decode_s > 0 else None,
        cached_tokens=first.usage.cached_tokens,
    )


def stages(times: Timings) -> list[Stage]:
    """Return the stages of a choice from the frontend to the gateway, and their seconds."""
    passed = [("tokenize", times.tokenized - times.received)]
    if span := computed(times):
        first, last = span
        passed += [
            ("queue", times.admitted - times.tokenized),
            ("prefill", first - times.admitted),
            ("decode", last - first),
            ("detokenize", times.detokenized - last),
            ("delivery", times.delivered - times.detokenized),
        ]
    return passed


def computed(times: Timings) -> tuple[float, float] | None:
    """Return when the first and the last token was sampled; None without a token.

    An answer that is numbers has one time twice: that of its last step.
    """
    if times.token_times:
        return times.token_times[0], times.token_times[-1]
    return (times.first_token, times.first_token) if times.first_token else None


def num_vectors(completions: Sequence[Completion]) -> int:
    """Return how many of an answer's completions are numbers: those of one text each."""
    return sum(completion.vector is not None for completion in completions)


def num_prompt_tokens(completions: Sequence[Completion], shown: Completion) -> tuple[int, int]:
    """Return the numbers of prompt tokens, and of cached ones: of all texts, or of a prompt.

    shown: the choice whose prompt counts, where the answer is text.
    """
    counted = completions if num_vectors(completions) else [shown]
    usages = [completion.usage for completion in counted]
    return sum(each.prompt_tokens for each in usages), sum(each.cached_tokens for each in usages)


def server_timing(passed: Iterable[Stage]) -> str:
    """Return the value of the header for stages and their seconds."""
    return ", ".join(f"{name};dur={1000 * max(0.0, seconds):.1f}" for name, seconds in passed)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


@dataclass(slots=True)
class Inference:
    """What a call asks of a model.

    Attributes:
        named: the model's name or alias in the request; "" without one.
        model: name of the model or adapter that answers; "" before it is known.
        params: of its first request to the server; None before it is sent.
        num_choices: of all its requests to the server.
        is_stream: the answer is sent in pieces.
    """

    named: str = ""
    model: str = ""
    params: SamplingParams | None = None
    num_choices: int = 0
    is_stream: bool = False


@dataclass(slots=True)
class CallRecord:
    """What is logged of a web request.

    Attributes:
        id: of the answer; empty if the request has none.
        request_id: the X-Request-Id.
        model: name of the model that answers, of a server with several; "" before it is known.
        status: of the answer; None if the client left before it was known.
        code: of the error that the client got; empty without one.
        error: its message; empty without one.
        began_at: time.monotonic() of its first byte.
        inference: what it asks of a model.
    """

    id: str = ""
    request_id: str = ""
    model: str = ""
    method: str = "POST"
    path: str = ""
    route: str = ""
    outcome: str = "the client left"
    status: int | None = None
    code: str = ""
    error: str = ""
    began_at: float = field(default_factory=time.monotonic)
    completions: list[Completion] = field(default_factory=list)
    inference: Inference = field(default_factory=Inference)

    def answered(self, status: int) -> None:
        """Note the status of the answer."""
        self.status, self.outcome = status, str(status)

    def failed(self, error: ApiError) -> None:
        """Note the error that is the answer."""
        self.status, self.code = error.status, error.answer.error.code or ""
        self.error, self.outcome = str(error), f"{self.status} {self.code}".rstrip()


def log_request(record: CallRecord, level: RequestLogLevel) -> None:
    """Log one line, if the call is to be logged.

    Args:
        record: of a call at its end.
        level: which calls are logged.
    """
    if level.is_off or record.method != "POST":
        return
    seconds = time.monotonic() - record.began_at
    if level.is_slow(seconds):
        texts = [stages_text(stages(completion.timings)) for completion in record.completions[:1]]
        text = f"slow: {' · '.join([_line(record, seconds), *texts])}"
        log_fields(logging.WARNING, text, **_fields(record, seconds))
    elif level.logs_all:
        log_fields(logging.INFO, _line(record, seconds), **_fields(record, seconds))


def _fields(record: CallRecord, seconds: float) -> dict[str, Any]:
    """Return the fields of a line in JSON, as docs/monitor.md lists them."""
    fields: dict[str, Any] = {
        "event": "request",
        "id": record.id or None,
        "request_id": record.request_id,
        **({"model": record.model} if record.model else {}),
        "method": record.method[:MAX_LOGGED_CHARS],
        "path": record.path[:MAX_LOGGED_CHARS],
        "status": record.status,
        "code": record.code or None,
        "error": record.error[:MAX_REASON_CHARS] or None,
        "seconds": round(seconds, 6),
    }
    if record.completions:
        completions, times = record.completions, record.completions[0].timings
        first_s = times.token_times[0] - times.submitted if times.token_times else None
        num_prompt, num_cached = num_prompt_tokens(completions, completions[0])
        shown = completions[:MAX_LOGGED_CHOICES]
        fields |= {
            "ring_ids": sorted({completion.request_id for completion in shown}),
            "finish_reasons": [completion.finish_reason for completion in shown],
            "vectors": num_vectors(completions),
            "prompt_tokens": num_prompt,
            "cached_tokens": num_cached,
            "generated_tokens": sum(c.usage.completion_tokens for c in completions),
            "first_token_s": None if first_s is None else round(first_s, 6),
            "stages_s": seconds_of(stages(times)),
        }
    return fields


def _line(record: CallRecord, seconds: float) -> str:
    parts = [f"{in_a_line(record.method)} {in_a_line(record.path)} {record.outcome}"]
    parts.append(f"{seconds:.3f} s")
    if record.id:
        parts.insert(0, in_a_line(record.id))
    if record.completions:
        parts += _describe(record.completions)
    if record.error:
        parts.append(in_a_line(record.error, MAX_REASON_CHARS))
    return " · ".join(parts)


def _describe(completions: list[Completion]) -> list[str]:
    """Return finish reasons and token counts of all choices, and the times of the first."""
    times = completions[0].timings
    num_prompt, num_cached = num_prompt_tokens(completions, completions[0])
    num_generated = sum(completion.usage.completion_tokens for completion in completions)
    counts = token_counts(num_prompt, num_cached, num_generated)
    if num := num_vectors(completions):
        return [f"{num} vector{'s' * (num > 1)}", counts[0]]
    reasons = Counter(completion.finish_reason for completion in completions)
    parts = [
        ", ".join(
            reason if count == 1 else f"{count} {reason}" for reason, count in reasons.items()
        ),
        *counts,
    ]
    if times.token_times:
        queued_s, first_s = times.admitted - times.tokenized, times.token_times[0] - times.submitted
        parts += first_token_times(queued_s, first_s)
    return parts


TOKEN_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
CHOICE_BOUNDS = (1, 2, 5, 10, 20, 50, 128)

# Metric name -> (bounds of the buckets, help text).
HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    "time_to_first_token_seconds": (SECONDS, "Seconds from submission to the first token"),
    "request_time_per_output_token_seconds": (
        SECONDS,
        "Mean seconds for each token of a choice after the first",
    ),
    "inter_token_latency_seconds": (SECONDS, "Seconds between two tokens"),
    "e2e_request_latency_seconds": (SECONDS, "Seconds from submission to delivery"),
    "request_tokenize_time_seconds": (SECONDS, "Seconds in the tokenizer"),
    "request_queue_time_seconds": (SECONDS, "Seconds in the waiting queue"),
    "request_prefill_time_seconds": (SECONDS, "Seconds from admission to the first token"),
    "request_decode_time_seconds": (SECONDS, "Seconds from the first to the last token"),
    "request_inference_time_seconds": (SECONDS, "Seconds from admission to the last token"),
    "request_detokenize_time_seconds": (SECONDS, "Seconds in the detokenizer"),
    "request_delivery_time_seconds": (SECONDS, "Seconds from the detokenizer to the gateway"),
    "request_prompt_tokens": (TOKEN_BOUNDS, "Number of prompt tokens"),
    "request_generation_tokens": (TOKEN_BOUNDS, "Number of generated tokens of a choice"),
    "request_params_n": (CHOICE_BOUNDS, "Number of choices"),
    "request_params_max_tokens": (
        TOKEN_BOUNDS,
        "Largest number of generated tokens that the request allows",
    ),
}


class RequestMetrics:
    """Counters of one gateway.

    Attributes:
        errors: web requests that failed, by CallRecord.model and error code.
    """

    def __init__(self) -> None:
        self.num_slow_readers = 0
        self.num_disconnects = 0
        self.num_refused_connections = 0
        self.errors: Counter[tuple[str, str]] = Counter()

    def count_error(self, record: CallRecord, code: str) -> None:
        """Count a web request that failed with this error code."""
        self.errors[record.model, code] += 1


class AnswerMetrics:
    """Histograms of the answers of one model. Times are in seconds."""

    def __init__(self) -> None:
        self.num_vectors = 0
        self.histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}

    def count_submitted(self, params: SamplingParams) -> None:
        """Count a request that is sent to the server."""
        self.histograms["request_params_n"].observe(params.n)
        if params.max_new_tokens is not None:
            self.histograms["request_params_max_tokens"].observe(params.max_new_tokens)

    def count_completion(self, completion: Completion) -> None:
        """Count a finished choice and the time of each of its stages."""
        times, usage, histograms = completion.timings, completion.usage, self.histograms
        histograms["e2e_request_latency_seconds"].observe(times.delivered - times.submitted)
        histograms["request_prompt_tokens"].observe(usage.prompt_tokens)
        histograms["request_tokenize_time_seconds"].observe(times.tokenized - times.received)
        self.num_vectors += completion.vector is not None
        if completion.vector is None:
            histograms["request_generation_tokens"].observe(usage.completion_tokens)
        span = computed(times)
        if span is None:
            return
        first, last = span
        histograms["request_queue_time_seconds"].observe(times.admitted - times.tokenized)
        histograms["request_prefill_time_seconds"].observe(first - times.admitted)
        histograms["request_inference_time_seconds"].observe(last - times.admitted)
        histograms["request_detokenize_time_seconds"].observe(times.detokenized - last)
        histograms["request_delivery_time_seconds"].observe(times.delivered - times.detokenized)
        if not times.token_times:
            return
        histograms["time_to_first_token_seconds"].observe(first - times.submitted)
        histograms["request_decode_time_seconds"].observe(last - first)
        if len(times.token_times) > 1:
            per_token = (last - first) / (len(times.token_times) - 1)
            histograms["request_time_per_output_token_seconds"].observe(per_token)
        latencies = histograms["inter_token_latency_seconds"]
        for earlier, later in pairwise(times.token_times):
            latencies.observe(later - earlier)


PROCESS = "http_proc"
MAX_KEPT_BYTES = 16 * 1024 * 1024  # of the gateway's part of the traces of ended web requests
OVERHEAD_BYTES = 1024  # of one of them, for its summary, its names and its places

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RequestTrace).decode


class RequestSummary(msgspec.Struct):
    """A web request in the list of the recent ones. Times are in seconds.

    id: of the answer. request_id: the X-Request-Id. tenant: with its user; "" without tenants.
    began_at: Unix seconds. seconds: until the client had the answer; of one that runs until now.
    status: null while it is not known. code: of its error. queue_s, prefill_s, decode_s: of the
    choice that ended last; null where it has no such time. generated_tokens: of all choices. model:
    only of a server with several. vectors: number of texts that were answered with numbers;
    prompt_tokens is then that of all, queue_s until the first one was admitted, and prefill_s from
    then on until the last vector.
    """

    id: str
    request_id: str
    route: str
    tenant: str
    began_at: float
    seconds: float
    is_running: bool
    status: int | None = None
    code: str = ""
    finish_reason: str = ""
    choices: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    queue_s: float | None = None
    prefill_s: float | None = None
    first_token_s: float | None = None
    decode_s: float | None = None
    vectors: int = 0
    model: str | msgspec.UnsetType = msgspec.UNSET


@dataclass(slots=True)
class WebTrace:
    """The trace of a web request.

    Attributes:
        began_at: Unix seconds.
        record: of the request; None when it has ended.
        server_requests: its requests to the server: the client, and the id.
        tenant: name of its tenant, with its user; "" without tenants.
        data: the gateway's spans, encoded, when the request has ended.
        summary: what the list of recent requests has, when the request has ended.
    """

    context: TraceContext
    began_at: float
    record: CallRecord | None
    server_requests: list[tuple[AsyncClient, str]] = field(default_factory=list)
    tenant: str = ""
    data: bytes = b""
    summary: RequestSummary | None = None

    @property
    def traceparent(self) -> str:
        """The header `traceparent` of the requests that this one causes."""
        return traceparent_of(self.context)

    @property
    def server_ids(self) -> list[str]:
        """Ids of its requests to the server, which the live feed shows."""
        return [request_id for _, request_id in self.server_requests]


_current: ContextVar[WebTrace | None] = ContextVar("trace", default=None)


def current_trace() -> WebTrace | None:
    """Return the trace of the web request that this task answers; None: it is not traced."""
    return _current.get()


@contextmanager
def as_current(trace: WebTrace) -> Iterator[None]:
    """Make a trace the current one for a `with` block."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)


class WebTraces:
    """Decide which web requests are traced, and keep their traces for a while.

    Args:
        args: the flags of traces.
        exporter: gets the gateway's spans of sampled requests.
    """

    def __init__(self, args: TraceArgs, exporter: Exporter) -> None:
        self._sampling = HeadSampling(args.sampling_ratio, args.keep_traces == "all")
        self._exporter = exporter
        self._open: dict[str, WebTrace] = {}  # by the id of the span
        self._kept: OrderedDict[str, WebTrace] = OrderedDict()  # in the order in which they ended
        self._by_name: dict[str, WebTrace] = {}
        self._num_bytes = 0

    def begin(self, traceparent: str, record: CallRecord) -> WebTrace | None:
        """Return a trace for a web request that begins; None: it is not traced."""
        if not traceparent and self._sampling.is_off:
            return None
        context = self._sampling.context(traceparent)
        if context is None:
            return None
        trace = self._open[context.span_id] = WebTrace(context, clock.now(), record)
        return trace

    def finish(self, trace: WebTrace, record: CallRecord) -> RequestTrace:
        """Keep the trace of a web request that has ended, and return the gateway's part of it."""
        self._open.pop(trace.context.span_id, None)
        own = RequestTrace(
            trace.context,
            record.route,
            record.id or record.request_id,
            0,
            _spans(trace.began_at, record),
            _attributes(record, trace.tenant),
            record.error,
        )
        trace.data = _encode(own)
        trace.summary = _summary(trace, record, own.ended_at)
        trace.record = None
        self._keep(trace)
        return own

    def export(self, trace: RequestTrace) -> None:
        """Export a trace."""
        self._exporter.put(_encode(trace))

    def _keep(self, trace: WebTrace) -> None:
        """Keep a trace that has ended, and forget the oldest ones beyond the bound."""
        self._kept[trace.context.span_id] = trace
        self._num_bytes += _kept_bytes(trace)
        for name in _names(trace):
            self._by_name[name] = trace
        while self._num_bytes > MAX_KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= _kept_bytes(oldest)
            for name in _names(oldest):
                if self._by_name.get(name) is oldest:
                    del self._by_name[name]

    def find(self, name: str, tenant: str) -> WebTrace | None:
        """Return the trace of an ended request by the id of its answer, or another of its ids.

        tenant: which asks; it finds only its own requests.
        """
        trace = self._by_name.get(name)
        if trace is None or not _is_of(trace, tenant):
            return None
        return trace

    def recent(self, tenant: str, since: float) -> list[RequestSummary]:
        """Return the traced requests to the server that run, or that began after `since`.

        tenant: which asks; it finds only its own requests.
        """
        now = clock.now()
        running = [
            _summary(trace, trace.record, now, is_running=True)
            for trace in self._open.values()
            if trace.server_requests and trace.record is not None and _is_of(trace, tenant)
        ]
        ended = [
            trace.summary
            for trace in self._kept.values()
            if trace.server_requests
            and trace.summary is not None
            and trace.began_at >= since
            and _is_of(trace, tenant)
        ]
        return running + ended

    def is_open(self, request_id: str) -> bool:
        """Return whether a traced web request is being answered that has this id at the server."""
        return any(request_id in trace.server_ids for trace in self._open.values())

    def info(self) -> dict[str, int]:
        """Return the counters of the exporter; empty if nothing is exported."""
        return self._exporter.info()

    def close(self) -> None:
        """Export what is left."""
        self._exporter.close()


def _is_of(trace: WebTrace, tenant: str) -> bool:
    """Return whether a tenant may see a trace; "" for all tenants."""
    return not tenant or parent_name(trace.tenant) == tenant


def _names(trace: WebTrace) -> set[str]:
    """Return the ids by which a trace that has ended is found."""
    assert trace.summary is not None
    return {trace.summary.id, trace.summary.request_id, *trace.server_ids} - {""}


def _kept_bytes(trace: WebTrace) -> int:
    """Return the memory that a trace that has ended takes."""
    return len(trace.data) + OVERHEAD_BYTES + 256 * len(trace.server_requests)


def _summary(
    trace: WebTrace, record: CallRecord, until: float, *, is_running: bool = False
) -> RequestSummary:
    """Return what the list shows of a request, which runs or has ended at Unix time `until`."""
    summary = RequestSummary(
        record.id,
        record.request_id,
        record.route,
        trace.tenant,
        trace.began_at,
        max(0.0, until - trace.began_at),
        is_running,
        record.status,
        record.code,
        model=record.model or msgspec.UNSET,
    )
    if record.completions:
        completions = record.completions
        last = max(completions, key=lambda completion: completion.timings.delivered)
        times = last.timings
        summary.finish_reason = last.finish_reason
        summary.choices = len(completions)
        counts = num_prompt_tokens(completions, last)
        summary.prompt_tokens, summary.cached_tokens = counts
        summary.generated_tokens = sum(c.usage.completion_tokens for c in completions)
        summary.vectors = num_vectors(completions)
        if summary.vectors:
            _take_times_of_texts(summary, [completion.timings for completion in completions])
        elif span := computed(times):
            first, end = span
            summary.queue_s = times.admitted - times.tokenized
            summary.prefill_s = first - times.admitted
            if times.token_times:
                summary.first_token_s = first - trace.began_at
                summary.decode_s = end - first
    return summary


def _take_times_of_texts(summary: RequestSummary, times: Sequence[Timings]) -> None:
    """Take the times of texts that are answered with numbers, a few of them at one time."""
    admitted = [each.admitted for each in times if each.admitted]
    ends = [span[1] for span in map(computed, times) if span]
    if admitted and ends:
        summary.queue_s = max(0.0, min(admitted) - min(each.tokenized for each in times))
        summary.prefill_s = max(0.0, max(ends) - min(admitted))


def _attributes(record: CallRecord, tenant: str) -> Attributes:
    attributes: Attributes = {
        "http.request.method": record.method,
        "http.route": record.route,
        "quadriga.choices": len(record.completions),
    }
    if record.status is not None:
        attributes["http.response.status_code"] = record.status
    if record.code:
        attributes["error.type"] = record.code
    if tenant:
        attributes["quadriga.tenant"] = tenant
    if record.model:
        attributes["gen_ai.response.model"] = record.model
    return attributes | {"gen_ai.request.id": record.id or record.request_id}


def _spans(began_at: float, record: CallRecord) -> list[Span]:
    """Return the gateway's spans: until the request is sent, and from the server's last text."""
    now = max(began_at, clock.now())
    times = [completion.timings for completion in record.completions]
    received = [time.received for time in times if time.received]
    ended = [time.detokenized for time in times if time.detokenized]
    if not received or not ended:
        return [Span("http", PROCESS, began_at, now)]
    received_at, ended_at = max(began_at, min(received)), min(now, max(ended))
    return [
        Span("receive", PROCESS, began_at, received_at),
        Span("deliver", PROCESS, ended_at, now),
    ]


async def all_traces(trace: WebTrace) -> Sequence[RequestTrace]:
    """Return the traces of a web request: the gateway's, and those of the server.

    Raises:
        QuadrigaError: the server does not answer.
    """
    traces = [_decode(trace.data)]
    requests = trace.server_requests
    for client in {client: None for client, _ in requests}:
        ids = [request_id for sent_by, request_id in requests if sent_by is client]
        for first in range(0, len(ids), MAX_TRACE_IDS):
            traces += await client.traces(ids[first : first + MAX_TRACE_IDS])
    return traces


MAX_RECENT_CHOICES = 4096
# Generated by the choices of one simulation, whose time grows with them.
MAX_RECENT_TOKENS = 40_000


class RecentChoices:
    """The choices of one model that this gateway has answered last."""

    def __init__(self) -> None:
        self._choices: deque[MeasuredChoice] = deque(maxlen=MAX_RECENT_CHOICES)

    def add(self, completion: Completion, priority: int, tenant: str) -> None:
        """Keep a choice that has tokens."""
        times, usage = completion.timings, completion.usage
        if not times.token_times or not usage.prompt_tokens or not usage.completion_tokens:
            return
        self._choices.append(
            MeasuredChoice(
                times.received,
                times.tokenized,
                times.admitted,
                times.token_times[0],
                times.token_times[-1],
                times.detokenized,
                usage.prompt_tokens,
                usage.cached_tokens,
                len(times.token_times),
                priority,
                tenant,
                adapter=completion.adapter,
            )
        )

    def since(self, begin: float) -> list[MeasuredChoice]:
        """Return the choices that arrived after a Unix time, by arrival.

        They are the last ones, where all together have more than MAX_RECENT_TOKENS.
        """
        found = sorted(
            (choice for choice in self._choices if choice.received_at >= begin),
            key=lambda choice: choice.received_at,
        )
        num_tokens = 0
        for place in range(len(found) - 1, -1, -1):
            num_tokens += found[place].num_generated_tokens
            if num_tokens > MAX_RECENT_TOKENS and place + 1 < len(found):
                return found[place + 1 :]
        return found
