"""Memory in large pages, and memory that is slow to come."""

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LARGE_PAGE = 1 << 21
MAX_MEANWHILE = 1 << 30


def in_large_pages(length: int) -> mmap.mmap:
    """So many bytes, zero, in large pages where the system has them."""
    # Private: Linux gives large pages to shared memory only where it is told to by other means.
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@contextmanager
def memory_meanwhile(size: int) -> Iterator[None]:
    """While the body runs, a thread writes to so many bytes of memory (at most MAX_MEANWHILE), and
    gives them back at its end.

    On a virtual machine the first write to memory that the host had lent to others takes 20 times
    as long as the next: 5 ms for 2 MB. What is given back stays with the virtual machine for some
    seconds, and goes to whoever asks next.
    """
    enough = threading.Event()
    wanted = min(size, MAX_MEANWHILE)
    thread = threading.Thread(target=_write_to, args=(wanted, enough), name="memory", daemon=True)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        enough.set()
        if wanted:
            thread.join()


def _write_to(size: int, enough: threading.Event) -> None:
    try:
        memory = in_large_pages(size)
    except OSError:  # more than there can be: loading will say so
        return
    first = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(first)
    for offset in range(0, size, LARGE_PAGE):
        if enough.is_set():
            break
        # All of it: not every system has large pages, or one left. Other threads go on meanwhile.
        ctypes.memset(address + offset, 1, min(LARGE_PAGE, size - offset))
    del first  # what is pointed to cannot be closed
    memory.close()
