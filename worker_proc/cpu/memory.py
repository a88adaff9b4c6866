"""Memory for weights and KV pages: in large pages, and allocated by the system before its use."""

import ctypes
import mmap
import sys
import threading

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quadriga.server.processes.machine import Cpus, pin_to

LARGE_PAGE = 1 << 21  # bytes
ALIGNMENT_BYTES = 64
CHUNK_BYTES = 1 << 26
MIN_MAPPING_BYTES = 1 << 24  # smaller tensors share a chunk
MADV_POPULATE_WRITE = 23  # since Linux 5.14
# Of all layers together: at 300 MB/s, the slowest rate measured, this takes half a second.
PREFAULT_AHEAD_BYTES = 1 << 27


class _Chunk:
    """A large mapping that is cut into tensors that are smaller than large pages."""

    def __init__(self) -> None:
        self._free = np.empty(0, dtype=np.uint8)

    def take(self, size: int) -> NDArray[np.uint8]:
        if size > len(self._free):
            self._free = _map(CHUNK_BYTES)
        taken, self._free = self._free[:size], self._free[size:]
        return taken


_chunk = _Chunk()


def allocate(num_bytes: int) -> Tensor:
    """Allocate zeroed bytes [num_bytes] uint8, in large pages if the system has them.

    Large pages save address translations when weights, or scattered keys and values, are read.
    """
    length = -(-max(num_bytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    memory = _chunk.take(length) if length < MIN_MAPPING_BYTES else _map(length)
    return torch.from_numpy(memory[:num_bytes])


def allocate_apart(num_bytes: int) -> Tensor:
    """Allocate as `allocate` does; the system has the memory again as soon as it is not used."""
    return torch.from_numpy(_map(max(num_bytes, 1))[:num_bytes])


def _map(length: int) -> NDArray[np.uint8]:
    """Return `length` zero bytes, in large pages if the system has them."""
    # Private: Linux gives large pages to shared memory only if it is configured to.
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


class KVPools:
    """One zeroed allocation for the KV pages of each layer, and a thread that prefaults them.

    The first write to a piece of memory waits until the system has allocated it: up to 6 ms on a
    virtual machine whose host allocates memory late, and all threads of a step wait with it. The
    scheduler uses pages from the lowest number up and reuses free ones first. So a thread that
    stays a little ahead of the highest page in use allocates memory in time, and memory that is
    never used is never allocated.
    """

    def __init__(self, layers: int, num_pages: int, page_bytes: int) -> None:
        self.layers: list[Tensor] = [
            allocate(num_pages * page_bytes).view(num_pages, page_bytes) for _ in range(layers)
        ]
        self._page_bytes = page_bytes
        self._layer_bytes = num_pages * page_bytes
        self._num_used = 0
        self._grown = threading.Event()

    def reach(self, num_pages: int) -> None:
        """Note that pages below this number are in use."""
        if num_pages > self._num_used:
            self._num_used = num_pages
            self._grown.set()

    def start_prefaulting(self, cpus: Cpus) -> None:
        """Start the thread that prefaults memory, on these CPUs; if empty, on any."""
        if sys.platform == "linux" and self._layer_bytes >= MIN_MAPPING_BYTES:
            self._grown.set()
            threading.Thread(target=self._prefault, args=(cpus,), name="pools", daemon=True).start()

    def _prefault(self, cpus: Cpus) -> None:
        pin_to(cpus)
        ahead = max(PREFAULT_AHEAD_BYTES // len(self.layers) // LARGE_PAGE, 1) * LARGE_PAGE
        done = 0
        while done < self._layer_bytes:
            self._grown.wait()
            self._grown.clear()
            target = min(self._num_used * self._page_bytes + ahead, self._layer_bytes)
            while done < target:
                if not all(_populate(layer, done) for layer in self.layers):
                    return
                done += LARGE_PAGE


def _populate(layer: Tensor, offset: int) -> bool:
    """Allocate the large page at `offset`. Return whether the system supports that."""
    address = ctypes.c_void_p(layer.data_ptr() + offset)
    size = ctypes.c_size_t(min(LARGE_PAGE, layer.numel() - offset))
    return bool(ctypes.CDLL(None).madvise(address, size, MADV_POPULATE_WRITE) == 0)
