"""Receive, decode and type a request body; every error is a 4xx that names the field."""

import asyncio
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from aiohttp import HttpVersion11, web

from http_proc.core.body_shape import SMALL_BYTES, check_shape
from http_proc.core.caller import current_caller
from http_proc.core.errors import RETRY_AFTER_S, ApiError, invalid
from http_proc.core.gateway import GATEWAY
from http_proc.generation.sampling import wrong_type

BODY_TIMEOUT_S = 60.0
STEP_BYTES = 1024 * 1024

# Content-Encoding of bodies.
CODINGS = frozenset({"identity", "gzip", "deflate"})

# A body that was received before its handler reads it.
BODY = web.RequestKey("body", bytes)

T = TypeVar("T", bound=msgspec.Struct)
_decode = msgspec.json.Decoder().decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
NUMBERS = "that is out of range: integers have at most 4300 digits, others are below 1.8e308"


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


async def read_bytes(request: web.Request) -> bytes:
    """Receive the body, return it, and keep it for `read_object`.

    Raises:
        ApiError: the body is late or too large.
    """
    request[BODY] = await _receive_in_time(request)
    return request[BODY]


async def _receive_in_time(request: web.Request) -> bytes:
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


async def read_object(request: web.Request) -> dict[str, Any]:
    """Return the JSON object in the body.

    Other requests are served between the steps of a large body, each of which takes long.

    Raises:
        ApiError: the body is late, too large, not JSON, or not an object.
    """
    if BODY in request:
        data = request[BODY]
        del request[BODY]
    else:
        data = await _receive_in_time(request)
    await check_shape(data)
    try:
        body = _decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if "out of range" in str(error) and (field := _field_that_fails(data)):
            raise invalid(f"{field} holds a number {NUMBERS}", field, "invalid_json") from None
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    current_caller().set_user(body.get("user"))
    if len(data) > SMALL_BYTES:
        await asyncio.sleep(0)
    return body


def _field_that_fails(data: bytes | msgspec.Raw) -> str:
    """Return the path of the innermost field of an object that cannot be decoded; "" for none."""
    try:
        fields = _decode_fields(data)
    except (msgspec.DecodeError, RecursionError):
        return ""
    for name, value in fields.items():
        try:
            _decode(value)
        except (msgspec.DecodeError, RecursionError):
            inner = _field_that_fails(value)
            return f"{name}.{inner}" if inner else name
    return ""


async def _receive(request: web.Request) -> bytes:
    """Return the body, within the limits for one body and for all bodies together."""
    bodies, max_bytes = request.app[GATEWAY].bodies, request.client_max_size
    owner = current_caller().owner
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
                    "server_error",
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


def convert(body: dict[str, Any], body_type: type[T], sampling_names: Iterable[str] = ()) -> T:
    """Return the body as a typed object, or raise ApiError; null means "as if absent".

    `sampling_names`: fields that the request may have beside those of the type.
    """
    known = body_type.__struct_encode_fields__
    fields = {name: value for name, value in body.items() if value is not None or name not in known}
    try:
        return msgspec.convert(fields, body_type)
    except (msgspec.ValidationError, RecursionError) as error:
        raise wrong_type(error, {}, [*known, *sampling_names], body_type) from None
