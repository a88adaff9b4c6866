"""Send traces to an OpenTelemetry collector, as OTLP in JSON, in a thread of its own.

First the request (https://opentelemetry.io/docs/specs/otlp/, ExportTraceServiceRequest), then the
exporter.
"""

import hashlib
import http.client
import logging
import os
import queue
import threading
from collections.abc import Iterable
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import msgspec

from quadriga import __version__
from quadriga.server.config.frontend_args import TraceArgs
from quadriga.server.processes.logs import in_a_line
from quadriga.wire.trace import (
    Attributes,
    AttributeValue,
    RequestTrace,
    Span,
    TraceContext,
)

# Traces as OTLP in JSON (https://opentelemetry.io/docs/specs/otlp/, ExportTraceServiceRequest).

INTERNAL, SERVER = 1, 2  # kinds of spans
OK, ERROR = 1, 2  # status codes
SCOPE = {"name": "quadriga", "version": __version__}


def export_request(traces: Iterable[RequestTrace], resource: Attributes) -> dict[str, Any]:
    """Return the body of a request to a collector."""
    by_process: dict[str, list[dict[str, Any]]] = {}
    for trace in traces:
        for process, span in _spans(trace):
            by_process.setdefault(process, []).append(span)
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(resource | {"quadriga.process": process})},
                "scopeSpans": [{"scope": SCOPE, "spans": spans}],
            }
            for process, spans in by_process.items()
        ]
    }


def _spans(trace: RequestTrace) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yield process and span of a trace: first the request's own, then the ones within it."""
    context, own_id = trace.context, _own_id(trace)
    own = Span(trace.name, trace.spans[0].process, trace.began_at, trace.ended_at, trace.attributes)
    yield own.process, _span(context, own, own_id, context.parent_id, SERVER) | _status(trace)
    ids = [_derived_id(own_id, number) for number in range(len(trace.spans))]
    for span, span_id in zip(trace.spans, ids, strict=True):
        parent_id = ids[span.parent] if span.parent >= 0 else own_id
        yield span.process, _span(context, span, span_id, parent_id, INTERNAL)


def _own_id(trace: RequestTrace) -> str:
    """Return the id of the request's own span, which differs between choices."""
    return (
        _derived_id(trace.context.span_id, -trace.index) if trace.index else (trace.context.span_id)
    )


def _derived_id(span_id: str, number: int) -> str:
    """Return the id of a span in another: the same if a trace is exported twice."""
    return hashlib.blake2b(f"{span_id}:{number}".encode(), digest_size=8).hexdigest()


def _span(
    context: TraceContext, span: Span, span_id: str, parent_id: str, kind: int
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "traceId": context.trace_id,
        "spanId": span_id,
        "name": span.name,
        "kind": kind,
        "startTimeUnixNano": _nanoseconds(span.began_at),
        "endTimeUnixNano": _nanoseconds(span.ended_at),
        "attributes": _attributes(span.attributes),
        "events": [
            {
                "name": event.name,
                "timeUnixNano": _nanoseconds(event.at),
                "attributes": _attributes(event.attributes),
            }
            for event in span.events
        ],
    }
    return body | ({"parentSpanId": parent_id} if parent_id else {})


def _status(trace: RequestTrace) -> dict[str, Any]:
    if trace.error:
        return {"status": {"code": ERROR, "message": trace.error}}
    return {"status": {"code": OK}}


def _attributes(attributes: Attributes) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: AttributeValue) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}  # 64-bit numbers are strings in protobuf's JSON
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}


def _nanoseconds(unix_s: float) -> str:
    return str(int(unix_s * 1e6) * 1000)  # a float has no more than microseconds


# Send traces to an OpenTelemetry collector, in a thread of its own.
#
# A collector that is slow or gone never delays a request: traces wait in a bounded queue, and
# what does not fit is counted and dropped.

TRACES_PATH = "/v1/traces"
HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
SERVICE_NAME_VARIABLE = "OTEL_SERVICE_NAME"
MAX_WAITING = 4096  # traces that wait for the collector
MAX_BATCH = 128  # traces of one request to it
BATCH_DELAY_S = 0.5  # traces that end within this time are sent together
TIMEOUT_S = 10.0
RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0)  # then a batch is dropped
CLOSE_TIMEOUT_S = 2.0
MAX_REASON_CHARS = 200
RETRYABLE = frozenset({429, 502, 503, 504})

_encode = msgspec.json.Encoder().encode
_decode = msgspec.msgpack.Decoder(RequestTrace).decode


class Exporter(Protocol):
    """Where the traces of requests go."""

    def put(self, trace: bytes) -> None:
        """Export an encoded RequestTrace."""

    def info(self) -> dict[str, int]:
        """Return the counters."""

    def close(self) -> None:
        """Export what waits, if the collector takes it soon."""


