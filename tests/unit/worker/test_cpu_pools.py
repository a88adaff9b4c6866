"""Memory of pages is there before they are written to, and no more of it than is soon needed."""

import ctypes
import sys
import time
from collections.abc import Callable

import pytest
from torch import Tensor

from worker_proc.cpu.pools import AHEAD_BYTES, Pools
from worker_proc.system.large_pages import LARGE_PAGE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what memory is there")

LAYERS, PAGE_BYTES = 16, 1 << 16
AHEAD = AHEAD_BYTES // LAYERS
NUM_PAGES = 3 * AHEAD // PAGE_BYTES
SYSTEM_PAGE = 4096


def there(layer: Tensor) -> int:
    """Bytes of it, from its beginning, that the system has found memory for."""
    count = -(-layer.numel() // SYSTEM_PAGE)
    vector = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(layer.data_ptr())
    assert libc.mincore(address, ctypes.c_size_t(layer.numel()), vector) == 0, ctypes.get_errno()
    found = bytes(byte & 1 for byte in vector)
    return SYSTEM_PAGE * (len(found) if 0 not in found else found.index(0))


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.timeout(60)
def test_memory_is_taken_a_little_ahead_of_the_highest_page() -> None:
    pools = Pools(LAYERS, NUM_PAGES, PAGE_BYTES)
    assert there(pools.layers[0]) == 0
    pools.take_ahead(frozenset())
    for pages in (0, NUM_PAGES // 2, NUM_PAGES // 3):
        pools.reach(pages)
        most = max(pages, NUM_PAGES // 2 if pages else 0) * PAGE_BYTES + AHEAD
        wait_until(lambda most=most: all(there(one) >= most for one in pools.layers))  # type: ignore[misc]
        assert there(pools.layers[-1]) < most + 2 * LARGE_PAGE
    pools.reach(NUM_PAGES)
    wait_until(lambda: all(there(one) >= one.numel() for one in pools.layers))
    assert not any(bool(one.any()) for one in pools.layers[:2])


def test_small_pools_are_left_alone() -> None:
    pools = Pools(2, 4, 1024)
    pools.take_ahead(frozenset())
    pools.reach(4)
    assert [one.numel() for one in pools.layers] == [4096, 4096]
