"""Call: what a client asks of one of the APIs, wherever it comes from, and the JSON of its body.

A large body may have a limited number of values: the event loop stands still while a body is
decoded, 5 ms for 16 MB of text, but a second for 16 MB of empty lists. Counting takes 5 ms per
pass, and other requests are served between the passes.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec

from http_proc.core import caller, errors, observe
from http_proc.core.resumption import Resumption
from http_proc.core.session import NO_SESSION, CallSession

# Any body up to this size is decoded in a few milliseconds.
SMALL_BYTES = 256 * 1024
MAX_CONTAINERS = 131_072  # objects and arrays
SMALL_COUNT = 16
MAX_STRINGS = 131_072  # names and values
MAX_COMMAS = 1_048_576
# Per number: a float of many digits takes 15 us.
MAX_DIGITS = 64

_DIGITS_AS_ZEROS = bytes(ord("0") if chr(i).isdigit() and i < 128 else i for i in range(256))
_LONG_NUMBER = b"0" * (MAX_DIGITS + 1)

NUMBERS = "that is out of range: integers have at most 4300 digits, others are below 1.8e308"
_decode = msgspec.json.Decoder().decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


async def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in a body, and let the caller's user be the one that it names.

    Other requests are served between the steps of a large body, each of which takes long.

    Raises:
        ApiError: the body is too large, not JSON, or not an object.
    """
    await check_shape(data)
    try:
        body = _decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if "out of range" in str(error) and (field := _field_that_fails(data)):
            raise errors.invalid(
                f"{field} holds a number {NUMBERS}", field, "invalid_json"
            ) from None
        raise errors.invalid(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise errors.invalid("the body must be a JSON object", code="invalid_json")
    caller.current_caller().set_user(body.get("user"))
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


async def check_shape(body: bytes) -> None:
    """Raise ApiError for JSON with too many values or too long numbers. Other bytes may pass."""
    if len(body) <= SMALL_BYTES or not await _may_exceed_limits(body):
        return
    bare = body.replace(b"\\\\", b"")
    await asyncio.sleep(0)
    bare = bare.replace(b'\\"', b"")
    await asyncio.sleep(0)
    _check(bare.count(b'"') // 2, MAX_STRINGS, "strings")
    bare = b"".join(bare.split(b'"')[::2])  # every second piece is a string
    await asyncio.sleep(0)
    _check(bare.count(b"{") + bare.count(b"["), MAX_CONTAINERS, "objects and arrays")
    _check(bare.count(b","), MAX_COMMAS, "values")
    if _LONG_NUMBER in bare.translate(_DIGITS_AS_ZEROS):
        raise errors.invalid(f"the body has a number of more than {MAX_DIGITS} digits; shorten it")


def num_containers(body: bytes) -> int:
    """Return the number of objects and arrays in valid JSON; those of a short one may be more."""
    count = body.count(b"{") + body.count(b"[")
    if count <= SMALL_COUNT:
        return count
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return sum(part.count(b"{") + part.count(b"[") for part in bare.split(b'"')[::2])


async def _may_exceed_limits(body: bytes) -> bool:
    """Return whether a limit is exceeded if all characters are counted, also within strings."""
    for characters, limit in ((b'"', 2 * MAX_STRINGS), (b",", MAX_COMMAS), (b"{[", MAX_CONTAINERS)):
        if sum(body.count(character) for character in characters) > limit:
            return True
        await asyncio.sleep(0)
    return _LONG_NUMBER in body.translate(_DIGITS_AS_ZEROS)


def _check(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise errors.invalid(
            f"the body has {count} {what}: at most {limit} are taken; send several smaller requests"
        )


@dataclass(slots=True)
class Call:
    """A call of an API: of a web request, of a line of a batch, or of a resumable stream.

    Attributes:
        path: of the API's endpoint.
        body: the JSON as it came; empty once it was parsed.
        request_id: the X-Request-Id, of which the id of the answer is made.
        is_named: the client has chosen that id.
        priority: the priority in place of the body's; None: the body's.
        model: the name of the model in place of the body's; None: the body's.
        may_keep: the answer may be stored, and be made in the background.
        resumption: makes the answer the same again; None: the call is not resumable.
        session: the session that its headers name.
        record: what is logged of it.
    """

    path: str
    body: bytes
    request_id: str
    is_named: bool = False
    priority: int | None = None
    model: str | None = None
    may_keep: bool = True
    resumption: Resumption | None = None
    session: CallSession = NO_SESSION
    record: observe.CallRecord = field(default_factory=observe.CallRecord)

    async def parse(self) -> dict[str, Any]:
        """Return the JSON object in the body, whose bytes are kept no longer.

        Raises:
            ApiError: as `parse_object`.
        """
        data, self.body = self.body, b""
        fields = await parse_object(data)
        if self.priority is not None:
            fields["priority"] = self.priority
        if self.model is not None:
            fields["model"] = self.model
        return fields
