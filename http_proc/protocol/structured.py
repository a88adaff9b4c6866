"""What a request asks of the text in other words than the ring's: response_format, vLLM's
structured_outputs, and calls that must obey their tools."""

from typing import Any

import msgspec

from http_proc.protocol.call_grammars import ANY_OBJECT, forced_call, free_calls
from http_proc.protocol.errors import invalid
from http_proc.protocol.sampling import Sampling
from http_proc.protocol.schema import ChatRequest, OpenAIRequest, ResponseFormat, StructuredOutputs
from quadriga.sampling.params import GRAMMAR_FIELDS

FORCED_FORMAT = "llama3"
"""How a forced call is written, whatever the model's own way: one JSON object, nothing around."""


def take_formats(sampling: Sampling, call: OpenAIRequest) -> Sampling:
    """With what response_format and structured_outputs ask for. Raises ApiError."""
    if call.response_format is not None:
        wanted = _of_format(call.response_format)
        sampling = obeying(sampling, "response_format", wanted)
    if call.structured_outputs is not None:
        wanted = _of_outputs(call.structured_outputs)
        sampling = obeying(sampling, "structured_outputs", wanted)
    return sampling


def obeying(sampling: Sampling, name: str, wanted: dict[str, Any]) -> Sampling:
    """With a grammar for which the request's field `name` asks. wanted: fields of SamplingParams.
    Raises ApiError where another one is given."""
    if not wanted:
        return sampling
    given = next(
        (field for field in GRAMMAR_FIELDS if getattr(sampling.params, field) is not None), None
    )
    if given is not None:
        other = sampling.names.get(given, given)
        raise invalid(
            f"{other} and {name} are both given, and a text can obey one: leave one out", name
        )
    params = msgspec.structs.replace(sampling.params, **wanted)
    return Sampling(params, {**sampling.names, **dict.fromkeys(wanted, name)})


def _of_format(wanted: ResponseFormat) -> dict[str, Any]:
    match wanted.type:
        case "text":
            return {}
        case "json_object":
            return {"json_schema": ANY_OBJECT}
        case "json_schema":
            schema = (wanted.json_schema or {}).get("schema")
            if isinstance(schema, dict):
                return {"json_schema": schema}
            raise invalid(
                "response_format.json_schema.schema is missing: it must be a JSON schema",
                "response_format",
            )
        case "structural_tag":
            tag = {"structures": wanted.structures or [], "triggers": wanted.triggers or []}
            return {"structural_tag": tag}
    raise invalid(
        f"response_format.type is {wanted.type!r}: it must be 'text', 'json_object',"
        " 'json_schema' or 'structural_tag'",
        "response_format",
    )


def _of_outputs(wanted: StructuredOutputs) -> dict[str, Any]:
    """vLLM's names."""
    fields = {
        "json_schema": ANY_OBJECT if wanted.json_object else wanted.json,
        "regex": wanted.regex,
        "ebnf": wanted.grammar,
        "choice": wanted.choice,
        "structural_tag": wanted.structural_tag,
    }
    return {field: value for field, value in fields.items() if value is not None}


# --- calls ----------------------------------------------------------------------------------------


def take_calls(sampling: Sampling, call: ChatRequest, tool_format: str) -> tuple[Sampling, str]:
    """With what is asked of the calls, and the format in which they then come, "" for none.
    tool_format: the model's own. Raises ApiError."""
    if call.tool_choice == "none":
        return sampling, ""
    if call.tool_choice != "auto":
        return obeying(sampling, "tools", forced_call(call)), FORCED_FORMAT
    if tool_format and any(tool.function.strict for tool in call.tools):
        return obeying(sampling, "tools", free_calls(call, tool_format)), tool_format
    return sampling, tool_format if call.tools else ""
