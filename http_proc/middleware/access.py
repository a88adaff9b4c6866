"""Who may call, from which pages, and in what shape errors leave."""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable

from aiohttp import HttpVersion11, web

from http_proc.gateway import GATEWAY, REQUEST_ID, request_id
from http_proc.middleware.slow_client import SlowClientGuard
from http_proc.observe.request_log import RECORD, RequestLogRecord, in_a_line, log_request
from http_proc.protocol.errors import ApiError, from_ring
from quadriga.config.http_args import HttpArgs
from quadriga.errors import QuadrigaError

PROBES = frozenset({"/livez", "/readyz", "/health"})
"""Open to everybody: who watches over a server should not need its keys."""
PREFLIGHT_SECONDS = "600"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Signer = Callable[[web.Request, web.StreamResponse], Awaitable[None]]
Middleware = Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]


@web.middleware
async def serve(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Around everything: until the client has taken its answer, or has left."""
    gateway = request.app[GATEWAY]
    request[REQUEST_ID] = request_id(request)
    request[RECORD] = RequestLogRecord()
    outcome = "the client left"
    try:
        with SlowClientGuard(request, gateway.metrics):
            response, outcome = await _answer(request, handler)
            await response.prepare(request)
            await response.write_eof()
        return response
    finally:
        if gateway.args.log_requests and request.method == "POST":
            log_request(request, outcome)


async def _answer(request: web.Request, handler: Handler) -> tuple[web.StreamResponse, str]:
    """Whatever goes wrong leaves in OpenAI's shape; what nobody expected is logged, and a 500."""
    try:
        response = await handler(request)
        return response, str(response.status)
    except ApiError as error:
        found = error
    except QuadrigaError as error:
        found = from_ring(error, {})
    except web.HTTPException as error:
        if error.status < 400:
            raise
        found = ApiError(error.status, _said(request, error), code=_code(error))
        found.allow = error.headers.get("Allow")
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        logging.exception("%s failed", in_a_line(f"{request.method} {request.path}"))
        if request.writer.output_size:
            raise ConnectionResetError("half an answer has been sent") from None
        found = ApiError(
            500, "the gateway failed on this request; its log says why", "server_error"
        )
    code = found.answer.error.code or str(found.status)
    request.app[GATEWAY].metrics.count_error(code)
    response = web.Response(
        body=found.body(),
        status=found.status,
        headers=found.headers(),
        content_type="application/json",
    )
    return response, f"{found.status} {found.answer.error.code or ''}".rstrip()


def _said(request: web.Request, error: web.HTTPException) -> str:
    if isinstance(error, web.HTTPNotFound):
        return f"there is no {request.path} here; /openapi.json lists what there is"
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = " or ".join(sorted(error.allowed_methods))
        return f"{request.method} is not for {request.path}: use {allowed}"
    return error.reason


def _code(error: web.HTTPException) -> str:
    return error.reason.lower().replace(" ", "_")


def key_check(args: HttpArgs) -> Middleware:
    """Lets through who has one of the keys, and everybody to the probes."""
    keys = [_as_bytes(key) for key in args.api_keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in PROBES and request.method != "OPTIONS":
            given = _as_bytes(request.headers.get("Authorization", "").removeprefix("Bearer "))
            # All are compared, so that the time tells nothing.
            if sum(hmac.compare_digest(given, key) for key in keys) == 0:
                raise ApiError(
                    401,
                    "no valid API key: send one as 'Authorization: Bearer KEY'",
                    "authentication_error",
                    code="invalid_api_key",
                )
        return await handler(request)

    return check


def _as_bytes(text: str) -> bytes:
    """Encode what Python has decoded from bytes that need not be UTF-8: headers, arguments."""
    return text.encode("utf-8", "surrogateescape")


async def expect(request: web.Request) -> None:
    """Let a client that asks first send its body. aiohttp's own handler puts the header into its
    refusal, which fails where the header is no UTF-8."""
    if request.version < HttpVersion11:
        return
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="Expect may be 100-continue only")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # nothing of the answer has been sent


@web.middleware
async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A browser asks before it lets a page of another origin send a request."""
    if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
        return web.Response(status=204)
    return await handler(request)


def header_signer(args: HttpArgs) -> Signer:
    """Puts the request's id, and what a page of another origin needs, on every answer."""
    origins = args.origins

    async def sign(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "quadriga"
        response.headers["X-Request-Id"] = request.get(REQUEST_ID) or request_id(request)
        origin = request.headers.get("Origin")
        if origin is None or not ("*" in origins or origin in origins):
            return
        response.headers["Access-Control-Allow-Origin"] = "*" if "*" in origins else origin
        response.headers["Vary"] = "Origin"
        response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
        if request.method == "OPTIONS":
            response.headers["Access-Control-Allow-Methods"] = "GET, POST"
            asked = request.headers.get("Access-Control-Request-Headers", "")
            response.headers["Access-Control-Allow-Headers"] = asked
            response.headers["Access-Control-Max-Age"] = PREFLIGHT_SECONDS

    return sign
