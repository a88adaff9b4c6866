"""The C library's heap: two settings of glibc; nothing happens where the C library is another."""

import ctypes
import sys

M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
"""Of glibc's malloc.h."""
MMAP_BYTES = 1 << 20


def use_one_heap() -> None:
    """Have all threads share a heap. Call before a second thread starts.

    glibc gives each thread a heap of its own. Grammars are compiled by one thread, and freed by
    another with what their texts have added to them; the holes that this left were not filled
    again, and every grammar that came for the first time cost the worker 5 KB for good.
    """
    _set_option(M_ARENA_MAX, 1)


def map_large_blocks() -> None:
    """Have blocks of MMAP_BYTES and more mapped alone, so that freeing them gives memory back.

    Left to itself, glibc takes blocks of up to 32 MB from the heap once some have been freed, and
    a heap only shrinks from its end.
    """
    _set_option(M_MMAP_THRESHOLD, MMAP_BYTES)


def _set_option(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(option, value)
