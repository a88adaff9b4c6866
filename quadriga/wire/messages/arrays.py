"""Packing of number lists: little-endian, 4 bytes each."""

import sys
from array import array
from collections.abc import Iterable
from typing import Any

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
