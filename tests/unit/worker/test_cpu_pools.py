"""Memory of KV pages is allocated before it is written to, and not much earlier."""

import ctypes
import sys
from functools import partial

import pytest
from torch import Tensor

from tests.waiting import wait_until
from worker_proc.cpu.memory import LARGE_PAGE, PREFAULT_AHEAD_BYTES, KVPools

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="asks Linux which memory is resident"
)

LAYERS, PAGE_BYTES = 16, 1 << 16
AHEAD = PREFAULT_AHEAD_BYTES // LAYERS
NUM_PAGES = 3 * AHEAD // PAGE_BYTES
SYSTEM_PAGE = 4096
TIMEOUT_S = 30.0


def resident_bytes(layer: Tensor) -> int:
    """Return the bytes from the beginning of a layer that the system has allocated."""
    count = -(-layer.numel() // SYSTEM_PAGE)
    vector = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(layer.data_ptr())
    assert libc.mincore(address, ctypes.c_size_t(layer.numel()), vector) == 0, ctypes.get_errno()
    resident = bytes(byte & 1 for byte in vector)
    return SYSTEM_PAGE * (len(resident) if 0 not in resident else resident.index(0))


@pytest.mark.timeout(60)
def test_memory_is_taken_a_little_ahead_of_the_highest_page() -> None:
    pools = KVPools(LAYERS, NUM_PAGES, PAGE_BYTES)
    assert resident_bytes(pools.layers[0]) == 0
    pools.start_prefaulting(frozenset())
    for pages in (0, NUM_PAGES // 2, NUM_PAGES // 3):
        pools.reach(pages)
        least = max(pages, NUM_PAGES // 2 if pages else 0) * PAGE_BYTES + AHEAD
        wait_until(partial(_all_resident, pools, least), TIMEOUT_S)
        assert resident_bytes(pools.layers[-1]) < least + 2 * LARGE_PAGE
    pools.reach(NUM_PAGES)
    wait_until(
        lambda: all(resident_bytes(layer) >= layer.numel() for layer in pools.layers), TIMEOUT_S
    )
    assert not any(bool(layer.any()) for layer in pools.layers[:2])


def test_small_pools_are_left_alone() -> None:
    pools = KVPools(2, 4, 1024)
    pools.start_prefaulting(frozenset())
    pools.reach(4)
    assert [layer.numel() for layer in pools.layers] == [4096, 4096]


def _all_resident(pools: KVPools, num_bytes: int) -> bool:
    return all(resident_bytes(layer) >= num_bytes for layer in pools.layers)
