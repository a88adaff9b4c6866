"""The gateway's part of a trace: a span for each web request, around those of the ring."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import msgspec

from http_proc.observe.request_log import RequestLogRecord
from quadriga import clock
from quadriga.client.async_client import AsyncClient
from quadriga.config.trace_args import TraceArgs
from quadriga.tenants.tenant import parent_name
from quadriga.tracing.context import HeadSampling, traceparent_of
from quadriga.tracing.exporter import NoExporter
from quadriga.wire.messages.from_client import MAX_TRACE_IDS
from quadriga.wire.messages.trace import Attributes, RequestTrace, Span, TraceContext

PROCESS = "http_proc"
MAX_KEPT = 24_576  # names of ended web requests, which have three or more

_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class WebTrace:
    """The trace of a web request.

    Attributes:
        began_at: Unix seconds.
        ring_requests: its requests to the ring: the client, and the id.
        tenant: name of its tenant, with its user; "" without tenants.
        trace: the gateway's spans, when the request has ended.
    """

    context: TraceContext
    began_at: float
    ring_requests: list[tuple[AsyncClient, str]] = field(default_factory=list)
    tenant: str = ""
    trace: RequestTrace | None = None

    @property
    def traceparent(self) -> str:
        """The header `traceparent` of the requests that this one causes."""
        return traceparent_of(self.context)

    @property
    def ring_ids(self) -> list[str]:
        """Ids of its requests to the ring, which the live feed shows."""
        return [request_id for _, request_id in self.ring_requests]


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

    def __init__(self, args: TraceArgs, exporter: NoExporter) -> None:
        self._sampling = HeadSampling(args.sampling_ratio, args.keep_traces == "all")
        self._exporter = exporter
        self._open: dict[str, WebTrace] = {}  # by the id of the span
        self._kept: OrderedDict[str, WebTrace] = OrderedDict()

    def begin(self, traceparent: str) -> WebTrace | None:
        """Return a trace for a web request that begins; None: it is not traced."""
        if not traceparent and self._sampling.is_off:
            return None
        context = self._sampling.context(traceparent)
        if context is None:
            return None
        trace = self._open[context.span_id] = WebTrace(context, clock.now())
        return trace

    def finish(self, trace: WebTrace, record: RequestLogRecord, attributes: Attributes) -> None:
        """Keep and export the trace of a web request that has ended."""
        self._open.pop(trace.context.span_id, None)
        trace.trace = RequestTrace(
            trace.context,
            str(attributes["http.route"]),
            record.id or record.request_id,
            0,
            _spans(trace.began_at, record),
            attributes | {"gen_ai.request.id": record.id or record.request_id},
            record.error,
        )
        for name in {record.id, record.request_id, *trace.ring_ids} - {""}:
            self._kept[name] = trace
            self._kept.move_to_end(name)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        if trace.context.sampled:
            self._exporter.put(_encode(trace.trace))

    def find(self, name: str, tenant: str) -> WebTrace | None:
        """Return the trace of an ended request by the id of its answer, or another of its ids.

        tenant: which asks; it finds only its own requests.
        """
        trace = self._kept.get(name)
        if trace is None or (tenant and parent_name(trace.tenant) != tenant):
            return None
        return trace

    def is_open(self, ring_id: str) -> bool:
        """Return whether a traced web request is being answered that has this id at the ring."""
        return any(ring_id in trace.ring_ids for trace in self._open.values())

    def info(self) -> dict[str, int]:
        """Return the counters of the exporter; empty if nothing is exported."""
        return self._exporter.info()

    def close(self) -> None:
        """Export what is left."""
        self._exporter.close()


def _spans(began_at: float, record: RequestLogRecord) -> list[Span]:
    """Return the gateway's spans: until the ring has the request, and from the ring's last text."""
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
    """Return the traces of a web request: the gateway's, and those of the ring.

    Raises:
        QuadrigaError: the ring does not answer.
    """
    assert trace.trace is not None
    traces = [trace.trace]
    requests = trace.ring_requests
    for ring in {ring: None for ring, _ in requests}:
        ids = [request_id for client, request_id in requests if client is ring]
        for first in range(0, len(ids), MAX_TRACE_IDS):
            traces += await ring.traces(ids[first : first + MAX_TRACE_IDS])
    return traces
