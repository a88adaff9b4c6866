"""From the bytes of a request to a typed one: whatever is wrong is a 400 that names the field."""

import asyncio
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from http_proc.endpoints.body_shape import check_shape
from http_proc.gateway import GATEWAY
from http_proc.protocol.errors import RETRY_AFTER, ApiError, invalid
from http_proc.protocol.sampling import wrong_type

BODY_TIMEOUT = 60.0
"""Seconds in which the whole body must have come."""
MAX_BYTES = 256 * 1024 * 1024
"""Of bodies that are being received at one time, or of one body where one may have more."""

T = TypeVar("T", bound=msgspec.Struct)
_decode = msgspec.json.Decoder().decode


async def read_object(request: web.Request) -> dict[str, Any]:
    """The JSON object in the body."""
    try:
        data = await asyncio.wait_for(_receive(request), BODY_TIMEOUT)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT:g} s") from None
    await check_shape(data)
    try:
        body = _decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise invalid(f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    return body


async def _receive(request: web.Request) -> bytes:
    """The body, within the bounds of one and of all at a time."""
    gateway, most = request.app[GATEWAY], request.client_max_size
    if (request.content_length or 0) > most:
        raise _too_large(most)
    body = bytearray()
    try:
        async for piece in request.content.iter_any():
            body += piece
            gateway.body_bytes += len(piece)
            if len(body) > most:
                raise _too_large(most)
            if gateway.body_bytes > max(MAX_BYTES, most):
                raise ApiError(
                    503,
                    f"bodies of {gateway.body_bytes} bytes are being received, and at most"
                    f" {MAX_BYTES} are taken at one time; try again",
                    "server_error",
                    code="too_many_bodies",
                    retry_after=RETRY_AFTER,
                )
    finally:
        gateway.body_bytes -= len(body)
    return bytes(body)


def _too_large(most: int) -> ApiError:
    return ApiError(
        413,
        f"the body is over {most} bytes; shorten the prompt, or start the server with a larger"
        " --max-body-bytes",
        code="body_too_large",
    )


def convert(body: dict[str, Any], kind: type[T]) -> T:
    """What is left of the body, typed; null means "as if absent". ApiError for wrong types, and for
    unknown fields."""
    known = kind.__struct_encode_fields__
    fields = {name: v for name, v in body.items() if v is not None or name not in known}
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise wrong_type(error, {}) from None
