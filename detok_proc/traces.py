"""The traces of the requests that end: the detokenizer adds its span."""

from collections.abc import Iterable

from quadriga.wire.messages.to_client import Chunk
from quadriga.wire.messages.to_detok import StepOutput
from quadriga.wire.messages.trace import RequestTrace, Span

TraceKey = tuple[bytes, str, int]  # client, id of the request, number of the choice


def open_traces(output: StepOutput) -> dict[TraceKey, RequestTrace]:
    """Return the traces of the traced requests that end with this output.

    The trace of an end that is sent again, to a new detokenizer or frontend, says so.
    """
    replayed = [replay.closing for replay in output.replayed if replay.closing is not None]
    for end in replayed:
        if end.trace is not None:
            end.trace.attributes["quadriga.replayed"] = True
    ends = [*output.closed, *replayed]
    return {(e.client, e.request_id, e.index): e.trace for e in ends if e.trace is not None}


def close_traces(
    traces: dict[TraceKey, RequestTrace], client: bytes, chunks: Iterable[Chunk]
) -> list[RequestTrace]:
    """Return the traces of a client's requests that end with these chunks, with a span more."""
    closed = []
    for chunk in chunks:
        if chunk.end is None:
            continue
        trace = traces.pop((client, chunk.request_id, chunk.index), None)
        if trace is not None:
            began_at = trace.ended_at
            ended_at = max(began_at, chunk.end.times.detokenized)
            trace.spans.append(Span("detokenize", "detok_proc", began_at, ended_at))
            closed.append(trace)
    return closed
