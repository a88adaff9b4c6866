"""One web request: how its body is received, and how its answer is sent."""

import asyncio
import re
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web

from http_proc.core import answering, caller, gateway, observe, streaming
from http_proc.core.call import Call, parse_object
from http_proc.core.errors import RETRY_AFTER_S, ApiError
from http_proc.core.served_model import ServedModel
from http_proc.core.session import session_of

GATEWAY = web.AppKey("gateway", gateway.Gateway)
REQUEST_ID = web.RequestKey("request_id", str)
RECORD = web.RequestKey("record", observe.CallRecord)

BODY_TIMEOUT_S = 60.0
STEP_BYTES = 1024 * 1024
# Content-Encoding of bodies.
CODINGS = frozenset({"identity", "gzip", "deflate"})
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

MAX_REQUEST_ID_CHARS = 100
_REQUEST_ID = re.compile(rf"[\w.:-]{{1,{MAX_REQUEST_ID_CHARS}}}", re.ASCII)


def request_id(request: web.Request) -> str:
    """Return the client's X-Request-Id if it is well-formed, else a new id."""
    client_id = request.headers.get("X-Request-Id", "")
    return client_id if _REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex


async def expect_continue(request: web.Request) -> None:
    """Answer `Expect: 100-continue`; `check_head` refuses anything else."""
    if request.version < HttpVersion11 or request.headers["Expect"].lower() != "100-continue":
        return
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the interim response is not part of the answer


def check_head(request: web.Request) -> None:
    """Raise ApiError for headers that ask for what the gateway cannot do."""
    expected = request.headers.get("Expect", "100-continue")
    if expected.lower() != "100-continue" and request.version >= HttpVersion11:
        raise ApiError(
            417,
            "the header Expect may be 100-continue only: leave it out",
            code="expectation_failed",
        )
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in CODINGS:
        raise unsupported_coding()


def unsupported_coding() -> ApiError:
    """Return the 415 for a body in a Content-Encoding that cannot be read."""
    return ApiError(
        415,
        f"the header Content-Encoding may be {', '.join(sorted(CODINGS))}: leave it out, and send"
        " the body as it is",
        code="unsupported_content_encoding",
    )


async def read_object(request: web.Request) -> dict[str, Any]:
    """Return the JSON object in the body.

    Raises:
        ApiError: as `read_bytes` and `parse_object`.
    """
    return await parse_object(await read_bytes(request))


async def read_bytes(request: web.Request) -> bytes:
    """Return the body.

    Raises:
        ApiError: the body is late or too large.
    """
    # Before Python 3.12, asyncio.wait_for drops a cancellation that comes with the last byte.
    late = asyncio.TimeoutError()
    timer = asyncio.get_running_loop().call_later(
        BODY_TIMEOUT_S, request.content.set_exception, late
    )
    try:
        return await _receive(request)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    finally:
        timer.cancel()


async def _receive(request: web.Request) -> bytes:
    """Return the body, within the limits for one body and for all bodies together."""
    bodies, max_bytes = request.app[GATEWAY].bodies, request.client_max_size
    owner = caller.current_caller().owner
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async for piece in request.content.iter_any():
            if len(body) + len(piece) > max_bytes:
                raise _too_large(max_bytes)
            if not bodies.take(owner, len(piece)):
                raise ApiError(
                    503,
                    f"bodies of {bodies.total} bytes are being received, and at most"
                    f" {bodies.limit} are taken at one time, with a share for each tenant; try"
                    " again",
                    code="too_many_bodies",
                    retry_after=RETRY_AFTER_S,
                )
            body += piece
            num_steps = len(body) // STEP_BYTES
            if num_steps > (len(body) - len(piece)) // STEP_BYTES:
                await asyncio.sleep(0)  # a body that is unpacked never waits for its next piece
    finally:
        bodies.give_back(owner, len(body))
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body is over {max_bytes} bytes; shorten the prompt, or start the server with a larger"
        " --max-body-bytes",
        code="body_too_large",
    )


def model_of(request: web.Request) -> ServedModel:
    """Return the model that the query names; without a name, the default one.

    Raises:
        ApiError: 404, no model is called so.
    """
    models, name = request.app[GATEWAY].models, request.query.get("model")
    if name is None:
        return models.default
    if (model := models.find(name)) is None:
        raise models.missing(name)
    return model


def json_response(body: Any) -> web.Response:
    """Return a 200 with a JSON body."""
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def headers_of(opening: streaming.Opening) -> dict[str, str]:
    """Return the headers of a stream."""
    headers = HEADERS | {"Content-Type": opening.framing.content_type}
    timing = observe.server_timing(opening.stages)
    return headers | ({observe.SERVER_TIMING: timing} if timing else {})


class ConnectionSink:
    """An EventSink that sends the events to the client at once.

    Args:
        request: asks for the stream.
        headers: those beside the stream's own.

    Attributes:
        response: what is sent.
    """

    def __init__(self, request: web.Request, headers: Mapping[str, str] | None = None) -> None:
        self._request, self._headers = request, headers or {}
        self.response = web.StreamResponse()

    async def open(self, opening: streaming.Opening) -> None:
        """Send the headers."""
        self.response.headers.update({**headers_of(opening), **self._headers})
        await self.response.prepare(self._request)

    async def write(self, data: bytes | memoryview) -> None:
        """Send events. Wait while the connection's buffer is full."""
        await self.response.write(data)

    async def comment(self, line: bytes) -> None:
        """Send a comment."""
        await self.response.write(line)

    async def close(self) -> None:
        """Send the end of the body."""
        await self.response.write_eof()


async def answer_request(request: web.Request) -> web.StreamResponse:
    """Receive a call, and send its answer."""
    return await send_answer(request, await receive_call(request))


async def receive_call(request: web.Request) -> Call:
    """Return the call of a request, whose path has no parameters. Raise ApiError."""
    is_named = "X-Request-Id" in request.headers
    session = session_of(request.headers)
    body = await read_bytes(request)
    return Call(
        request.path, body, request[REQUEST_ID], is_named, session=session, record=request[RECORD]
    )


async def send_answer(request: web.Request, call: Call) -> web.StreamResponse:
    """Send the answer of a call. Return a whole one, which the middleware sends."""
    sink = ConnectionSink(request)
    body = await answering.answer(request.app[GATEWAY], call, caller.current_caller(), sink)
    return (
        sink.response if body is None else web.Response(body=body, content_type="application/json")
    )
