"""The detokenizer's part of a trace."""

from detok_proc.main import close_traces, open_traces
from quadriga.wire.client import Chunk, End, StageTimes, Usage
from quadriga.wire.to_detok import StepOutput, StreamEnd, StreamReplay, StreamStart
from quadriga.wire.trace import RequestTrace, Span, TraceContext

CONTEXT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


def closing(name: str, index: int = 0, traced: bool = True) -> StreamEnd:
    spans = [Span("decode", "scheduler_proc", 1.0, 2.0)]
    trace = RequestTrace(CONTEXT, "llm_request", name, index, spans) if traced else None
    return StreamEnd(1, b"c", name, "stop", None, None, 1, 0, 1.0, 1.0, 1.0, 1.0, index, trace)


def end(detokenized: float) -> End:
    return End("stop", Usage(1, 1), StageTimes(1.0, 1.0, 1.0, 1.0, detokenized))


def test_a_span_from_the_last_phase_to_the_last_text_is_added_to_each_choice() -> None:
    opening = StreamStart(2, b"c", "again", True, True, [])
    output = StepOutput(
        1.0, [], [], b"", [closing("a"), closing("a", 1), closing("plain", traced=False)],
        replayed=[StreamReplay(opening, b"", [], closing("again"))],
    )  # fmt: skip
    chunks = [
        Chunk("a", 0, "", b"", [], end(2.5)),
        Chunk("a", 0, "", b"", [], end(3.5), 1),
        Chunk("again", 0, "", b"", [], end(1.5)),  # a replay, of an earlier end
        Chunk("plain", 0, "", b"", [], end(2.5)),
        Chunk("goes on", 0, "", b"", []),
    ]
    traces = open_traces(output)
    first, second, third = close_traces(traces, b"c", chunks)
    assert [(t.request_id, t.index) for t in (first, second, third)] == [
        ("a", 0), ("a", 1), ("again", 0),
    ]  # fmt: skip
    spans = [trace.spans[-1] for trace in (first, second, third)]
    assert {(span.name, span.process) for span in spans} == {("detokenize", "detok_proc")}
    assert [(s.began_at, s.ended_at) for s in spans] == [(2.0, 2.5), (2.0, 3.5), (2.0, 2.0)]
    assert [trace.attributes for trace in (first, second, third)] == [
        {}, {}, {"quadriga.replayed": True},
    ]  # fmt: skip
    assert close_traces(traces, b"d", chunks) == []
