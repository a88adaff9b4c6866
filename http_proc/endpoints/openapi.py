"""GET /openapi.json, made of the types that requests are checked with, and a page that shows it."""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from http_proc.endpoints import service
from http_proc.endpoints.sglang_generate import GenerateAnswer, GenerateRequest
from http_proc.protocol import sampling, schema
from http_proc.protocol.errors import ErrorAnswer
from quadriga.sampling.limits import LIMITS
from quadriga.sampling.params import SamplingParams

PAGE = Path(__file__).with_name("docs.html")
STREAM, PLAIN = "text/event-stream", "text/plain"


class Endpoint(NamedTuple):
    """takes: the body's type, if it has one, with sampling fields by these names; gives: the
    answer's type. streams: it may be a stream instead, listed: or a list of such."""

    path: str
    what: str
    gives: Any
    takes: Any = None
    fields: dict[str, str] | None = None
    method: str = "get"
    streams: bool = False
    listed: bool = False


def _post(path: str, what: str, takes: Any, gives: Any, **more: Any) -> Endpoint:
    return Endpoint(path, what, gives, takes, method="post", **more)


ENDPOINTS = [
    _post("/v1/completions", "Complete prompts", schema.CompletionRequest, schema.CompletionBody,
          fields=sampling.OPENAI, streams=True),
    _post("/v1/chat/completions", "Answer a chat", schema.ChatRequest, schema.ChatBody,
          fields=sampling.CHAT, streams=True),
    Endpoint("/v1/models", "The model that is served", service.ModelList),
    Endpoint("/v1/models/{name}", "One model", service.ModelCard),
    _post("/generate", "Complete prompts, in SGLang's shape", GenerateRequest, GenerateAnswer,
          streams=True, listed=True),
    _post("/tokenize", "Token ids of a text or a chat", service.TokenizeRequest,
          service.TokenizeAnswer),
    _post("/detokenize", "Text of token ids", service.DetokenizeRequest, service.DetokenizeAnswer),
    _post("/abort_request", "End requests", service.AbortBody, service.AbortAnswer),
    _post("/flush_cache", "Forget cached prefixes that nobody uses", None, service.FlushAnswer),
    Endpoint("/livez", "Whether this process can answer", service.HealthStatus),
    Endpoint("/readyz", "Whether the whole server can take requests", service.HealthStatus),
    Endpoint("/health", "The same as /readyz", service.HealthStatus),
    Endpoint("/server_info", "How the server was started and what it does", dict[str, Any]),
    Endpoint("/metrics", "Gauges, counters and histograms for Prometheus", PLAIN),
]  # fmt: skip


@cache
def document() -> bytes:
    """The OpenAPI 3.1 document as JSON."""
    types: list[Any] = [ErrorAnswer, SamplingParams]
    for endpoint in ENDPOINTS:
        types += [kind for kind in (endpoint.takes, endpoint.gives) if isinstance(kind, type)]
    _, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    params = components["SamplingParams"]["properties"]
    for endpoint in ENDPOINTS:
        if endpoint.takes is not None:
            _complete(components[endpoint.takes.__name__], endpoint.fields or {}, params)
    native = {"type": "object", "properties": {}, "additionalProperties": False}
    _complete(native, sampling.NATIVE, params)
    properties = components["GenerateRequest"]["properties"]
    properties["sampling_params"] = {"anyOf": [native, {"type": "null"}]}
    paths = {one.path: {one.method: _operation(one)} for one in ENDPOINTS}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Quadriga", "version": "1"},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
        }
    )


def _complete(schema: dict[str, Any], fields: dict[str, str], params: dict[str, Any]) -> None:
    """Add the sampling fields, with SamplingParams' own types. null means "as if absent"."""
    properties = schema["properties"]
    for name, field in fields.items():
        properties[name] = params[field] | _bounds(field, params[field])
    for name in properties.keys() - set(schema.get("required", ())):
        properties[name] = {"anyOf": [properties[name], {"type": "null"}]}


def _bounds(field: str, kind: dict[str, Any]) -> dict[str, Any]:
    """The range of a sampling field, which its type does not say."""
    limit = LIMITS.get(field)
    if limit is None:
        return {}
    items = "Properties" if kind.get("type") == "object" else "Items"
    lowest = "exclusiveMinimum" if limit.excludes_minimum else "minimum"
    bounds: dict[str, float | None] = {
        f"min{items}": limit.min_items or None,
        f"max{items}": limit.max_items,
    }
    if limit.max_items is None:
        # 0 tokens: the echo of the prompt alone.
        bounds[lowest] = 0 if field == "max_new_tokens" else limit.minimum
        bounds["maximum"] = limit.maximum
    return {name: bound for name, bound in bounds.items() if bound is not None}


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": endpoint.what,
        "responses": {
            "200": {"description": "Done", "content": _answers(endpoint)},
            "default": {"description": "What went wrong", "content": _json(_ref(ErrorAnswer))},
        },
    }
    if endpoint.takes is not None:
        operation["requestBody"] = {"required": True, "content": _json(_ref(endpoint.takes))}
    if "{name}" in endpoint.path:
        operation["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return operation


def _answers(endpoint: Endpoint) -> dict[str, Any]:
    if endpoint.gives == PLAIN:
        return {PLAIN: {"schema": {"type": "string"}}}
    one = _ref(endpoint.gives) if isinstance(endpoint.gives, type) else {"type": "object"}
    whole = {"anyOf": [one, {"type": "array", "items": one}]} if endpoint.listed else one
    return _json(whole) | ({STREAM: {}} if endpoint.streams else {})


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _ref(kind: Any) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


async def openapi(request: web.Request) -> web.Response:
    """The document."""
    return web.Response(body=document(), content_type="application/json")


async def docs(request: web.Request) -> web.FileResponse:
    """A page of its own: it needs nothing from other hosts."""
    return web.FileResponse(PAGE, headers={"Content-Type": "text/html; charset=utf-8"})
