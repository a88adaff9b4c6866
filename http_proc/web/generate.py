"""Answer web requests by the functions of the APIs, which know no HTTP."""

from aiohttp import web

from http_proc.core.answering import answer
from http_proc.core.call import Call
from http_proc.core.caller import current_caller
from http_proc.web.exchange import GATEWAY, RECORD, REQUEST_ID, ConnectionSink
from http_proc.web.request_body import read_bytes


async def answer_request(request: web.Request) -> web.StreamResponse:
    """Receive a call, and send its answer."""
    return await send_answer(request, await receive_call(request))


async def receive_call(request: web.Request) -> Call:
    """Return the call of a request, whose path has no parameters. Raise ApiError."""
    is_named = "X-Request-Id" in request.headers
    body = await read_bytes(request)
    return Call(request.path, body, request[REQUEST_ID], is_named, record=request[RECORD])


async def send_answer(request: web.Request, call: Call) -> web.StreamResponse:
    """Send the answer of a call. Return a whole one, which the middleware sends."""
    sink = ConnectionSink(request)
    body = await answer(request.app[GATEWAY], call, current_caller(), sink)
    return (
        sink.response if body is None else web.Response(body=body, content_type="application/json")
    )
