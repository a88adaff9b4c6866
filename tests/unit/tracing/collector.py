"""A stand-in for an OpenTelemetry collector, which checks what it is sent.

The body must be an ExportTraceServiceRequest in the JSON form of protobuf: names of fields, 64-bit
numbers as strings, ids in hexadecimal digits (https://opentelemetry.io/docs/specs/otlp/).
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jsonschema

_NANOSECONDS = {"type": "string", "pattern": "^[0-9]{19}$"}
_SPAN_ID = {"type": "string", "pattern": "^[0-9a-f]{16}$"}


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_VALUE = {
    "oneOf": [
        _object("stringValue", stringValue={"type": "string"}),
        _object("boolValue", boolValue={"type": "boolean"}),
        _object("intValue", intValue={"type": "string", "pattern": "^-?[0-9]+$"}),
        _object("doubleValue", doubleValue={"type": "number"}),
    ]
}
_ATTRIBUTES = _list(_object("key value", key={"type": "string", "minLength": 1}, value=_VALUE))
_EVENT = _object(
    "timeUnixNano name", timeUnixNano=_NANOSECONDS, name={"type": "string"}, attributes=_ATTRIBUTES
)
_SPAN = _object(
    "traceId spanId name kind startTimeUnixNano endTimeUnixNano",
    traceId={"type": "string", "pattern": "^[0-9a-f]{32}$"},
    spanId=_SPAN_ID,
    parentSpanId=_SPAN_ID,
    name={"type": "string", "minLength": 1},
    kind={"enum": [1, 2, 3, 4, 5]},
    startTimeUnixNano=_NANOSECONDS,
    endTimeUnixNano=_NANOSECONDS,
    attributes=_ATTRIBUTES,
    events=_list(_EVENT),
    status=_object("code", code={"enum": [0, 1, 2]}, message={"type": "string"}),
)
_SCOPE = _object("name", name={"type": "string"}, version={"type": "string"})
SCHEMA = _object(
    "resourceSpans",
    resourceSpans=_list(
        _object(
            "resource scopeSpans",
            resource=_object("attributes", attributes=_ATTRIBUTES),
            scopeSpans=_list(_object("scope spans", scope=_SCOPE, spans=_list(_SPAN))),
        )
    ),
)


def spans_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Check a body, and return its spans, each with the name of its process."""
    jsonschema.validate(body, SCHEMA)
    spans = []
    for resource in body["resourceSpans"]:
        process = attributes_of(resource["resource"])["quadriga.process"]
        for scope in resource["scopeSpans"]:
            spans += [{**span, "process": process} for span in scope["spans"]]
    for span in spans:
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
        assert int(span["traceId"], 16)
        assert int(span["spanId"], 16)
    return spans


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
                    assert re.fullmatch("application/json", headers["Content-Type"])
                    self.spans += spans_of(json.loads(data))
                except (AssertionError, ValueError, jsonschema.ValidationError) as error:
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
