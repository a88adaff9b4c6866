"""A stand-in for an OpenTelemetry collector, which checks what it is sent.

A body must be an ExportTraceServiceRequest of opentelemetry-proto. Spans are kept as OTLP's JSON
(https://opentelemetry.io/docs/specs/otlp/#json-protobuf), whose ids are hexadecimal digits.
"""

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

ID_BYTES = {"traceId": 16, "spanId": 8, "parentSpanId": 8}
NANOSECONDS_OF_2020 = 1_577_836_800 * 10**9


def spans_of(data: bytes) -> list[dict[str, Any]]:
    """Check a body, and return its spans as OTLP's JSON, each with the name of its process.

    Raises:
        AssertionError, DecodeError: a collector would not understand it.
    """
    request = ExportTraceServiceRequest.FromString(data)
    spans = []
    for resource in request.resource_spans:
        process = attributes_of(as_json(resource.resource))["quadriga.process"]
        for scope in resource.scope_spans:
            assert scope.scope.name
            for span in scope.spans:
                check_span(span)
                spans.append({**with_hex(as_json(span)), "process": process})
    return spans


def as_json(message: Message) -> dict[str, Any]:
    return json_format.MessageToDict(message, use_integers_for_enums=True)


def with_hex(span: dict[str, Any]) -> dict[str, Any]:
    """Return a span with its ids as hexadecimal digits, in place of protobuf's base64."""
    ids = {key: base64.b64decode(span[key]) for key in ID_BYTES if key in span}
    assert all(len(value) == ID_BYTES[key] for key, value in ids.items())
    return span | {key: value.hex() for key, value in ids.items()}


def check_span(span: Span) -> None:
    assert span.name
    assert any(span.trace_id)
    assert any(span.span_id)
    assert span.kind in (Span.SPAN_KIND_INTERNAL, Span.SPAN_KIND_SERVER)
    assert NANOSECONDS_OF_2020 < span.start_time_unix_nano <= span.end_time_unix_nano
    for event in span.events:
        assert event.name
        assert event.time_unix_nano > NANOSECONDS_OF_2020


def attributes_of(holder: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a span, an event or a resource."""
    values: dict[str, Any] = {}
    for attribute in holder["attributes"]:
        ((kind, value),) = attribute["value"].items()
        values[attribute["key"]] = _value(kind, value)
    return values


def _value(kind: str, value: Any) -> Any:
    if kind == "arrayValue":
        return [item for each in value["values"] for item in each.values()]
    return int(value) if kind == "intValue" else value


@dataclass
class Collector:
    """What a collector has got.

    Attributes:
        statuses: of the next answers; then 200.
        headers: of the last request, by their names in lower case.
        problem: why a request was not valid.
    """

    url: str = ""
    spans: list[dict[str, Any]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    paths: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, num_spans: int, timeout_s: float = 30.0) -> list[dict[str, Any]]:
        """Return the spans when there are so many."""
        with self.changed:
            ok = self.changed.wait_for(
                lambda: len(self.spans) >= num_spans or self.problem, timeout_s
            )
        assert not self.problem, self.problem
        assert ok, f"{len(self.spans)} of {num_spans} spans came"
        return self.spans

    def of_trace(self, trace_id: str, names: set[str], timeout_s: float = 30.0) -> list[Any]:
        """Return the spans of a trace when spans of all these names are there."""

        def found() -> list[dict[str, Any]]:
            return [span for span in self.spans if span["traceId"] == trace_id]

        with self.changed:
            self.changed.wait_for(
                lambda: names <= {span["name"] for span in found()} or self.problem, timeout_s
            )
        assert not self.problem, self.problem
        assert names <= {span["name"] for span in found()}
        return found()

    def take(self, path: str, headers: dict[str, str], data: bytes) -> int:
        """Take in a request. Return the status of its answer."""
        with self.changed:
            self.paths.append(path)
            self.headers = headers
            status = self.statuses.pop(0) if self.statuses else 200
            if status == 200:
                try:
                    assert headers["content-type"] == "application/x-protobuf"
                    self.spans += spans_of(data)
                except (AssertionError, DecodeError) as error:
                    self.problem, status = str(error), 400
            self.changed.notify_all()
        return status


@contextmanager
def running_collector() -> Iterator[Collector]:
    """Yield a collector that listens."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status = collector.take(self.path, headers, data)
            answer = b"" if status == 200 else b"not now"
            self.send_response(status)
            if status != 200:
                self.send_header("Retry-After", "0.01")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