class NoExporter:
    """Export nothing."""

    def put(self, trace: bytes) -> None:
        """Do nothing."""

    def info(self) -> dict[str, int]:
        """Return no counter."""
        return {}

    def close(self) -> None:
        """Do nothing."""


class CollectorError(Exception):
    """The collector has not taken a batch. `is_final`: nor will it, if it is sent again."""

    def __init__(self, reason: str, is_final: bool) -> None:
        super().__init__(reason)
        self.is_final = is_final


class OtlpExporter:
    """Export traces by OTLP over HTTP, as JSON.

    Args:
        url: of the collector; without a path, /v1/traces is added.
        resource: attributes of the server.
    """

    def __init__(self, url: str, resource: Attributes) -> None:
        self._collector = _Collector(url, _headers(os.environ.get(HEADERS_VARIABLE, "")))
        self._resource = resource
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._has_failed = False
        self._num_exported = self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="OTLP exporter", daemon=True)
        self._thread.start()

    def put(self, trace: bytes) -> None:
        """Export an encoded RequestTrace, or drop it where too many wait."""
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put(trace)
        else:
            self._num_dropped += 1

    def info(self) -> dict[str, int]:
        """Return how many traces were exported, and how many dropped."""
        return {"traces_exported": self._num_exported, "traces_dropped": self._num_dropped}

    def close(self) -> None:
        """Export what waits, within CLOSE_TIMEOUT_S."""
        self._is_closing.set()
        self._waiting.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = [self._waiting.get()]
            if batch[0] is not None:
                self._is_closing.wait(BATCH_DELAY_S)
            while len(batch) < MAX_BATCH and not self._waiting.empty():
                batch.append(self._waiting.get())
            traces = [_decode(data) for data in batch if data is not None]
            is_open = len(traces) == len(batch)
            if traces:
                self._export(traces)
        self._collector.close()

    def _export(self, traces: list[RequestTrace]) -> None:
        """Send a batch, again after a while where that may help; else drop it."""
        body = _encode(export_request(traces, self._resource))
        for delay_s in (*RETRY_DELAYS_S, None):
            try:
                self._collector.post(body)
            except CollectorError as error:
                self._report(error)
                if delay_s is None or error.is_final or self._is_closing.wait(delay_s):
                    self._num_dropped += len(traces)
                    return
            else:
                self._num_exported += len(traces)
                if self._has_failed:
                    logging.info("the OTLP collector %s takes traces again", self._collector.name)
                self._has_failed = False
                return

    def _report(self, error: CollectorError) -> None:
        """Log the first failure of several."""
        if not self._has_failed:
            logging.warning(
                "the OTLP collector %s does not take traces (%s); up to %d wait for it, further"
                " ones are dropped and counted in otlp_traces_dropped",
                self._collector.name,
                error,
                MAX_WAITING,
            )
        self._has_failed = True


class _Collector:
    """A connection to the collector, which is opened when it is needed."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(url)
        path = TRACES_PATH if parts.path in ("", "/") else parts.path
        self._target = f"{path}?{parts.query}" if parts.query else path
        self._headers = {"Content-Type": "application/json", **headers}
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else (http.client.HTTPConnection)
        )
        self._connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        self.name = f"{parts.scheme}://{parts.hostname}:{self._connection.port}{path}"

    def post(self, body: bytes) -> None:
        """Send a batch. Raise CollectorError if the collector does not take it."""
        was_open = self._connection.sock is not None
        try:
            status, answer = self._send(body)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            if not was_open:
                raise CollectorError(str(error) or type(error).__name__, False) from None
            self.post(body)  # the collector may have closed an idle connection
            return
        if status // 100 != 2:
            text = in_a_line(answer.decode("utf-8", "replace"), MAX_REASON_CHARS)
            raise CollectorError(f"status {status}: {text}", status not in RETRYABLE)

    def _send(self, body: bytes) -> tuple[int, bytes]:
        self._connection.request("POST", self._target, body, self._headers)
        response = self._connection.getresponse()
        return response.status, response.read()

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()


def _headers(text: str) -> dict[str, str]:
    """Return the headers of `name=value,name=value`, whose values are percent-encoded."""
    pairs = (item.partition("=") for item in text.split(",") if "=" in item)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}


def make_exporter(args: TraceArgs, model: str) -> Exporter:
    """Return the exporter that the flags ask for. model: name that clients see."""
    if not args.otlp_endpoint:
        return NoExporter()
    name = os.environ.get(SERVICE_NAME_VARIABLE, "") or "quadriga"
    resource: Attributes = {"service.name": name, "gen_ai.response.model": model}
    return OtlpExporter(args.otlp_endpoint, resource)
