"""Memory in large pages."""

import mmap

LARGE_PAGE = 1 << 21  # bytes


def in_large_pages(length: int) -> mmap.mmap:
    """Return `length` zero bytes, in large pages if the system has them."""
    # Private: Linux gives large pages to shared memory only if it is configured to.
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
