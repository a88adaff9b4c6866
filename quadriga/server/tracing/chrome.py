"""Traces in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open.

First the traces of requests, then some seconds of the live feed as one file. The format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from quadriga.wire.live import (
    LiveGauges,
    LiveMessage,
    LiveProcess,
    LiveRequest,
    LiveServer,
    LiveStep,
    RowKind,
)
from quadriga.wire.trace import Attributes, RequestTrace, Span

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


# --- the live feed --------------------------------------------------------------------------------

REQUESTS = "requests"
TRACKS = (*PROCESSES, "launcher", REQUESTS)
MAX_EVENTS = 2_000_000  # about 300 MB
_SHOWN_GAUGES = ("running", "waiting", "pages_held", "pages_cached", "pages_free")

Event = dict[str, Any]


class LiveRecording:
    """Collect messages of the live feed, and make one file of them.

    The worker has a track with the steps, each request one with its rows in them, and each process
    counters of CPU and memory.

    Attributes:
        num_lost: messages of the feed that were dropped on the way.
    """

    def __init__(self) -> None:
        self.num_lost = 0
        self._events: list[Event] = []
        self._planned: dict[int, LiveStep] = {}
        self._requests: dict[int, LiveRequest] = {}
        self._cpu: dict[tuple[str, int], tuple[float, float]] = {}
        self._pids: dict[str, int] = {name: pid for pid, name in enumerate(TRACKS, start=1)}
        self._number = -1
        self._began_at = 0.0

    @property
    def is_full(self) -> bool:
        """Whether there is no room for further events."""
        return len(self._events) >= MAX_EVENTS

    @property
    def num_steps(self) -> int:
        """Number of steps whose times are recorded."""
        return sum(event["name"] == "step" for event in self._events)

    def add(self, message: LiveMessage) -> None:
        """Add a message."""
        if not self._began_at:
            self._began_at = message.time
        if isinstance(message, LiveServer):
            for process in message.processes:
                self._add_process(process, message.time)
        else:
            self._add_step(message)

    def trace(self) -> ChromeTrace:
        """Return what was recorded."""
        names = [
            event
            for name, pid in self._pids.items()
            for event in (
                _metadata("process_name", pid, 0, {"name": name}),
                _metadata("process_sort_index", pid, 0, {"sort_index": pid}),
            )
        ]
        pid = self._pids[REQUESTS]
        for seq, request in self._requests.items():
            name = f"{request.request_id} choice {request.index}"
            names.append(_metadata("thread_name", pid, seq + 1, {"name": name}))
        data = {"began_at": self._began_at, "lost_messages": self.num_lost}
        return ChromeTrace(names + self._events, data)

    # --- steps ------------------------------------------------------------------------------------

    def _add_step(self, step: LiveStep) -> None:
        if 0 <= self._number < step.number:
            self.num_lost += step.number - self._number - 1
        if step.number <= self._number:  # the feed has begun again: a new scheduler
            self._planned.clear()
        self._number = step.number
        for request in step.requests:
            self._add_request(request)
        for number, began, ended in zip(
            step.ended_steps, step.began_at, step.ended_at, strict=True
        ):
            planned = self._planned.pop(number, None)
            if planned is not None:
                self._add_ended(planned, began, ended)
        if step.step >= 0:
            self._planned[step.step] = step
        for event in step.events:
            args = {"detail": event.detail} if event.detail else {}
            self._instant(event.kind.value, REQUESTS, event.seq + 1, step.time, args)
        self._add_gauges(step.gauges, step.time)

    def _add_ended(self, step: LiveStep, began: float, ended: float) -> None:
        """Add a step with the worker's times, and the row of each request in it."""
        kinds = Counter(RowKind(kind).name.lower() for kind in step.kinds)
        waiting = {f"waiting_{reason.value}": len(seqs) for reason, seqs in step.skipped.items()}
        args = {
            "step": step.step, "tokens": sum(step.num_tokens), "hidden_rows": step.num_hidden_rows,
            **kinds, **waiting,
        }  # fmt: skip
        self._complete("step", "worker_proc", 1, began, ended, args)
        planned_s = {"step": step.step, "lead_ms": round(1000 * (began - step.time), 3)}
        self._instant("plan", "scheduler_proc", 1, step.time, planned_s)
        for seq, kind, num_tokens in zip(step.seqs, step.kinds, step.num_tokens, strict=True):
            name = RowKind(kind).name.lower()
            args = {"step": step.step, "tokens": num_tokens}
            self._complete(name, REQUESTS, seq + 1, began, ended, args)
        for reason, seqs in step.skipped.items():
            for seq in seqs:
                args = {"step": step.step}
                self._complete(f"waits: {reason.value}", REQUESTS, seq + 1, began, ended, args)

    def _add_request(self, request: LiveRequest) -> None:
        known = self._requests.get(request.seq)
        self._requests[request.seq] = request
        if known is None and request.received_at >= self._began_at:
            args = {"prompt_tokens": request.num_prompt_tokens, "priority": request.priority}
            self._instant("received", REQUESTS, request.seq + 1, request.received_at, args)

    def _add_gauges(self, gauges: LiveGauges, at: float) -> None:
        for name in _SHOWN_GAUGES:
            self._counter(name, "scheduler_proc", at, getattr(gauges, name))
        self._counter("tokens", "scheduler_proc", at, gauges.generation_tokens_total)

    # --- processes --------------------------------------------------------------------------------

    def _add_process(self, process: LiveProcess, at: float) -> None:
        name = process.name
        self._pids.setdefault(name, len(self._pids) + 1)
        key = name, process.pid
        before_s, before_at = self._cpu.get(key, (0.0, 0.0))
        self._cpu[key] = process.cpu_seconds, at
        if before_at and at > before_at:
            share = 100 * (process.cpu_seconds - before_s) / (at - before_at)
            self._counter("cpu %", name, at, round(share, 1))
        self._counter("memory MB", name, at, round(process.resident_bytes / 1e6, 1))

    # --- events of the format ---------------------------------------------------------------------

    def _complete(
        self, name: str, track: str, tid: int, began: float, ended: float, args: Event
    ) -> None:
        at = microseconds(began - self._began_at)
        duration = round(microseconds(ended - self._began_at) - at, 3)
        place = {"pid": self._pids[track], "tid": tid}
        self._put({"ph": "X", "name": name, "ts": at, "dur": duration, "args": args, **place})

    def _instant(self, name: str, track: str, tid: int, at: float, args: Event) -> None:
        place = {"pid": self._pids[track], "tid": tid, "ts": microseconds(at - self._began_at)}
        self._put({"ph": "i", "s": "t", "name": name, "args": args, **place})

    def _counter(self, name: str, track: str, at: float, value: float) -> None:
        place = {"pid": self._pids[track], "ts": microseconds(at - self._began_at)}
        self._put({"ph": "C", "name": name, "args": {"value": value}, **place})

    def _put(self, event: Event) -> None:
        if not self.is_full:
            self._events.append(event)
