"""OpenTelemetry's conventions for generative AI: what exported spans and histograms say."""

import importlib
import logging
import warnings
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from http_proc.core.gen_ai import OPERATIONS
from http_proc.server import ENDPOINTS
from quadriga.errors import RequestFailed
from quadriga.server.tracing import otlp
from tests.unit.http.calls import send
from tests.unit.http.measured_ring import MeasuredRing
from tests.unit.http.server_info import info_of
from tests.unit.scripted_ring import gateway_before
from tests.waiting import wait_until

ENDPOINT = "http://127.0.0.1:4318"  # is never connected to
HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/messages": {"max_tokens": 4, "messages": HI},
    "/v1/responses": {"input": "Hi"},
    "/api/chat": {"messages": HI, "stream": False},
    "/v1/completions": {"prompt": "Hi"},
    "/generate": {"text": "Hi"},
    "/api/generate": {"prompt": "Hi", "stream": False},
}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Return the SDK's exporter that keeps spans, in place of the one that sends them."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(otlp, "OTLPSpanExporter", lambda _url, timeout: exporter)
    monkeypatch.setattr(otlp, "SDK_LOGGER", logging.getLogger("otlp of this test"))
    monkeypatch.setattr(otlp, "BATCH_DELAY_S", 0.01)
    return exporter


def own_span(memory: InMemorySpanExporter, route: str) -> dict[str, Any]:
    """Return the attributes of the only exported span of a web request."""
    found: list[ReadableSpan] = []

    def has_come() -> bool:
        found[:] = [span for span in memory.get_finished_spans() if span.name == route]
        return bool(found)

    wait_until(has_come, 30)
    (span,) = found
    return dict(span.attributes or {})


