"""GET /openapi.json, made of the types that requests are checked with, and a page that shows it."""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from http_proc import sampling, schema
from http_proc.errors import ErrorAnswer
from http_proc.native import GenerateRequest
from http_proc.service import AbortBody, DetokenizeRequest, TokenizeRequest
from quadriga.sampling import SamplingParams

PAGE = Path(__file__).with_name("docs.html")

# path: (method, what it does, request type, its sampling fields, answer type)
_TABLE: list[tuple[str, str, str, Any, dict[str, str], Any]] = [
    ("/v1/completions", "post", "Complete prompts", schema.CompletionRequest, sampling.OPENAI,
     schema.CompletionBody),
    ("/v1/chat/completions", "post", "Answer a chat", schema.ChatRequest, sampling.CHAT,
     schema.ChatBody),
    ("/v1/models", "get", "The model that is served", None, {}, None),
    ("/v1/models/{name}", "get", "One model", None, {}, None),
    ("/generate", "post", "Complete prompts, in SGLang's shape", GenerateRequest, {}, None),
    ("/tokenize", "post", "Token ids of a text or a chat", TokenizeRequest, {}, None),
    ("/detokenize", "post", "Text of token ids", DetokenizeRequest, {}, None),
    ("/abort_request", "post", "End requests", AbortBody, {}, None),
    ("/flush_cache", "post", "Forget cached prefixes that nobody uses", None, {}, None),
    ("/livez", "get", "Whether this process can answer", None, {}, None),
    ("/readyz", "get", "Whether the whole server can take requests", None, {}, None),
    ("/health", "get", "The same as /readyz", None, {}, None),
    ("/server_info", "get", "How the server was started and what it does", None, {}, None),
    ("/metrics", "get", "Gauges, counters and histograms for Prometheus", None, {}, None),
]  # fmt: skip
_TYPES = (schema.CompletionRequest, schema.ChatRequest, schema.CompletionBody, schema.ChatBody,
          GenerateRequest, TokenizeRequest, DetokenizeRequest, AbortBody, ErrorAnswer,
          SamplingParams)  # fmt: skip


@cache
def document() -> bytes:
    """The OpenAPI 3.1 document as JSON."""
    _, components = msgspec.json.schema_components(
        _TYPES, ref_template="#/components/schemas/{name}"
    )
    for _, _, _, kind, fields, _ in _TABLE:
        if kind is not None:
            _complete(components[kind.__name__], fields, components["SamplingParams"])
    paths: dict[str, Any] = {}
    for path, method, what, kind, _, answered in _TABLE:
        paths[path] = {method: _operation(path, what, kind, answered)}
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
    properties.update({name: params["properties"][field] for name, field in fields.items()})
    for name in properties.keys() - set(schema.get("required", ())):
        properties[name] = {"anyOf": [properties[name], {"type": "null"}]}


def _operation(path: str, what: str, kind: Any, answered: Any) -> dict[str, Any]:
    content: dict[str, Any] = {} if answered is None else _json(answered)
    operation: dict[str, Any] = {
        "summary": what,
        "responses": {
            "200": {"description": "Done"} | ({"content": content} if content else {}),
            "default": {"description": "What went wrong", "content": _json(ErrorAnswer)},
        },
    }
    if answered is not None:
        content["text/event-stream"] = {}
    if kind is not None:
        operation["requestBody"] = {"required": True, "content": _json(kind)}
    if "{name}" in path:
        operation["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return operation


def _json(kind: Any) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}


async def openapi(request: web.Request) -> web.Response:
    return web.Response(body=document(), content_type="application/json")


async def docs(request: web.Request) -> web.FileResponse:
    """A page of its own: it needs nothing from other hosts."""
    return web.FileResponse(PAGE, headers={"Content-Type": "text/html; charset=utf-8"})
