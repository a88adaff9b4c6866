"""The web server: the table of all endpoints, the application, and the listening socket.

The table comes first, with GET /openapi.json and GET /docs, which are made of it; then the
application with its routes and middlewares; then address, TLS, time limits and connections.

A framework such as Litestar would generate the document and type the bodies. This code and aiohttp
are used instead because they cost less CPU time per event of a stream, on cores that the gateway
shares with the worker: docs/dependencies.md has the figures for aiohttp and for ASGI servers.
"""

import asyncio
import errno
import logging
import re
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import msgspec
from aiohttp import http_exceptions, web
from aiohttp.typedefs import Middleware
from aiohttp.web_protocol import RequestHandler

from http_proc.apis import (
    anthropic,
    decisions,
    embeddings,
    llama_cpp,
    ollama,
    openai,
    rerank,
    service,
    sglang,
)
from http_proc.apis.adapters import ADAPTER_ENDPOINTS
from http_proc.apis.fork import FORK_ENDPOINTS
from http_proc.apis.model_aliases import ALIAS_ENDPOINTS, open_aliases
from http_proc.apis.model_states import MODEL_STATE_ENDPOINTS, MODEL_STATES
from http_proc.apis.responses import background, conversations, endpoints, stored_responses
from http_proc.apis.service import TRACE_ENDPOINTS
from http_proc.core.answering import APIS, Answerer
from http_proc.core.errors import RETRY_AFTER_S, ApiError, invalid
from http_proc.core.gateway import Gateway
from http_proc.generation import sampling
from http_proc.jobs.batches import BATCH_ENDPOINTS, FILE_ENDPOINTS, batch_lifetime
from http_proc.page import metrics, pages, what_if
from http_proc.page.live import LIVE, close_hubs, live
from http_proc.page.pages import policy_of_inline, serve_page
from http_proc.web import access
from http_proc.web.endpoint import PLAIN, STREAM, Endpoint, Handler, answering, generating, post
from http_proc.web.exchange import GATEWAY, answer_request, expect_continue, unsupported_coding
from http_proc.web.request_scope import (
    ERROR_BODIES,
    UNREAD_ANSWERS,
    UnreadAnswers,
    add_header,
    request_scope,
)
from http_proc.web.resumable import STREAM_ENDPOINTS, answer_resumably, stream_lifetime
from quadriga import disk, errors
from quadriga.sampling.params import LIMITS, SamplingParams
from quadriga.server.config.frontend_args import HttpArgs
from quadriga.server.processes.machine import allow_open_files

_PATH_NAME = re.compile(r"\{(\w+)\}")
PAGE = (Path(__file__).parent / "page" / "docs.html").read_text(encoding="utf-8")
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
    of_sglang = {"type": "object", "properties": {}, "additionalProperties": False}
    _add_sampling(of_sglang, sampling.SGLANG, params)
    properties = components["GenerateRequest"]["properties"]
    properties["sampling_params"] = {"anyOf": [of_sglang, {"type": "null"}]}
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


async def openapi_json(_: web.Request) -> web.Response:
    """Return the document."""
    return web.Response(body=document(), content_type="application/json")


async def docs(_: web.Request) -> web.Response:
    """Return a page that shows the document and loads nothing from other hosts."""
    policy = {"Content-Security-Policy": PAGE_POLICY}
    return web.Response(text=PAGE, content_type="text/html", charset="utf-8", headers=policy)


ENDPOINTS = [
    Endpoint("/", pages.landing, "What is served, as JSON or for a browser as a page",
             pages.LandingAnswer),
    *openai.OPENAI_ENDPOINTS,
    *endpoints.RESPONSES_ENDPOINTS,
    *conversations.CONVERSATION_ENDPOINTS,
    *anthropic.ANTHROPIC_ENDPOINTS,
    *ollama.OLLAMA_ENDPOINTS,
    *llama_cpp.LLAMA_CPP_ENDPOINTS,
    *embeddings.EMBEDDING_ENDPOINTS,
    *decisions.DECISION_ENDPOINTS,
    *rerank.RERANK_ENDPOINTS,
    *FILE_ENDPOINTS,
    *BATCH_ENDPOINTS,
    *STREAM_ENDPOINTS,
    *FORK_ENDPOINTS,
    *TRACE_ENDPOINTS,
    *what_if.WHAT_IF_ENDPOINTS,
    *MODEL_STATE_ENDPOINTS,
    *ALIAS_ENDPOINTS,
    *ADAPTER_ENDPOINTS,
    Endpoint("/v1/models", service.models, "The model that is served", service.ModelList),
    Endpoint("/v1/models/{name}", service.model, "One model", service.ModelCard),
    generating("/generate", sglang.generate, "Complete prompts, in SGLang's format",
               sglang.GenerateRequest, sglang.GenerateAnswer, is_listed=True),
    answering("/tokenize", service.tokenize, "Token ids of a text or a chat",
              service.TokenizeRequest, service.TokenizeAnswer),
    answering("/detokenize", service.detokenize, "Text of token ids",
              service.DetokenizeRequest, service.DetokenizeAnswer),
    post("/abort_request", service.abort_request, "End requests",
          service.AbortBody, service.AbortAnswer),
    post("/flush_cache", service.flush_cache, "Free the unused cached prefixes",
          None, service.FlushAnswer),
    post("/v1/cache/release", service.release_cache, "Let go what requests have asked to keep",
         service.ReleaseBody, service.ReleaseAnswer),
    Endpoint("/livez", service.livez, "Whether this process can answer", service.HealthStatus),
    Endpoint("/readyz", service.readyz, "Whether the whole server can take requests",
             service.HealthStatus),
    Endpoint("/health", service.readyz, "The same as /readyz", service.HealthStatus),
    Endpoint("/server_info", service.server_info, "Configuration and state of the server",
             dict[str, Any]),
    Endpoint("/v1/live", live, "What the server does now: steps, requests, processes", STREAM),
    Endpoint("/metrics", metrics.metrics, "Gauges, counters and histograms for Prometheus", PLAIN),
    Endpoint("/openapi.json", openapi_json, "This document", None),
    Endpoint("/docs", docs, "A page that shows this document", None),
]  # fmt: skip
_DOCUMENTED = [endpoint for endpoint in ENDPOINTS if endpoint.response is not None]


