"""A stand-in for an OpenTelemetry collector, which checks what it is sent.

A body must be an ExportTraceServiceRequest of opentelemetry-proto in OTLP's form of JSON, in which
ids are hexadecimal digits and not base64 (https://opentelemetry.io/docs/specs/otlp/#json-protobuf).
"""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

ID_BYTES = {"traceId": 16, "spanId": 8, "parentSpanId": 8}
NANOSECONDS_OF_2020 = 1_577_836_800 * 10**9


def spans_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Check a body, and return its spans, each with the name of its process."""
    check(body)
    spans = []
    for resource in body["resourceSpans"]:
        process = attributes_of(resource["resource"])["quadriga.process"]
        for scope in resource["scopeSpans"]:
            spans += [{**span, "process": process} for span in scope["spans"]]
    return spans


def check(body: dict[str, Any]) -> None:
    """Raise AssertionError or ParseError for a body that a collector would not understand."""
    request = ExportTraceServiceRequest()
    json_format.ParseDict(with_base64(body), request)
    assert json_format.MessageToDict(request) == without_defaults(with_base64(body))
    for resource in request.resource_spans:
        assert resource.resource.attributes
        for scope in resource.scope_spans:
            assert scope.scope.name
            for span in scope.spans:
                check_span(span)


def check_span(span: Span) -> None:
    assert span.name
    assert any(span.trace_id)
    assert any(span.span_id)
    assert span.kind in (Span.SPAN_KIND_INTERNAL, Span.SPAN_KIND_SERVER)
    assert NANOSECONDS_OF_2020 < span.start_time_unix_nano <= span.end_time_unix_nano
    for event in span.events:
        assert event.name
        assert event.time_unix_nano > NANOSECONDS_OF_2020


def with_base64(value: Any) -> Any:
    """Return a body with its ids in base64, as protobuf's own form of JSON has them."""
    if isinstance(value, list):
        return [with_base64(item) for item in value]
    if not isinstance(value, dict):
        return value
    result = {key: with_base64(item) for key, item in value.items()}
    for key, size in ID_BYTES.items():
        if key in result:
            data = bytes.fromhex(result[key])
            assert len(data) == size
            result[key] = base64.b64encode(data).decode()
    return result


def without_defaults(value: Any) -> Any:
    """Return a body as protobuf writes it: without empty lists, and enums by name."""
    if isinstance(value, list):
        return [without_defaults(item) for item in value]
    if not isinstance(value, dict):
        return value
    result = {key: without_defaults(item) for key, item in value.items() if item != []}
    if "kind" in result:
        result["kind"] = Span.SpanKind.Name(result["kind"])
    if "code" in result:
        result["code"] = {1: "STATUS_CODE_OK", 2: "STATUS_CODE_ERROR"}[result["code"]]
    return result


def attributes_of(holder: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a span, an event or a resource."""
    values: dict[str, Any] = {}
    for attribute in holder["attributes"]:
        ((kind, value),) = attribute["value"].items()
        values[attribute["key"]] = int(value) if kind == "intValue" else value
    return values


@dataclass
class Collector:
    """What a collector has got.

    Attributes:
        statuses: of the next answers; then 200.
        headers: of the last request.
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
                    assert headers["Content-Type"] == "application/json"
                    self.spans += spans_of(json.loads(data))
                except (AssertionError, ValueError, json_format.ParseError) as error:
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
            status = collector.take(self.path, dict(self.headers), data)
            answer = b"{}" if status == 200 else b"not now"
            self.send_response(status)
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
