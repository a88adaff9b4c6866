"""Integers beyond 64 bits, which msgpack does not have: decimal digits in an extension type.

They stand in JSON schemas of tools and in arguments of calls.
"""

from typing import Any

import msgspec

CODE = 1
MAX_DIGITS = 1024

_SMALLEST, _LARGEST = -(2**63), 2**64 - 1


def with_large_integers(message: Any) -> Any:
    """Return a message that msgpack can encode, whatever integers its maps and lists hold.

    Raises:
        OverflowError: an integer has more than MAX_DIGITS digits.
    """
    return _packed(msgspec.to_builtins(message, builtin_types=(bytes,)))


def unpack_integer(code: int, data: memoryview) -> Any:
    """Return the integer of an extension type, or another extension type as it is.

    Raises:
        ValueError: the data is not an integer of at most MAX_DIGITS digits.
    """
    if code != CODE:
        return msgspec.msgpack.Ext(code, bytes(data))
    text = bytes(data).decode("ascii", "replace")
    if len(text) > MAX_DIGITS + 1 or not text.removeprefix("-").isdecimal():
        raise ValueError(f"an integer must have 1 to {MAX_DIGITS} digits, not {text[:20]!r}")
    return int(text)


def _packed(value: Any) -> Any:
    if isinstance(value, dict):
        return {_packed(key): _packed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_packed(item) for item in value]
    if not isinstance(value, int) or _SMALLEST <= value <= _LARGEST:
        return value
    if abs(value) >= 10**MAX_DIGITS:
        raise OverflowError(f"an integer has more than {MAX_DIGITS} digits")
    return msgspec.msgpack.Ext(CODE, str(value).encode())
