"""The outermost middleware: request id, slow-client guard, error bodies and the request log."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from http_proc.caller import current_caller
from http_proc.endpoints.request_body import check_head
from http_proc.gateway import GATEWAY, REQUEST_ID, request_id
from http_proc.middleware.slow_client import SlowClientGuard, UnreadAnswers
from http_proc.observe.request_log import RECORD, RequestLogRecord, log_request
from http_proc.protocol.errors import ApiError, from_ring, invalid
from http_proc.protocol.timings import SERVER_TIMING, server_timing, stages
from http_proc.shares import holding
from quadriga.errors import QuadrigaError
from quadriga.runtime.request_line import in_a_line

BROKEN_BODY = (
    "the body is not what its headers say: its Content-Encoding, Content-Length or chunks are wrong"
)
UNREAD_ANSWERS = web.AppKey("unread_answers", UnreadAnswers)
# The format of errors by the handler of an endpoint.
ERROR_BODIES = web.AppKey("error_bodies", dict[Any, Callable[[ApiError], bytes]])


@web.middleware
async def request_scope(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Run a handler and return after the client has received the whole answer."""
    gateway = request.app[GATEWAY]
    request[REQUEST_ID] = request_id(request)
    request[RECORD] = RequestLogRecord(request_id=request[REQUEST_ID])
    outcome = "the client left"
    try:
        with holding(), SlowClientGuard(request, gateway.metrics) as guard:
            response, outcome = await _answer(request, handler)
            _add_timing(request, response)
            size = _size_of_body(response)
            with request.app[UNREAD_ANSWERS].sending(guard, current_caller().owner, size):
                await response.prepare(request)
                await response.write_eof()
        return response
    finally:
        log_request(request, outcome, gateway.log_level)


def _size_of_body(response: web.StreamResponse) -> int:
    """Return the size of a whole answer; 0 for one that is sent in pieces."""
    body = response.body if isinstance(response, web.Response) else None
    return len(body) if isinstance(body, bytes | bytearray) else 0


def _add_timing(request: web.Request, response: web.StreamResponse) -> None:
    """Add the stages of the first choice to the headers of a whole answer."""
    completions = request[RECORD].completions
    if completions and not response.prepared:
        response.headers[SERVER_TIMING] = server_timing(stages(completions[0].timings))


async def _answer(request: web.Request, handler: Handler) -> tuple[web.StreamResponse, str]:
    """Return the answer, or an error in the API's format, and the outcome for the log."""
    try:
        check_head(request)
        response = await handler(request)
        request[RECORD].status = response.status
        return response, str(response.status)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:
        if isinstance(error, web.HTTPException) and error.status < 400:
            raise
        api_error = _api_error(request, error)
        api_error.request_id = request[REQUEST_ID]
    code = api_error.answer.error.code
    record = request[RECORD]
    record.status, record.code = api_error.status, code or ""
    record.error = str(api_error)
    request.app[GATEWAY].metrics.count_error(code or str(api_error.status))
    response = web.Response(
        body=_error_body(request, api_error),
        status=api_error.status,
        headers=api_error.headers(),
        content_type="application/json",
    )
    return response, f"{api_error.status} {code or ''}".rstrip()


def _error_body(request: web.Request, error: ApiError) -> bytes:
    """Return the body in the format of the endpoint's API; OpenAI's if there is no endpoint."""
    handler = request.match_info.handler
    return request.app[ERROR_BODIES].get(handler, ApiError.body)(error)


def _api_error(request: web.Request, error: Exception) -> ApiError:
    """Convert what a handler raised. An unexpected exception is logged and becomes a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QuadrigaError):
        return from_ring(error, {})
    if isinstance(error, web.RequestPayloadError | HttpProcessingError):
        return invalid(BROKEN_BODY, code="invalid_body")
    if isinstance(error, web.HTTPException):
        code = error.reason.lower().replace(" ", "_")
        api_error = ApiError(error.status, _message(request, error), code=code)
        api_error.allow = error.headers.get("Allow")
        return api_error
    logging.error("%s failed", in_a_line(f"{request.method} {request.path}"), exc_info=error)
    if request.writer.output_size:
        raise ConnectionResetError("a part of the answer has been sent") from None
    return ApiError(500, "the gateway failed on this request; its log says why", "server_error")


def _message(request: web.Request, error: web.HTTPException) -> str:
    if isinstance(error, web.HTTPNotFound):
        return f"there is no {request.path} here; /openapi.json lists what there is"
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = " or ".join(sorted(error.allowed_methods))
        return f"{request.method} is not for {request.path}: use {allowed}"
    return error.reason
