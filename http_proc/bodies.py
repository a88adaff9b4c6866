"""From the bytes of a request to a typed one: whatever is wrong is a 400 that names the field."""

import asyncio
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from http_proc.errors import ApiError, invalid
from http_proc.sampling import wrong_type

BODY_TIMEOUT = 60.0
"""Seconds in which the whole body must have come."""

T = TypeVar("T")
_decode = msgspec.json.Decoder().decode


async def read_object(request: web.Request) -> dict[str, Any]:
    """The JSON object in the body, without the fields that are null: they mean "as if absent"."""
    try:
        data = await asyncio.wait_for(request.read(), BODY_TIMEOUT)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(
            413,
            f"the body is over {request.client_max_size} bytes; shorten the prompt, or start the"
            " server with a larger --max-body-bytes",
            code="body_too_large",
        ) from None
    try:
        body = _decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise invalid(f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    return {name: value for name, value in body.items() if value is not None}


def convert(body: dict[str, Any], kind: type[T]) -> T:
    """What is left of the body, typed. ApiError for wrong types, and for unknown fields."""
    try:
        return msgspec.convert(body, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise wrong_type(error, {}) from None
