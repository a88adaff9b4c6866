"""Export traces to an OpenTelemetry collector, with the queue and the exporter of its SDK.

A request's spans are known at its end, when its RequestTrace arrives, so no tracer of the SDK runs:
the traces wait as bytes in its batch processor, whose thread makes spans of them and sends them.
"""

import hashlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit, urlunsplit

import msgspec
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from quadriga import __version__
from quadriga.server.processes.logs import in_a_line
from quadriga.server.tracing.gen_ai import FINISH_REASONS, ExportedTrace
from quadriga.wire.trace import RequestTrace, Span, TraceContext

TRACES_PATH = "/v1/traces"
MAX_WAITING = 4096  # traces that wait for the collector
MAX_BATCH = 128  # traces of one request to it
BATCH_DELAY_S = 0.5  # traces that end within this time are sent together
TIMEOUT_S = 20.0  # of a batch with its repeats, which the SDK makes after 1, 2, 4 and 8 s
CLOSE_TIMEOUT_S = 2.0
MAX_REASON_CHARS = 200
SCOPE = InstrumentationScope("quadriga", __version__)
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
SDK_LOGGER = logging.getLogger("opentelemetry.exporter.otlp")

_decode = msgspec.msgpack.Decoder(ExportedTrace).decode


class OtlpExporter:
    """Export traces by OTLP over HTTP.

    A collector that is slow or gone never delays a request: what does not fit into the queue is
    counted and dropped.

    Args:
        url: URL of the collector; without a path, /v1/traces is added.
        resource: attributes of the server.
    """

    def __init__(self, url: str, resource: Mapping[str, str]) -> None:
        self._sender = _Sender(url, resource)
        self._processor = BatchSpanProcessor(
            self._sender,
            max_queue_size=MAX_WAITING,
            schedule_delay_millis=1000 * BATCH_DELAY_S,
            max_export_batch_size=min(MAX_BATCH, MAX_WAITING),
        )
        self._num_put = self._num_refused = 0

    def put(self, trace: bytes) -> None:
        """Export an encoded RequestTrace, or drop it where too many wait."""
        if self._num_put - self._sender.num_taken < MAX_WAITING:
            self._num_put += 1
            self._processor.on_end(_WaitingTrace(trace))
        else:
            self._num_refused += 1

    def info(self) -> dict[str, int]:
        """Return how many traces were exported, and how many dropped."""
        num_dropped = self._num_refused + self._sender.num_failed
        return {"traces_exported": self._sender.num_exported, "traces_dropped": num_dropped}

    def close(self) -> None:
        """Export what waits, within CLOSE_TIMEOUT_S."""
        end = threading.Thread(target=self._processor.shutdown, name="OTLP end", daemon=True)
        end.start()
        end.join(CLOSE_TIMEOUT_S)
        self._sender.shutdown()


class _WaitingTrace(ReadableSpan):
    """A trace in the SDK's queue of spans, encoded, since its spans would take more memory."""

    def __init__(self, data: bytes) -> None:
        super().__init__("", SpanContext(1, 1, False, SAMPLED), resource=Resource({}))
        self.data = data


