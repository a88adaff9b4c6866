"""Map memory in large pages, and have slow memory allocated before it is needed."""

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LARGE_PAGE_BYTES = 1 << 21
MAX_PREFAULT_BYTES = 1 << 30


def map_large_pages(num_bytes: int) -> mmap.mmap:
    """Map zeroed memory, in large pages if the system has them."""
    # Private, because shared memory needs further settings to get large pages on Linux.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@contextmanager
def prefault_meanwhile(num_bytes: int) -> Iterator[None]:
    """Touch and free memory in a thread while the body of the `with` statement runs.

    On a virtual machine, the first write to memory that the host has lent elsewhere takes 20 times
    as long as the next: 5 ms for 2 MB. Memory that is freed stays with the virtual machine for some
    seconds, so the weights that are loaded next get it.

    Args:
        num_bytes: Bytes to touch, at most MAX_PREFAULT_BYTES are.
    """
    stop = threading.Event()
    size = min(num_bytes, MAX_PREFAULT_BYTES)
    thread = threading.Thread(target=_touch, args=(size, stop), name="prefault", daemon=True)
    if size:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if size:
            thread.join()


def _touch(size: int, stop: threading.Event) -> None:
    try:
        memory = map_large_pages(size)
    except OSError:  # there is not enough memory, which loading will report
        return
    first = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(first)
    for offset in range(0, size, LARGE_PAGE_BYTES):
        if stop.is_set():
            break
        # Every byte, as the system may have no large page left. The call releases the GIL.
        ctypes.memset(address + offset, 1, min(LARGE_PAGE_BYTES, size - offset))
    del first  # a mapping with references cannot be closed
    memory.close()
