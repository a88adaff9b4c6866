"""The C library's heap, which the worker's threads share."""

import ctypes
import sys

M_ARENA_MAX = -8
"""Of glibc's malloc.h."""


def use_one_heap() -> None:
    """Call before a second thread starts; nothing happens where the C library is not glibc.

    glibc gives each thread a heap of its own. Grammars are compiled by one thread, and freed by
    another with what their texts have added to them; the holes that this left were not filled
    again, and every grammar that came for the first time cost the worker 5 KB for good.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)