class _Sender(SpanExporter):
    """Send batches of traces by the SDK's exporter, count them, and log when they fail.

    The SDK repeats a batch where that may help, and logs each failure; the first one in a row is
    logged here, with what becomes of the traces.

    Attributes:
        num_taken: traces that left the queue.
        num_exported, num_failed: traces that the collector has taken, and that it has not.
    """

    def __init__(self, url: str, resource: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        parts = parts._replace(path=TRACES_PATH if parts.path in ("", "/") else parts.path)
        self._name = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        self._exporter = OTLPSpanExporter(urlunsplit(parts), timeout=TIMEOUT_S)
        self._resource = resource
        self._has_failed = self._is_closed = False
        self.num_taken = self.num_exported = self.num_failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch of waiting traces."""
        self.num_taken += len(spans)
        traces = [_decode(trace.data) for trace in spans if isinstance(trace, _WaitingTrace)]
        _exporting.sender = self
        result = self._exporter.export(
            [span for trace in traces for span in spans_of(trace, self._resource)]
        )
        if result is not SpanExportResult.SUCCESS:
            self.num_failed += len(traces)
            return result
        self.num_exported += len(traces)
        if self._has_failed:
            logging.info("the OTLP collector %s takes traces again", self._name)
        self._has_failed = False
        return result

    def shutdown(self) -> None:
        """End a batch that waits to be repeated, and send no further one."""
        if not self._is_closed:
            self._is_closed = True
            self._exporter.shutdown()

    def report(self, problem: str) -> None:
        """Log the first failure of several."""
        if not self._has_failed and not self._is_closed:
            logging.warning(
                "the OTLP collector %s does not take traces (%s); up to %d wait for it, further"
                " ones are dropped and counted in otlp_traces_dropped",
                self._name,
                in_a_line(problem, MAX_REASON_CHARS),
                MAX_WAITING,
            )
        self._has_failed = True


class _Exporting(threading.local):
    """The sender that exports in this thread."""

    sender: _Sender | None = None


_exporting = _Exporting()


class _Problems(logging.Handler):
    """Hand what the SDK's exporter logs to the sender that exports in the thread."""

    def emit(self, record: logging.LogRecord) -> None:
        """Hand on a message."""
        if _exporting.sender is not None:
            _exporting.sender.report(record.getMessage())


SDK_LOGGER.addHandler(_Problems())
SDK_LOGGER.propagate = False


# --- spans ----------------------------------------------------------------------------------------


def spans_of(trace: RequestTrace, resource: Mapping[str, str]) -> Iterator[ReadableSpan]:
    """Yield the spans of a trace: first the request's own, then the ones within it.

    Args:
        trace: trace of one choice of a request.
        resource: attributes of the server, to which those of each process are added.
    """
    context, own_id = trace.context, _own_id(trace)
    own = Span(trace.name, trace.spans[0].process, trace.began_at, trace.ended_at, trace.attributes)
    status = Status(StatusCode.ERROR, trace.error) if trace.error else Status(StatusCode.OK)
    parent = _context(context, context.parent_id, is_remote=True) if context.parent_id else None
    reasons = trace.finish_reasons if isinstance(trace, ExportedTrace) else []
    lists = {FINISH_REASONS: reasons} if reasons else {}
    own_context = _context(context, own_id)
    yield _span(own, own_context, parent, resource, SpanKind.SERVER, status, lists)
    ids = [_derived_id(own_id, number) for number in range(len(trace.spans))]
    for span, span_id in zip(trace.spans, ids, strict=True):
        parent = _context(context, ids[span.parent] if span.parent >= 0 else own_id)
        yield _span(span, _context(context, span_id), parent, resource, SpanKind.INTERNAL)


def _own_id(trace: RequestTrace) -> str:
    """Return the id of the request's own span, which differs between choices."""
    span_id = trace.context.span_id
    return _derived_id(span_id, -trace.index) if trace.index else span_id


def _derived_id(span_id: str, number: int) -> str:
    """Return the id of a span in another: the same if a trace is exported twice."""
    return hashlib.blake2b(f"{span_id}:{number}".encode(), digest_size=8).hexdigest()


def _context(context: TraceContext, span_id: str, is_remote: bool = False) -> SpanContext:
    flags = SAMPLED if context.sampled else TraceFlags()
    return SpanContext(int(context.trace_id, 16), int(span_id, 16), is_remote, flags)


def _span(
    span: Span,
    context: SpanContext,
    parent: SpanContext | None,
    resource: Mapping[str, str],
    kind: SpanKind,
    status: Status = Status(StatusCode.UNSET),  # noqa: B008 - never changed
    lists: Mapping[str, Sequence[str]] = {},
) -> ReadableSpan:
    return ReadableSpan(
        span.name,
        context,
        parent,
        Resource({**resource, "quadriga.process": span.process}),
        {**span.attributes, **lists},
        [Event(event.name, event.attributes, _nanoseconds(event.at)) for event in span.events],
        kind=kind,
        status=status,
        start_time=_nanoseconds(span.began_at),
        end_time=_nanoseconds(span.ended_at),
        instrumentation_scope=SCOPE,
    )


def _nanoseconds(unix_s: float) -> int:
    return int(unix_s * 1e6) * 1000  # a float has no more than microseconds