def make_app(gateway: Gateway) -> web.Application:
    """Return the web application of a gateway."""
    args = gateway.args
    middlewares: list[Middleware] = [request_scope, access.page_check(args, gateway.config.tenants)]
    if not args.no_ui:
        middlewares.append(serve_page())
    if access.needs_key_check(args, gateway.config.tenants):
        middlewares.append(access.key_check(args, gateway.config.tenants, gateway.tenant_file))
    app = web.Application(middlewares=middlewares, client_max_size=args.max_body_bytes)
    app[GATEWAY] = gateway
    app[UNREAD_ANSWERS] = UnreadAnswers(gateway.shares)
    app[ERROR_BODIES] = {}
    gateway[APIS] = {one.path: cast(Answerer, one.handler) for one in ENDPOINTS if one.answers}
    open_aliases(gateway)
    gateway[LIVE], gateway[what_if.SIMULATION] = {}, what_if.SimulationProcess()
    app.cleanup_ctx.append(_parts)
    app.on_shutdown.append(_end_viewers)
    app.on_response_prepare.append(access.response_hook(args))
    app.on_response_prepare.append(add_header)
    routes = {"get": web.get, "post": web.post, "delete": web.delete}
    for endpoint in ENDPOINTS:
        route = routes[endpoint.method]
        # A model's name may contain slashes.
        path = endpoint.path.replace("{name}", "{name:.+}")
        added = route(path, _handler(endpoint), expect_handler=expect_continue)
        app[ERROR_BODIES][app.router.add_routes([added])[0].resource] = endpoint.error_body
    return app


def _handler(endpoint: Endpoint) -> Handler:
    """Return what answers the web requests of an endpoint."""
    if endpoint.answers:
        return answer_resumably if endpoint.is_resumable else answer_request
    return cast(Handler, endpoint.handler)


async def _parts(app: web.Application) -> AsyncIterator[None]:
    """Open what the gateway keeps and does by itself, and close it at the end."""
    async with AsyncExitStack() as stack:
        for lifetime in (
            stored_responses.store_lifetime,
            background.background_lifetime,
            batch_lifetime,
            stream_lifetime,
        ):
            await stack.enter_async_context(lifetime(app[GATEWAY]))
        yield


async def _end_viewers(app: web.Application) -> None:
    """End what has no end of its own."""
    close_hubs(app[GATEWAY])
    if (states := app[GATEWAY].get(MODEL_STATES)) is not None:
        states.note_change()
    app[GATEWAY][what_if.SIMULATION].end()


BACKLOG = 1024
# Of a connection, in the kernel. Left to itself it takes megabytes for each client that does not
# read, and the time to copy them.
SEND_BUFFER_BYTES = 128 * 1024
# A connection is closed if no complete request head arrives in this time.
IDLE_TIMEOUT_S = 60
# Time for the last answers to reach slow clients when the server stops.
FLUSH_TIMEOUT_S = 1.0
# A connection over the limit is closed after this time, whether it has sent a request or not.
OVERLOAD_TIMEOUT_S = 5.0
# Open files of this process that are not connections.
NUM_RESERVED_FILES = 64
MIN_CONNECTIONS = 4096  # that are answered, where the server holds fewer requests


def bind(args: HttpArgs) -> socket.socket:
    """Return a socket that listens on the configured address.

    Raises:
        AddressInUse: another process has the port.
        ConfigError: the address is invalid.
    """
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise errors.AddressInUse(
                f"port {args.port} of {args.host} is taken by another process; stop it, choose"
                " another port with --port, or serve no HTTP with --no-http"
            ) from None
        raise errors.ConfigError(f"cannot listen on {args.host}:{args.port}: {error}") from None
    return listener


