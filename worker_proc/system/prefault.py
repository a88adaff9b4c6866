"""Have the system allocate memory before it is needed."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from worker_proc.system.large_pages import LARGE_PAGE, in_large_pages

MAX_MEANWHILE = 1 << 30


@contextmanager
def memory_meanwhile(size: int) -> Iterator[None]:
    """Touch and free `size` bytes (at most MAX_MEANWHILE) in a thread while the body runs.

    On a virtual machine, the first write to memory that the host has lent elsewhere takes 20 times
    as long as the next: 5 ms for 2 MB. Memory that is freed stays with the virtual machine for some
    seconds, so the weights that are loaded next get it.
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
    except OSError:  # there is not enough memory, which loading will report
        return
    first = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(first)
    for offset in range(0, size, LARGE_PAGE):
        if enough.is_set():
            break
        # Every byte, as the system may have no large page left. The call releases the GIL.
        ctypes.memset(address + offset, 1, min(LARGE_PAGE, size - offset))
    del first  # a mapping with references cannot be closed
    memory.close()
