"""Settings of glibc's malloc; no effect with another C library."""

import ctypes
import sys

# From glibc's malloc.h.
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
MMAP_BYTES = 1 << 20


def use_one_heap() -> None:
    """Make all threads share one heap. Call it before a second thread starts.

    glibc gives each thread a heap. Grammars are compiled by one thread and freed by another, which
    left holes that were never reused: each new grammar cost the worker 5 KB for good.
    """
    _set_option(M_ARENA_MAX, 1)


def map_large_blocks() -> None:
    """Map blocks of MMAP_BYTES and more separately, so that freeing them returns their memory.

    By default, glibc takes blocks of up to 32 MB from the heap once some have been freed, and a
    heap shrinks only at its end.
    """
    _set_option(M_MMAP_THRESHOLD, MMAP_BYTES)


def _set_option(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(option, value)
