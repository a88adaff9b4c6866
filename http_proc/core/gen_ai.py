"""OpenTelemetry's conventions for generative AI: histograms and attributes of spans of web calls.

quadriga/server/tracing/gen_ai.py has the names. A call is an inference if its endpoint is in
OPERATIONS. The conventions' metrics of clients are not here: a server's usage is in its own
counters, and the newest version has replaced `gen_ai.client.token.usage`.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from http_proc.core.observe import CallRecord, WebTrace
from quadriga.client.types import Completion
from quadriga.server.histogram import Histogram
from quadriga.server.tracing import gen_ai as names
from quadriga.wire.client import Usage
from quadriga.wire.trace import Attributes, RequestTrace

CHAT, TEXT, EMBEDDINGS, RERANK = "chat", "text_completion", "embeddings", "rerank"
OPERATIONS = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"), CHAT),
    **dict.fromkeys(("/v1/completions", "/generate", "/api/generate", "/infill"), TEXT),
    **dict.fromkeys(
        (
            "/v1/embeddings", "/embed", "/similarity", "/v1/embed", "/v2/embed", "/api/embed",
            "/api/embeddings",
        ),
        EMBEDDINGS,
    ),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RERANK),
}  # fmt: skip
"""By the path of the endpoint. `rerank` is no well-known value of the conventions."""
DISCONNECTED = "client_disconnected"  # error.type where the client has left
MAX_FINISH_REASONS = 128

DURATION = "gen_ai_server_request_duration_seconds"
FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds"
PER_TOKEN = "gen_ai_server_time_per_output_token_seconds"
# Metric name, as OpenTelemetry's exporter for Prometheus writes it -> (bounds, help text).
GEN_AI: dict[str, tuple[tuple[float, ...], str]] = {
    DURATION: (
        (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
        "Seconds from the first byte of a request to the last one of its answer",
    ),
    FIRST_TOKEN: (
        (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
        "Seconds from submission to the first token of a successful answer",
    ),
    PER_TOKEN: (
        (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5),
        "Mean seconds for each token of a choice after the first, of successful answers",
    ),
}


class GenAiLabels(NamedTuple):
    """The attributes of a metric, as labels; "" is an attribute that is not there."""

    gen_ai_operation_name: str
    gen_ai_provider_name: str
    gen_ai_request_model: str
    gen_ai_response_model: str
    error_type: str


class GenAiMetrics:
    """Histograms of all inferences of a gateway.

    Attributes:
        histograms: by the name of the metric, and by labels.
    """

    def __init__(self) -> None:
        self.histograms: dict[str, dict[GenAiLabels, Histogram]] = {name: {} for name in GEN_AI}

    def count(self, record: CallRecord) -> None:
        """Count a call that has ended, if it is an inference."""
        operation = OPERATIONS.get(record.route)
        if operation is None:
            return
        asked, error = record.inference, error_of(record)
        labels = GenAiLabels(operation, names.QUADRIGA, asked.named, asked.model, error)
        self.observe(DURATION, labels, time.monotonic() - record.began_at)
        if error:
            return
        times = [each.timings for each in record.completions if each.timings.token_times]
        if times:
            first_s = min(each.token_times[0] - each.submitted for each in times)
            self.observe(FIRST_TOKEN, labels, first_s)
        for each in times:
            if num_later := len(each.token_times) - 1:
                decode_s = each.token_times[-1] - each.token_times[0]
                self.observe(PER_TOKEN, labels, decode_s / num_later)

    def observe(self, name: str, labels: GenAiLabels, value: float) -> None:
        """Count a value of a metric."""
        of_name = self.histograms[name]
        if labels not in of_name:
            of_name[labels] = Histogram(GEN_AI[name][0])
        of_name[labels].observe(value)


def error_of(record: CallRecord) -> str:
    """Return the error.type of a call: its code, or its status; "" for one that was answered."""
    if record.code:
        return record.code
    if record.status is None:
        return DISCONNECTED
    return str(record.status) if record.status >= 400 else ""


def exported(own: RequestTrace, record: CallRecord, trace: WebTrace) -> RequestTrace:
    """Return the trace of a call as it is exported: with the conventions, if it is an inference."""
    operation = OPERATIONS.get(record.route)
    if operation is None:
        return own
    makes_text = operation in (CHAT, TEXT) and record.inference.num_choices
    reasons = _finish_reasons(record, trace.server_ids) if makes_text else []
    return names.exported(own, _span_attributes(operation, record, trace), reasons)


def _span_attributes(operation: str, record: CallRecord, trace: WebTrace) -> Attributes:
    asked = record.inference
    attributes: Attributes = {names.OPERATION: operation, names.PROVIDER: names.QUADRIGA}
    for name, text in (
        (names.REQUEST_MODEL, asked.named),
        (names.RESPONSE_MODEL, asked.model),
        (names.RESPONSE_ID, record.id),
        (names.ERROR, error_of(record)),
    ):
        if text:
            attributes[name] = text
    makes_text = operation in (CHAT, TEXT)
    if makes_text and asked.params is not None:
        attributes |= names.request_attributes(asked.params, asked.is_stream)
    if record.completions:
        prompts = _prompt_usages(record.completions)
        attributes[names.INPUT_TOKENS] = sum(usage.prompt_tokens for usage in prompts)
        attributes[names.CACHED_TOKENS] = sum(usage.cached_tokens for usage in prompts)
        if makes_text:
            usages = (completion.usage for completion in record.completions)
            attributes[names.OUTPUT_TOKENS] = sum(usage.completion_tokens for usage in usages)
            if asked.is_stream and (first_s := _first_chunk_s(record, trace)) is not None:
                attributes[names.FIRST_CHUNK] = first_s
    return attributes


def _prompt_usages(completions: Sequence[Completion]) -> list[Usage]:
    """Return the usage of the first choice of each prompt."""
    of_prompts: dict[str, Completion] = {}
    for each in completions:
        known = of_prompts.setdefault(each.request_id, each)
        if each.vector is None and each.index < known.index:
            of_prompts[each.request_id] = each
    return [each.usage for each in of_prompts.values()]


def _first_chunk_s(record: CallRecord, trace: WebTrace) -> float | None:
    """Return the seconds from the arrival to the first token."""
    firsts = [times[0] for each in record.completions if (times := each.timings.token_times)]
    return round(max(0.0, min(firsts) - trace.began_at), 6) if firsts else None


def _finish_reasons(record: CallRecord, request_ids: Sequence[str]) -> list[str]:
    """Return the finish reasons of the choices in order; "error" for one without an end."""
    places = {name: place for place, name in enumerate(request_ids)}
    ended = sorted(
        record.completions, key=lambda each: (places.get(each.request_id, 0), each.index)
    )
    reasons = [each.finish_reason for each in ended]
    reasons += ["error"] * (record.inference.num_choices - len(reasons))
    return reasons[:MAX_FINISH_REASONS]
