"""A trace, and the spans of a recorder that have ended."""

from typing import Any

import msgspec

from quadriga.wire.trace import RequestTrace, Span, SpanEvent, TraceContext

START = 1_795_000_000.0
CONTEXT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "00f067aa0ba902b7")


def trace(index: int = 0, error: str = "") -> RequestTrace:
    event = SpanEvent("waits", START + 0.5, {"reason": "pages", "n": 3, "x": 0.5, "late": True})
    spans = [
        Span("tokenize", "tokenizer_proc", START, START + 0.25),
        Span("queue", "scheduler_proc", START + 0.25, START + 1, {}, [event]),
        Span("prefill", "scheduler_proc", START + 1, START + 2, {"tokens": 7}),
        Span("forward", "worker_proc", START + 1.5, START + 2, parent=2),
        Span("detokenize", "detok_proc", START + 2, START + 2.125),
    ]
    return RequestTrace(CONTEXT, "llm_request", "r1", index, spans, {"retractions": 0}, error)


def ended(message: Any, *steps: int) -> Any:
    """Return the message with the ends of steps, each of which lasts half a second."""
    times = [4.0 + step for step in steps]
    return msgspec.structs.replace(
        message, ended_steps=list(steps), began_at=times, ended_at=[time + 0.5 for time in times]
    )
