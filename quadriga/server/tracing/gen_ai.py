"""OpenTelemetry's conventions for generative AI: the names of what an exported span shows.

They are those of github.com/open-telemetry/semantic-conventions-genai (schema 1.44, still in
development). A request has one span with `gen_ai.operation.name` and the usage, so that tools that
add up tokens count it once: the web request's, or `llm_request` of a request by ZeroMQ.
"""

import msgspec

from quadriga.sampling.params import SamplingParams
from quadriga.wire.trace import Attributes, RequestTrace

OPERATION, PROVIDER = "gen_ai.operation.name", "gen_ai.provider.name"
REQUEST_MODEL, RESPONSE_MODEL = "gen_ai.request.model", "gen_ai.response.model"
RESPONSE_ID, FINISH_REASONS = "gen_ai.response.id", "gen_ai.response.finish_reasons"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR = "error.type"
QUADRIGA = "quadriga"
# A request by ZeroMQ may be a text, token ids or a chat, and the scheduler sees only ids.
GENERATE = "generate_content"


class ExportedTrace(RequestTrace, array_like=True):
    """A trace with what only its export shows. finish_reasons: of its choices, in order."""

    finish_reasons: list[str] = msgspec.field(default_factory=list)


def exported(
    trace: RequestTrace, attributes: Attributes, finish_reasons: list[str]
) -> ExportedTrace:
    """Return a trace with further attributes of its own span."""
    return ExportedTrace(
        trace.context, trace.name, trace.request_id, trace.index, trace.spans,
        {**trace.attributes, **attributes}, trace.error, finish_reasons,
    )  # fmt: skip


def request_attributes(params: SamplingParams, is_stream: bool) -> Attributes:
    """Return what a request asks for, without what it leaves to the model.

    Its stop strings are left out: a trace has no text of a user.
    """
    attributes: Attributes = {}
    for name in ("temperature", "top_p", "seed"):
        if (value := getattr(params, name)) is not None:
            attributes[f"gen_ai.request.{name}"] = value
    for name in ("frequency_penalty", "presence_penalty"):
        if value := getattr(params, name):
            attributes[f"gen_ai.request.{name}"] = value
    if params.top_k is not None and params.top_k > 0:
        attributes["gen_ai.request.top_k"] = params.top_k
    if params.max_new_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_new_tokens
    if params.n != 1:
        attributes["gen_ai.request.choice.count"] = params.n
    if is_stream:
        attributes["gen_ai.request.stream"] = True
    return attributes


def with_conventions(trace: RequestTrace, model: str) -> ExportedTrace:
    """Return the trace of a choice with the convention's names, where no web request is around it.

    The prompt of several choices counts once, at the first one.

    Args:
        trace: of the server, whose attributes are those of the scheduler.
        model: name that clients see.
    """
    own = trace.attributes
    attributes: Attributes = {
        OPERATION: GENERATE,
        PROVIDER: QUADRIGA,
        RESPONSE_MODEL: model,
        OUTPUT_TOKENS: own.get("gen_ai.usage.completion_tokens", 0),
    }
    if trace.index == 0:
        attributes[INPUT_TOKENS] = own.get("gen_ai.usage.prompt_tokens", 0)
        attributes[CACHED_TOKENS] = own.get("quadriga.cached_tokens", 0)
    if trace.error:
        attributes[ERROR] = trace.error.partition(":")[0]
    reason = own.get("gen_ai.response.finish_reason")
    finish_reasons = ["error" if trace.error else str(reason)] if reason else []
    return exported(trace, attributes, finish_reasons)
