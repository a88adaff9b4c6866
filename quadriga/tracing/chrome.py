"""Traces in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from quadriga.wire.messages.trace import Attributes, RequestTrace, Span

# In the order of a request's way; a process's number is its `pid`.
PROCESSES = ("http_proc", "tokenizer_proc", "scheduler_proc", "worker_proc", "detok_proc")


class ChromeTrace(msgspec.Struct):
    """A trace for ui.perfetto.dev.

    traceEvents: complete events ("X") and instants ("i") in microseconds from `began_at`; pid: the
    process; tid: the choice. otherData: ids, and `began_at` in Unix seconds.
    """

    traceEvents: list[dict[str, Any]]  # noqa: N815 - the format's name
    otherData: dict[str, Any]  # noqa: N815
    displayTimeUnit: str = "ms"  # noqa: N815


def chrome_trace(traces: Sequence[RequestTrace], data: dict[str, Any]) -> ChromeTrace:
    """Return at least one trace as one file. data: what `otherData` has, too."""
    began_at = min(trace.began_at for trace in traces)
    events = _names(traces)
    for thread, trace in enumerate(traces, start=1):
        events += _events(trace, thread, began_at)
    ids = {"trace_id": traces[0].context.trace_id, "began_at": began_at}
    return ChromeTrace(events, ids | data)


def _names(traces: Sequence[RequestTrace]) -> list[dict[str, Any]]:
    """Return the names of processes and threads."""
    events = []
    for pid, process in enumerate(PROCESSES, start=1):
        events.append(_metadata("process_name", pid, 0, {"name": process}))
        events.append(_metadata("process_sort_index", pid, 0, {"sort_index": pid}))
        for tid, trace in enumerate(traces, start=1):
            if any(span.process == process for span in trace.spans):
                name = f"{trace.request_id} choice {trace.index}"
                events.append(_metadata("thread_name", pid, tid, {"name": name}))
    return events


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _events(trace: RequestTrace, tid: int, began_at: float) -> Iterable[dict[str, Any]]:
    """Yield the request's own span, the spans within it, and their events."""
    process = trace.spans[0].process
    error: Attributes = {"error": trace.error} if trace.error else {}
    own = Span(trace.name, process, trace.began_at, trace.ended_at, trace.attributes | error)
    for span in (own, *trace.spans):
        pid = PROCESSES.index(span.process) + 1
        place = {"cat": span.process, "pid": pid, "tid": tid}
        began = microseconds(span.began_at - began_at)
        yield {
            "ph": "X",
            "name": span.name,
            "ts": began,
            "dur": round(microseconds(span.ended_at - began_at) - began, 3),
            "args": span.attributes,
            **place,
        }
        for event in span.events:
            yield {
                "ph": "i",
                "s": "t",
                "name": event.name,
                "ts": microseconds(event.at - began_at),
                "args": event.attributes,
                **place,
            }


def microseconds(seconds: float) -> float:
    """Return a time in the unit of the format."""
    return round(seconds * 1e6, 3)
