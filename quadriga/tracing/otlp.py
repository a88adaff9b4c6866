"""Traces as OTLP in JSON (https://opentelemetry.io/docs/specs/otlp/, ExportTraceServiceRequest)."""

import hashlib
from collections.abc import Iterable
from typing import Any

from quadriga import __version__
from quadriga.wire.messages.trace import (
    Attributes,
    AttributeValue,
    RequestTrace,
    Span,
    TraceContext,
)

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
