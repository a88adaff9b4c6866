"""The trace of a request: its spans, which travel with its end from process to process."""

from collections.abc import Iterable

import msgspec

AttributeValue = bool | int | float | str
Attributes = dict[str, AttributeValue]


# Attribute of spans, where there are several replicas: the number of the one whose work it is.
REPLICA = "replica"


class TraceContext(msgspec.Struct, array_like=True, frozen=True):
    """Where a request belongs in a trace, as W3C Trace Context defines it.

    Attributes:
        trace_id: 32 hexadecimal digits, which all spans of the trace share.
        span_id: 16 hexadecimal digits, of the request's own span.
        parent_id: the same of the span that caused the request; "" for none.
        sampled: the trace is exported; else it is only kept.
    """

    trace_id: str
    span_id: str
    parent_id: str = ""
    sampled: bool = True


class SpanEvent(msgspec.Struct, array_like=True, frozen=True):
    """Something that happened within a span. `at`: Unix seconds."""

    name: str
    at: float
    attributes: Attributes = {}


class Span(msgspec.Struct, array_like=True):
    """A part of a request's time.

    Attributes:
        process: name of the process whose work it is.
        began_at, ended_at: Unix seconds.
        parent: place of the span, in the same list, that this one lies in; -1: the request itself.
    """

    name: str
    process: str
    began_at: float
    ended_at: float
    attributes: Attributes = {}
    events: list[SpanEvent] = []
    parent: int = -1


def note_replica(spans: Iterable[Span], number: int) -> None:
    """Let the spans of a replica's processes say whose they are, unless they do already."""
    for span in spans:
        if span.process != "tokenizer_proc":
            span.attributes.setdefault(REPLICA, number)


class RequestTrace(msgspec.Struct, array_like=True):
    """The spans of one choice of a request, or of the web request around it.

    Spans whose parent is -1 follow each other without gaps.

    Attributes:
        name: name of the request's own span.
        index: number of the choice.
        attributes: of the request's own span.
        error: why the request failed; "" if it did not.
    """

    context: TraceContext
    name: str
    request_id: str
    index: int
    spans: list[Span]
    attributes: Attributes = {}
    error: str = ""

    @property
    def began_at(self) -> float:
        """Unix seconds of the begin of the first span."""
        return self.spans[0].began_at

    @property
    def ended_at(self) -> float:
        """Unix seconds of the end of the last span."""
        return max(span.ended_at for span in self.spans)
