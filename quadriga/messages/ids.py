"""Lists of integers, as they travel: little-endian int32 bytes."""

import sys
from array import array
from collections.abc import Iterable


def pack_ids(ids: Iterable[int]) -> bytes:
    """Integers as little-endian int32 bytes. OverflowError where one does not fit."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> "array[int]":
    """The inverse of pack_ids. ValueError where the length is no multiple of 4."""
    ids = array("i")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
