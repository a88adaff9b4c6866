"""Lists of numbers, as they travel: little-endian bytes, 4 to a number."""

import sys
from array import array
from collections.abc import Iterable
from typing import Any

INT32, FLOAT32 = "i", "f"
"""Type codes of the array module."""


def pack_ids(ids: Iterable[int]) -> bytes:
    """Integers as int32 bytes. OverflowError where one does not fit."""
    return _pack(INT32, ids)


def unpack_ids(data: bytes) -> "array[int]":
    """The inverse of pack_ids. ValueError where the length is no multiple of 4."""
    return _unpack(INT32, data)


def pack_floats(values: Iterable[float]) -> bytes:
    """Numbers as float32 bytes."""
    return _pack(FLOAT32, values)


def unpack_floats(data: bytes) -> "array[float]":
    """The inverse of pack_floats. ValueError where the length is no multiple of 4."""
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
