"""Lists of numbers, as they travel: little-endian float32 bytes."""

import sys
from array import array
from collections.abc import Iterable


def pack_floats(values: Iterable[float]) -> bytes:
    """Numbers as little-endian float32 bytes."""
    packed = array("f", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_floats(data: bytes) -> "array[float]":
    """The inverse of pack_floats. ValueError where the length is no multiple of 4."""
    values = array("f")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
