"""The tier in the computer's memory (--kv-offloading-size)."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from worker_proc.kv_offload.pool_pages import Bytes


class HostPages:
    """Copies of pages in memory, up to a number of them; the least recently used ones go first.

    Attributes:
        num_damaged, has_failed: As in Tier. Memory does not fail.
    """

    num_damaged = 0
    has_failed = False

    def __init__(self, max_pages: int) -> None:
        self._max_pages = max_pages
        self._pages: OrderedDict[bytes, Bytes] = OrderedDict()

    def names(self) -> Iterable[bytes]:
        return list(self._pages)

    def __contains__(self, name: bytes) -> bool:
        return name in self._pages

    def read(self, name: bytes, buffers: Sequence[Bytes]) -> bool:
        page = self._pages.get(name)
        if page is None:
            return False
        self._pages.move_to_end(name)
        start = 0
        for buffer in buffers:
            np.copyto(buffer, page[start : start + len(buffer)])
            start += len(buffer)
        return True

    def write(self, name: bytes, page: Bytes) -> list[bytes]:
        removed = []
        memory = self._pages.pop(name, None)
        if memory is None and len(self._pages) == self._max_pages:
            oldest, memory = self._pages.popitem(last=False)
            removed.append(oldest)
        if memory is None:
            memory = np.empty_like(page)
        np.copyto(memory, page)
        self._pages[name] = memory
        return removed