def known_names() -> set[str]:
    """Return the names of attributes that OpenTelemetry's package has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package says that they have moved
        base = "opentelemetry.semconv"
        modules = [
            importlib.import_module(f"{base}._incubating.attributes.gen_ai_attributes"),
            importlib.import_module(f"{base}.attributes.error_attributes"),
        ]
        return {
            value
            for module in modules
            for name, value in vars(module).items()
            if name.isupper() and isinstance(value, str)
        }


@pytest.mark.parametrize("path", BODIES)
async def test_the_span_of_every_api_has_the_names_of_the_conventions(
    path: str, memory: InMemorySpanExporter
) -> None:
    async with gateway_before(MeasuredRing(), otlp_endpoint=ENDPOINT) as (_, gateway):
        body = {"model": "tiny", **BODIES[path]}
        answer = await send(gateway, path, body, X_Request_Id="x1")
        assert answer.status == 200, answer.text
        span = own_span(memory, path)
    for name, value in {
        "gen_ai.operation.name": OPERATIONS[path],
        "gen_ai.provider.name": "quadriga",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 32,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "gen_ai.usage.output_tokens": 5,
    }.items():
        assert span[name] == value, name
    assert "x1" in span.get("gen_ai.response.id", "x1")
    assert "error.type" not in span
    ours = {"gen_ai.request.id"}
    assert {name for name in span if name.startswith("gen_ai.")} - ours <= known_names()


async def test_the_parameters_of_a_request_are_those_that_it_has_given(
    memory: InMemorySpanExporter,
) -> None:
    async with gateway_before(MeasuredRing(), otlp_endpoint=ENDPOINT) as (_, gateway):
        fields = {
            "prompt": "Hi", "max_tokens": 7, "temperature": 0.5, "top_k": 9, "seed": 3, "n": 2,
            "presence_penalty": 0.25, "stop": ["secret"], "stream": True,
        }  # fmt: skip
        ring: Any = gateway.models.default.client
        ring.leaves_open = True
        await send(gateway, "/v1/completions", fields, "", True)
        span = own_span(memory, "/v1/completions")
    given = {name[15:]: value for name, value in span.items() if name.startswith("gen_ai.request.")}
    del given["id"]
    assert given == {
        "max_tokens": 7, "temperature": 0.5, "top_k": 9, "seed": 3, "choice.count": 2,
        "presence_penalty": 0.25, "stream": True,
    }  # fmt: skip
    assert "secret" not in str(span), "a trace has no text of a user"
    assert span["gen_ai.response.finish_reasons"] == ["error", "error"], "neither choice has ended"
    assert span["error.type"] == "server_failed"


async def test_a_stream_says_when_its_first_token_came(memory: InMemorySpanExporter) -> None:
    async with gateway_before(MeasuredRing(), otlp_endpoint=ENDPOINT) as (_, gateway):
        await send(gateway, "/v1/chat/completions", {"messages": HI, "stream": True})
        span = own_span(memory, "/v1/chat/completions")
    assert span["gen_ai.request.stream"] is True
    assert span["gen_ai.response.time_to_first_chunk"] >= 0
    assert "gen_ai.request.model" not in span, "the request named none"


async def test_a_call_that_is_no_inference_has_none_of_the_names(
    memory: InMemorySpanExporter,
) -> None:
    async with gateway_before(ring_with_metrics(), otlp_endpoint=ENDPOINT) as (_, gateway):
        await send(gateway, "/tokenize", {"prompt": "Hi"})
        span = own_span(memory, "/tokenize")
        assert "gen_ai_server" not in await samples_text(gateway)
    assert {name for name in span if name.startswith("gen_ai.")} == {"gen_ai.request.id"}


async def samples_text(gateway: Any) -> str:
    text = (await send(gateway, "/metrics")).text
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


async def counts(gateway: Any) -> dict[tuple[str, str, str], float]:
    """Return the number of values of each histogram, by metric, operation and error."""
    text = (await send(gateway, "/metrics")).text
    return {
        (
            sample.name.removeprefix("gen_ai_server_").removesuffix("_seconds_count"),
            sample.labels["gen_ai_operation_name"],
            sample.labels["error_type"],
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("gen_ai_server_") and sample.name.endswith("_count")
    }


def ring_with_metrics() -> MeasuredRing:
    ring = MeasuredRing()
    ring.facts |= {**info_of(), "chat": True, "answer_format": ring.facts["answer_format"]}
    return ring


async def test_the_histograms_count_answers_and_errors_apart() -> None:
    async with gateway_before(ring_with_metrics()) as (_, gateway):
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/completions"):
            await send(gateway, path, {"model": "tiny", **BODIES[path]})
        await send(gateway, "/v1/completions", {"prompt": "Hi", "temperature": -1})
        ring: Any = gateway.models.default.client
        ring.error = RequestFailed("the worker died")
        await send(gateway, "/v1/completions", {"prompt": "Hi"})
        assert await counts(gateway) == {
            ("request_duration", "chat", ""): 1,
            ("time_to_first_token", "chat", ""): 1,
            ("time_per_output_token", "chat", ""): 1,
            ("request_duration", "text_completion", ""): 2,
            ("time_to_first_token", "text_completion", ""): 2,
            ("time_per_output_token", "text_completion", ""): 2,
            ("request_duration", "text_completion", "invalid_request"): 1,
            ("request_duration", "text_completion", "failed"): 1,
        }
        text = await samples_text(gateway)
    (line,) = [
        line
        for line in text.splitlines()
        if line.startswith('gen_ai_server_time_per_output_token_seconds_bucket{error_type=""')
        and 'le="0.01"' in line and '"chat"' in line
    ]  # fmt: skip
    assert 'gen_ai_request_model="tiny"' in line and 'gen_ai_response_model="tiny"' in line


async def test_a_name_that_is_not_served_makes_no_labels_of_its_own() -> None:
    async with gateway_before(ring_with_metrics()) as (_, gateway):
        for number in range(20):
            body = {"prompt": "Hi", "model": f"unknown-{number}"}
            assert (await send(gateway, "/v1/completions", body)).status == 404
        assert await counts(gateway) == {
            ("request_duration", "text_completion", "model_not_found"): 20
        }


def test_every_operation_is_an_endpoint() -> None:
    assert set(OPERATIONS) <= {endpoint.path for endpoint in ENDPOINTS}
