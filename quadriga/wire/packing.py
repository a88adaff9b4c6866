"""How numbers travel that msgpack has no compact form for: lists of them, and large integers.

Lists are packed as little-endian values of 4 bytes each. Integers beyond 64 bits are decimal digits
in an extension type.
"""

import sys
from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

# Type codes of the array module.
INT32, FLOAT32 = "i", "f"


def pack_ids(ids: Iterable[int]) -> bytes:
    """Pack integers as int32. Raise OverflowError if one does not fit."""
    return _pack(INT32, ids)


def unpack_ids(data: bytes) -> "array[int]":
    """Unpack int32 numbers. Raise ValueError if the length is not a multiple of 4."""
    return _unpack(INT32, data)


def num_ids(data: bytes) -> int:
    """Return the number of packed int32 numbers."""
    return len(data) // 4


def pack_floats(values: Iterable[float]) -> bytes:
    """Pack numbers as float32."""
    return _pack(FLOAT32, values)


def unpack_floats(data: bytes) -> "array[float]":
    """Unpack float32 numbers. Raise ValueError if the length is not a multiple of 4."""
    return _unpack(FLOAT32, data)


def _pack(code: str, numbers: Iterable[Any]) -> bytes:
    packed = array(code, numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(code: str, data: bytes) -> "array[Any]":
    numbers = array(code)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


# Integers beyond 64 bits. JSON schemas of tools and arguments of calls have them.

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
