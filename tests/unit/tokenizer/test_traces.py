"""The frontend's part of traces: which requests are traced, and what is kept and exported."""

from typing import Any

import msgspec
import pytest

from quadriga.server.config.frontend_args import TraceArgs
from quadriga.server.tracing.export import Exporter
from quadriga.server.tracing.gen_ai import ExportedTrace
from quadriga.wire.client import GetTraces, Refused, Traces, gateway_address
from quadriga.wire.sockets import encode
from quadriga.wire.to_scheduler import Submit
from quadriga.wire.trace import Attributes, RequestTrace, Span, TraceContext
from tests.unit.tokenizer.frontend_world import FrontendWorld
from tokenizer_proc.deliver import traces as traces_module
from tokenizer_proc.deliver.traces import RingTraces

GATEWAY = gateway_address().bytes
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


class Exported:
    """Keeps what is exported."""

    def __init__(self) -> None:
        self.traces: list[ExportedTrace] = []

    def put(self, trace: bytes) -> None:
        self.traces.append(msgspec.msgpack.decode(trace, type=ExportedTrace))

    def info(self) -> dict[str, int]:
        return {"traces_exported": len(self.traces), "traces_dropped": 0}

    def close(self) -> None:
        """Do nothing."""


def world_of(exporter: Exporter | None = None, **flags: Any) -> FrontendWorld:
    traces = RingTraces(TraceArgs(**flags), exporter or Exported(), "m")
    return FrontendWorld(max_queued=1000, traces=traces)


def contexts(world: FrontendWorld) -> list[TraceContext | None]:
    return [message.trace for message in world.scheduler.sent if isinstance(message, Submit)]


def ended(world: FrontendWorld, client: bytes, trace: RequestTrace) -> None:
    """Deliver the end of a request."""
    world.deliver(client, ended=(trace.request_id,), traces=(trace,))


def trace_of(name: str = "r", index: int = 0, sampled: bool = True, size: int = 0) -> RequestTrace:
    context = TraceContext(TRACE_ID, f"{index + 1:016x}", "", sampled)
    spans = [Span("tokenize", "tokenizer_proc", 1.0, 2.0, {"text": "x" * size})]
    return RequestTrace(context, "llm_request", name, index, spans)


def kept(world: FrontendWorld, client: bytes, *names: str) -> list[RequestTrace]:
    world.frontend.on_public([client, encode(GetTraces(1, "q", list(names)))])
    answer = world.port.last()
    assert isinstance(answer, Traces)
    assert answer.request_id == "q"
    return answer.traces


async def test_a_client_whose_own_span_is_sampled_is_traced_below_it() -> None:
    world = world_of(keep_traces="sampled")
    world.ask("1", traceparent=TRACEPARENT)
    world.ask("2", traceparent=TRACEPARENT[:-1] + "0")
    world.ask("3", traceparent="malformed")
    world.ask("4")
    first, *others = contexts(world)
    assert first is not None
    assert (first.trace_id, first.parent_id) == (TRACE_ID, "b7ad6b7169203331")
    assert others == [None, None, None]


async def test_the_gateway_has_decided_about_its_requests() -> None:
    world = world_of(trace_sampling_ratio=1.0)
    world.ask("1", GATEWAY)
    world.ask("2", b"c")
    gateways, own = contexts(world)
    assert gateways is None
    assert own is not None
    assert own.sampled


async def test_the_end_of_a_request_brings_its_trace_which_only_its_client_gets() -> None:
    exporter = Exported()
    world = world_of(exporter)
    ended(world, b"c", trace_of("a"))
    ended(world, b"c", trace_of("a", index=1))
    ended(world, GATEWAY, trace_of("b"))
    first, second = kept(world, b"c", "a", "b")
    assert [span.name for span in first.spans] == ["tokenize", "deliver"]
    assert (first.index, second.index) == (0, 1)
    assert kept(world, b"d", "a") == []
    (gateways,) = kept(world, GATEWAY, "b")
    assert [span.name for span in gateways.spans] == ["tokenize"], "the gateway delivers itself"
    assert len(exporter.traces) == 3


async def test_an_exported_request_by_zeromq_has_the_names_of_opentelemetry() -> None:
    exporter = Exported()
    world = world_of(exporter)
    own: Attributes = {
        "gen_ai.usage.prompt_tokens": 9, "gen_ai.usage.completion_tokens": 4,
        "gen_ai.response.finish_reason": "stop", "quadriga.cached_tokens": 8,
    }  # fmt: skip
    for client, index in ((b"c", 0), (b"c", 1), (GATEWAY, 0)):
        trace = trace_of("a", index)
        trace.attributes = dict(own)
        ended(world, client, trace)
    first, second, gateways = (trace.attributes for trace in exporter.traces)
    assert first == own | {
        "gen_ai.operation.name": "generate_content", "gen_ai.provider.name": "quadriga",
        "gen_ai.response.model": "m",
        "gen_ai.usage.input_tokens": 9, "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 8,
    }  # fmt: skip
    assert "gen_ai.usage.input_tokens" not in second, "the prompt of two choices counts once"
    assert gateways == own, "the web request's span has them"
    assert [each.finish_reasons for each in exporter.traces] == [["stop"], ["stop"], []]
    assert kept(world, b"c", "a")[0].attributes == own


async def test_an_end_that_a_frontend_before_this_one_missed_says_so() -> None:
    world = world_of()
    ended(world, b"c", trace_of("a"))
    (trace,) = kept(world, b"c", "a")
    assert [event.name for event in trace.spans[-1].events] == ["frontend ready"]


async def test_an_end_that_is_delivered_again_is_exported_once() -> None:
    exporter = Exported()
    world = world_of(exporter)
    for _ in range(2):
        ended(world, b"c", trace_of("a"))
    assert len(exporter.traces) == 1
    assert len(kept(world, b"c", "a")) == 1


async def test_a_trace_that_is_not_sampled_is_kept_and_not_exported() -> None:
    exporter = Exported()
    world = world_of(exporter)
    world.ask("1")
    (context,) = contexts(world)
    assert context is not None
    assert not context.sampled
    ended(world, b"c", trace_of("a", sampled=False))
    assert len(kept(world, b"c", "a")) == 1
    assert not exporter.traces


async def test_the_oldest_traces_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces_module, "MAX_KEPT_BYTES", 10_000)
    world = world_of()
    for number in range(100):
        ended(world, b"c", trace_of(f"r{number}", size=900))
        ended(world, b"c", trace_of(f"r{number}", size=900))
    names = [trace.request_id for trace in kept(world, b"c", *(f"r{n}" for n in range(60, 100)))]
    assert 5 <= len(names) <= 7, "each takes 900 bytes, and those of its keys"
    assert names[-1] == "r99"
    assert world.frontend.traces._num_bytes <= 10_000


async def test_an_answer_fits_into_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces_module, "MAX_ANSWER_BYTES", 10_000)
    world = world_of()
    for number in range(30):
        ended(world, b"c", trace_of(f"r{number}", size=900))
    assert 8 <= len(kept(world, b"c", *(f"r{n}" for n in range(30)))) <= 10


async def test_too_many_ids_are_refused_by_name() -> None:
    world = world_of()
    world.frontend.on_public([b"c", encode(GetTraces(1, "q", ["x"] * 65))])
    refused = world.port.last()
    assert isinstance(refused, Refused)
    assert refused.error.field == "request_ids"
    assert "65 ids: at most 64" in refused.error.message
