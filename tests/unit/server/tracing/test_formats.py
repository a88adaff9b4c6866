"""Traces as OTLP and in Chrome's format."""

import json
from typing import Any

import msgspec
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from quadriga.server.tracing import otlp
from quadriga.server.tracing.chrome import PROCESSES, chrome_trace
from quadriga.wire.trace import RequestTrace, TraceContext
from tests.unit.server.tracing.collector import attributes_of, spans_of
from tests.unit.server.tracing.spans import CONTEXT, START, trace


def exported(*traces: RequestTrace) -> list[dict[str, Any]]:
    spans = [span for trace in traces for span in otlp.spans_of(trace, {"service.name": "q"})]
    return spans_of(encode_spans(spans).SerializeToString())


def test_otlp_has_a_span_for_the_request_and_one_for_each_part() -> None:
    spans = {span["name"]: span for span in exported(trace())}
    own = spans["llm_request"]
    assert (own["traceId"], own["spanId"]) == (CONTEXT.trace_id, CONTEXT.span_id)
    assert own["parentSpanId"] == CONTEXT.parent_id
    assert own["status"] == {"code": 1}
    assert own["startTimeUnixNano"] == "1795000000000000000"
    assert own["endTimeUnixNano"] == "1795000002125000000"
    assert spans["queue"]["parentSpanId"] == CONTEXT.span_id
    assert spans["forward"]["parentSpanId"] == spans["prefill"]["spanId"]
    assert spans["forward"]["process"] == "worker_proc"
    (event,) = spans["queue"]["events"]
    assert attributes_of(event) == {"reason": "pages", "n": 3, "x": 0.5, "late": True}


def test_the_first_span_of_a_trace_has_no_parent() -> None:
    alone = msgspec.structs.replace(trace(), context=TraceContext("a" * 32, "b" * 16))
    own = next(span for span in exported(alone) if span["name"] == "llm_request")
    assert "parentSpanId" not in own


def test_an_error_is_the_status_of_the_request() -> None:
    own = next(s for s in exported(trace(error="failed: no")) if s["name"] == "llm_request")
    assert own["status"] == {"code": 2, "message": "failed: no"}


def test_ids_differ_between_spans_and_choices_and_not_between_exports() -> None:
    first, second = exported(trace(0)), exported(trace(1))
    ids = [span["spanId"] for span in (*first, *second)]
    assert len(set(ids)) == len(ids)
    assert [span["spanId"] for span in exported(trace(0))] == [span["spanId"] for span in first]


def test_chrome_events_have_a_process_for_each_process_and_a_thread_for_each_choice() -> None:
    result = json.loads(msgspec.json.encode(chrome_trace([trace(0), trace(1)], {"id": "x"})))
    assert result["otherData"] == {"trace_id": CONTEXT.trace_id, "began_at": START, "id": "x"}
    events = result["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == list(PROCESSES)
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in complete} == {1, 2}
    forward = next(event for event in complete if event["name"] == "forward")
    assert (names[forward["pid"]], forward["ts"], forward["dur"]) == ("worker_proc", 1.5e6, 5e5)
    instants = [event for event in events if event["ph"] == "i"]
    assert [event["args"]["reason"] for event in instants] == ["pages", "pages"]
    assert all(event["ts"] >= 0 for event in (*complete, *instants))
