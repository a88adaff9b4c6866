"""GET /openapi.json, generated from the types that check the requests, and GET /docs.

A framework such as Litestar would generate the document and type the bodies. This code and aiohttp
are used instead because they cost less CPU time per event of a stream, on cores that the gateway
shares with the worker: docs/dependencies.md has the figures for aiohttp and for ASGI servers.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from http_proc.apis import sglang_generate
from http_proc.apis.anthropic.endpoints import ANTHROPIC_ENDPOINTS
from http_proc.apis.batch.endpoints import BATCH_ENDPOINTS
from http_proc.apis.conversations.endpoints import CONVERSATION_ENDPOINTS
from http_proc.apis.files.endpoints import FILE_ENDPOINTS
from http_proc.apis.llama_cpp.endpoints import LLAMA_CPP_ENDPOINTS
from http_proc.apis.ollama.endpoints import OLLAMA_ENDPOINTS
from http_proc.apis.openai.endpoints import OPENAI_ENDPOINTS
from http_proc.apis.responses.endpoints import RESPONSES_ENDPOINTS
from http_proc.endpoints import landing, metrics, service
from http_proc.endpoints.endpoint import PLAIN, STREAM, Endpoint, post
from http_proc.endpoints.traces import TRACE_ENDPOINTS
from http_proc.live.endpoint import live
from http_proc.protocol import sampling
from http_proc.streams.endpoints import STREAM_ENDPOINTS
from http_proc.ui.page import policy_of_inline
from http_proc.what_if.endpoint import WHAT_IF_ENDPOINTS
from quadriga.sampling.limits import LIMITS
from quadriga.sampling.params import SamplingParams

_PATH_NAME = re.compile(r"\{(\w+)\}")
PAGE = Path(__file__).with_name("docs.html").read_text(encoding="utf-8")
PAGE_POLICY = policy_of_inline(PAGE)


@cache
def document() -> bytes:
    """Return the OpenAPI 3.1 document as JSON."""
    types: list[Any] = [SamplingParams]
    for endpoint in _DOCUMENTED:
        bodies = (endpoint.body, endpoint.response, endpoint.error)
        types += [body for body in bodies if isinstance(body, type)]
    _, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    params = components["SamplingParams"]["properties"]
    for endpoint in _DOCUMENTED:
        if endpoint.body is not None:
            _add_sampling(components[endpoint.body.__name__], endpoint.sampling or {}, params)
    sglang = {"type": "object", "properties": {}, "additionalProperties": False}
    _add_sampling(sglang, sampling.SGLANG, params)
    properties = components["GenerateRequest"]["properties"]
    properties["sampling_params"] = {"anyOf": [sglang, {"type": "null"}]}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in _DOCUMENTED:
        paths.setdefault(endpoint.path, {})[endpoint.method] = _operation(endpoint)
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


def _add_sampling(schema: dict[str, Any], fields: dict[str, str], params: dict[str, Any]) -> None:
    """Add sampling fields with SamplingParams' types, and make optional fields nullable."""
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
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": "Done", "content": _response(endpoint)},
            "default": {"description": "What went wrong", "content": _json(_ref(endpoint.error))},
        },
    }
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {endpoint.body_type: {"schema": _ref(endpoint.body)}},
        }
    if names := _PATH_NAME.findall(endpoint.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return operation


def _response(endpoint: Endpoint) -> dict[str, Any]:
    if isinstance(endpoint.response, str):  # a content type
        return {endpoint.response: {"schema": {"type": "string"}}}
    schema = _ref(endpoint.response) if isinstance(endpoint.response, type) else {"type": "object"}
    if endpoint.is_listed:
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    return _json(schema) | ({endpoint.stream_type: {}} if endpoint.streams else {})


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _ref(body_type: Any) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{body_type.__name__}"}


async def openapi(_: web.Request) -> web.Response:
    """Return the document."""
    return web.Response(body=document(), content_type="application/json")


async def docs(_: web.Request) -> web.Response:
    """Return a page that shows the document and loads nothing from other hosts."""
    policy = {"Content-Security-Policy": PAGE_POLICY}
    return web.Response(text=PAGE, content_type="text/html", charset="utf-8", headers=policy)


ENDPOINTS = [
    Endpoint("/", landing.landing, "What is served, as JSON or for a browser as a page",
             landing.LandingAnswer),
    *OPENAI_ENDPOINTS,
    *RESPONSES_ENDPOINTS,
    *CONVERSATION_ENDPOINTS,
    *ANTHROPIC_ENDPOINTS,
    *OLLAMA_ENDPOINTS,
    *LLAMA_CPP_ENDPOINTS,
    *FILE_ENDPOINTS,
    *BATCH_ENDPOINTS,
    *STREAM_ENDPOINTS,
    *TRACE_ENDPOINTS,
    *WHAT_IF_ENDPOINTS,
    Endpoint("/v1/models", service.models, "The model that is served", service.ModelList),
    Endpoint("/v1/models/{name}", service.model, "One model", service.ModelCard),
    post("/generate", sglang_generate.generate, "Complete prompts, in SGLang's format",
          sglang_generate.GenerateRequest, sglang_generate.GenerateAnswer,
          streams=True, is_listed=True),
    post("/tokenize", service.tokenize, "Token ids of a text or a chat",
          service.TokenizeRequest, service.TokenizeAnswer),
    post("/detokenize", service.detokenize, "Text of token ids",
          service.DetokenizeRequest, service.DetokenizeAnswer),
    post("/abort_request", service.abort_request, "End requests",
          service.AbortBody, service.AbortAnswer),
    post("/flush_cache", service.flush_cache, "Free the unused cached prefixes",
          None, service.FlushAnswer),
    Endpoint("/livez", service.livez, "Whether this process can answer", service.HealthStatus),
    Endpoint("/readyz", service.readyz, "Whether the whole server can take requests",
             service.HealthStatus),
    Endpoint("/health", service.readyz, "The same as /readyz", service.HealthStatus),
    Endpoint("/server_info", service.server_info, "Configuration and state of the server",
             dict[str, Any]),
    Endpoint("/v1/live", live, "What the server does now: steps, requests, processes", STREAM),
    Endpoint("/metrics", metrics.metrics, "Gauges, counters and histograms for Prometheus", PLAIN),
    Endpoint("/openapi.json", openapi, "This document", None),
    Endpoint("/docs", docs, "A page that shows this document", None),
]  # fmt: skip
_DOCUMENTED = [endpoint for endpoint in ENDPOINTS if endpoint.response is not None]
