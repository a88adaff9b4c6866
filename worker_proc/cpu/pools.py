"""The memory of the KV pages, which a thread takes from the system before it is written to."""

import ctypes
import sys
import threading

from torch import Tensor

from quadriga.runtime.cpu_affinity import Cpus, keep_to
from worker_proc.cpu.panels import LARGE_BYTES, empty
from worker_proc.system.large_pages import LARGE_PAGE

MADV_POPULATE_WRITE = 23
"""Of Linux 5.14 and later."""
AHEAD_BYTES = 1 << 27
"""Of all layers together: at 300 MB/s, the least that was seen, it takes half a second."""


class Pools:
    """One allocation for the pages of each layer, zero.

    The first write to a piece of memory waits for the system to find it: on a virtual machine whose
    host gives memory out late, for as long as 6 ms, and with it all threads of a step wait. Pages
    are given out from the lowest on, and those that come back go first. So a thread that keeps a
    little ahead of the highest one finds the memory in time, and what is never used is not taken.
    """

    def __init__(self, layers: int, num_pages: int, page_bytes: int) -> None:
        self.layers: list[Tensor] = [empty(num_pages * page_bytes) for _ in range(layers)]
        self._page_bytes = page_bytes
        self._layer_bytes = num_pages * page_bytes
        self._pages = 0
        self._more = threading.Event()

    def reach(self, pages: int) -> None:
        """Pages below this number are in use."""
        if pages > self._pages:
            self._pages = pages
            self._more.set()

    def take_ahead(self, cpus: Cpus) -> None:
        """Begin. cpus: of the thread; where it is empty, all that it may use."""
        if sys.platform == "linux" and self._layer_bytes >= LARGE_BYTES:
            self._more.set()
            threading.Thread(target=self._follow, args=(cpus,), name="pools", daemon=True).start()

    def _follow(self, cpus: Cpus) -> None:
        keep_to(cpus)
        ahead = max(AHEAD_BYTES // len(self.layers) // LARGE_PAGE, 1) * LARGE_PAGE
        taken = 0
        while taken < self._layer_bytes:
            self._more.wait()
            self._more.clear()
            wanted = min(self._pages * self._page_bytes + ahead, self._layer_bytes)
            while taken < wanted:
                if not all(_take(layer, taken) for layer in self.layers):
                    return
                taken += LARGE_PAGE


def _take(layer: Tensor, begin: int) -> bool:
    """The piece that begins there. Whether the system knows how."""
    address = ctypes.c_void_p(layer.data_ptr() + begin)
    size = ctypes.c_size_t(min(LARGE_PAGE, layer.numel() - begin))
    return bool(ctypes.CDLL(None).madvise(address, size, MADV_POPULATE_WRITE) == 0)