def tls_context(args: HttpArgs) -> ssl.SSLContext | None:
    """Return the TLS context of --ssl-certfile and --ssl-keyfile, or None without them.

    Raises:
        ConfigError: a file cannot be read.
    """
    if not args.ssl_certfile:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        for file in filter(None, (args.ssl_certfile, args.ssl_keyfile)):
            disk.check_regular(file)
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile or None)
    except (OSError, ssl.SSLError) as error:
        raise errors.ConfigError(
            f"cannot read the certificate {args.ssl_certfile}: {error}"
        ) from None
    return context


class GatewayConnection(RequestHandler):
    """A connection that answers in the gateway's form also what no middleware sees.

    That is what aiohttp's parser refuses, and what aiohttp refuses before the application is
    called. The path, and so the API, of such a request is not known: OpenAI's form is taken.
    """

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - the parser's
    ) -> web.StreamResponse:
        """Answer a request that could not be read."""
        if request.writer.output_size > 0:
            raise ConnectionResetError("a part of the answer has been sent")
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            logging.error("a connection failed", exc_info=exc)
            error = ApiError(status, "the gateway failed; its log says why")
        else:
            error = refused_by_parser(exc)
        response = response_of(error)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: Any, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response; an error of aiohttp's own gets the gateway's form."""
        if isinstance(resp, web.HTTPException) and resp.status >= HTTPStatus.BAD_REQUEST:
            resp = response_of(ApiError(resp.status, resp.reason, code="refused"))
        if "Content-Encoding" in request.headers and not request.content.is_eof():
            # aiohttp would read the rest, and so unpack it, in one piece.
            self._lingering_time = 0.0
        return await super().finish_response(request, resp, start_time)


def refused_by_parser(error: BaseException | None) -> ApiError:
    """Return the 4xx for what aiohttp's parser refuses, without the parser's words."""
    if isinstance(error, http_exceptions.ContentEncodingError):
        return unsupported_coding()
    if isinstance(error, http_exceptions.LineTooLong):
        return ApiError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            "a line of the request's head is too long: at most 8,190 bytes are read",
            code="head_too_large",
        )
    return invalid("the bytes are no HTTP/1.0 or HTTP/1.1 request", code="invalid_http")


def response_of(error: ApiError) -> web.Response:
    """Return the answer to a request that reached no handler."""
    response = web.Response(
        body=error.body(), status=error.status, headers=error.headers(),
        content_type="application/json",
    )  # fmt: skip
    response.headers["Server"] = "quadriga"
    return response


async def make_runner(gateway: Gateway) -> web.AppRunner:
    """Return aiohttp's runner of the gateway's application, without connections."""
    runner = web.AppRunner(
        make_app(gateway),
        handler_cancellation=True,
        handle_signals=False,
        shutdown_timeout=FLUSH_TIMEOUT_S,
    )
    await runner.setup()
    return runner


async def listen(
    runner: web.AppRunner, listener: socket.socket, tls: ssl.SSLContext | None, gateway: Gateway
) -> asyncio.Server:
    """Accept connections. Connections over the limit are answered with 503."""
    limits = [model.config.scheduler for model in gateway.models]
    num_requests = sum(each.max_running_requests + each.max_queued_requests for each in limits)
    wanted = gateway.args.max_http_connections or max(MIN_CONNECTIONS, num_requests)
    max_connections = _max_connections(wanted)
    handlers = runner.server
    assert handlers is not None

    loop = asyncio.get_running_loop()

    def make_protocol() -> asyncio.Protocol:
        if len(handlers.connections) < max_connections:
            return GatewayConnection(
                handlers,
                loop=loop,
                keepalive_timeout=IDLE_TIMEOUT_S,
                access_log=None,  # type: ignore[arg-type]  # none is written, as by web.AppRunner
            )
        gateway.metrics.num_refused_connections += 1
        return OverloadedProtocol(max_connections)

    return await loop.create_server(make_protocol, sock=listener, ssl=tls, backlog=BACKLOG)


class OverloadedProtocol(asyncio.Protocol):
    """Answer any request with 503 because too many connections are open."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._has_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the time limit of the connection."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's type only looks like one
        asyncio.get_running_loop().call_later(OVERLOAD_TIMEOUT_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:  # noqa: ARG002
        """Answer the first bytes and discard the rest.

        A client that is disconnected while it sends its request may never see the answer.
        """
        if self._has_answered:
            return
        self._has_answered = True
        error = ApiError(
            503,
            f"{self._max_connections} connections are open, the limit of this server; try again",
            code="too_many_connections",
            retry_after=RETRY_AFTER_S,
        )
        body = error.body()
        self._transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nServer: quadriga\r\n"
            b"Content-Type: application/json\r\nRetry-After: %d\r\nContent-Length: %d\r\n\r\n"
            % (RETRY_AFTER_S, len(body))
            + body
        )
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()


def _max_connections(wanted: int) -> int:
    """Return `wanted`, or what the limit of open files allows if that is less."""
    allowed = max(allow_open_files(wanted + NUM_RESERVED_FILES) - NUM_RESERVED_FILES, 1)
    if allowed < wanted:
        logging.warning(
            "only %d HTTP connections are allowed, not %d: the limit of open files is too low;"
            " raise it (ulimit -n)",
            allowed,
            wanted,
        )
    return min(allowed, wanted)
