"""Structured output: response_format, and vLLM's structured_outputs."""

from typing import Any

import msgspec

from http_proc.protocol.errors import invalid
from http_proc.protocol.sampling import Sampling
from http_proc.protocol.schema import OpenAIRequest, ResponseFormat, StructuredOutputs
from quadriga.sampling.json_schema import OPTIONS
from quadriga.sampling.params import GRAMMAR_FIELDS

ANY_OBJECT = {"type": "object"}


def with_response_format(sampling: Sampling, call: OpenAIRequest) -> Sampling:
    """Add the grammar of response_format or structured_outputs. Raises ApiError."""
    if call.response_format is not None:
        grammar = _response_format(call.response_format)
        sampling = with_grammar(sampling, "response_format", grammar)
    if call.structured_outputs is not None:
        grammar = _structured_outputs(call.structured_outputs)
        sampling = with_grammar(sampling, "structured_outputs", grammar)
    return sampling


def with_grammar(sampling: Sampling, name: str, grammar: dict[str, Any]) -> Sampling:
    """Add `grammar` (fields of SamplingParams), for which the request's field `name` asks."""
    if not grammar:
        return sampling
    field = next(
        (field for field in GRAMMAR_FIELDS if getattr(sampling.params, field) is not None), None
    )
    if field is not None:
        other = sampling.names.get(field, field)
        raise invalid(
            f"{other} and {name} are both given, and a text can obey one: leave one out", name
        )
    params = msgspec.structs.replace(sampling.params, **grammar)
    return Sampling(params, {**sampling.names, **dict.fromkeys(grammar, name)})


def lenient(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of which what no grammar can enforce is left out, instead of refused."""
    return {**schema, OPTIONS: {"lenient": True}}


def _response_format(wanted: ResponseFormat) -> dict[str, Any]:
    match wanted.type:
        case "text":
            return {}
        case "json_object":
            return {"json_schema": ANY_OBJECT}
        case "json_schema":
            given = wanted.json_schema or {}
            schema = given.get("schema")
            if isinstance(schema, dict):
                return {"json_schema": schema if given.get("strict") else lenient(schema)}
            raise invalid(
                "response_format.json_schema.schema is missing: it must be a JSON schema",
                "response_format",
            )
        case "structural_tag":
            if wanted.format is not None:
                return {"structural_tag": {"format": wanted.format}}
            tag = {"structures": wanted.structures or [], "triggers": wanted.triggers or []}
            return {"structural_tag": tag}
    raise invalid(
        f"response_format.type is {wanted.type!r}: it must be 'text', 'json_object',"
        " 'json_schema' or 'structural_tag'",
        "response_format",
    )


def _structured_outputs(wanted: StructuredOutputs) -> dict[str, Any]:
    fields = {
        "json_schema": ANY_OBJECT if wanted.json_object else wanted.json,
        "regex": wanted.regex,
        "ebnf": wanted.grammar,
        "choice": wanted.choice,
        "structural_tag": wanted.structural_tag,
    }
    return {field: value for field, value in fields.items() if value is not None}
