"""Pages of a pool on a GPU that go to the tiers and come back; on a CPU, with stand-ins."""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import WorkerArgs
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import LoadPages, NewSlot, PagesLoaded, StoredPages, StorePages

from tests.triton_device import DEVICE  # isort: skip (before what it has to precede)

from tests.unit.gpu.graphs import capture, runner_with, small_llama
from tests.unit.worker_driver import Driver, Request, plan_of, prompts_of
from worker_proc.kv_tiers import opening, pool_pages
from worker_proc.kv_tiers.page_copies import Bytes, page_copies
from worker_proc.kv_tiers.page_mover import PageMover
from worker_proc.kv_tiers.pool_pages import (
    CopyStream,
    CudaStream,
    DevicePool,
    HostPool,
    HostStream,
    StreamEvent,
    are_finite,
)
from worker_proc.kv_tiers.shared_pages import SharedPages, SharedPeers
from worker_proc.kv_tiers.tiers import HEADER, HostPages, MemoryPages, PageFiles, PeerTier

TIMEOUT_S = 20.0
NAMESPACE = bytes(range(16))
NUM_PAGES, NUM_PIECES = 12, 6
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def stream() -> CopyStream:
    return CudaStream(DEVICE) if DEVICE.type == "cuda" else HostStream()


def settle() -> None:
    """Wait for the device, as copies do not wait for the stream of the test."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def random_pool(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (4, 2, 8)) -> Tensor:
    """Return a pool `[pieces, pages, …]` of finite numbers."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(NUM_PIECES, NUM_PAGES, *shape, generator=generator)
    return numbers.to(dtype).to(DEVICE)


def bytes_of(pool: Tensor, page: int) -> Bytes:
    """Return what a page holds, as another access to the pool copies it."""
    host = HostPool(list(pool.cpu().unbind()))
    return np.concatenate(host.place_of(page).buffers)


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_page_with_a_nan_or_an_infinity_is_found_and_no_other(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    if dtype == torch.float8_e4m3fn:
        numbers = codes.view(dtype)[:, None]
        expected = numbers.float().isfinite()[:, 0]
        assert expected.sum() == 254
    else:
        numbers = torch.zeros(6, 5, dtype=dtype, device=DEVICE)
        numbers[:3, 2] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        numbers[3, 0], numbers[4, 4] = torch.finfo(dtype).max, torch.finfo(dtype).min
        expected = torch.tensor([False] * 3 + [True] * 3, device=DEVICE)
    assert are_finite(numbers).equal(expected)


@pytest.mark.parametrize("shape", [(4, 2, 8), (1, 1, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_come_back_to_other_places_as_they_were(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    pool = random_pool(dtype, shape)
    before = pool.clone()
    settle()
    pages = DevicePool([pool], stream())
    buffers = [pages.take_buffer() for _ in range(3)]
    assert pages.begin_copy_out([7, 2, 5], buffers).wait() == [True] * 3
    for page, buffer in zip([7, 2, 5], buffers, strict=True):
        np.testing.assert_array_equal(buffer, bytes_of(before, page))
    assert pages.begin_copy_in([1, 11, 7], buffers).wait() == [True] * 3
    for page, source in ((1, 7), (11, 2), (7, 5), *((p, p) for p in (0, 2, 3, 4, 5, 6, 8, 9, 10))):
        np.testing.assert_array_equal(bytes_of(pool, page), bytes_of(before, source))


def test_pages_of_several_tensors_are_copied_one_tensor_after_the_other() -> None:
    """An engine in plain torch has a tensor for each layer."""
    parts = [random_pool()[0], random_pool(shape=(2, 8))[1]]
    pages = DevicePool([part.unsqueeze(0) for part in parts], stream())
    expected = np.concatenate(HostPool([part.cpu() for part in parts]).place_of(4).buffers)
    buffer = pages.take_buffer()
    pages.begin_copy_out([4], [buffer]).wait()
    np.testing.assert_array_equal(buffer, expected)


# --- the thread -----------------------------------------------------------------------------------


class LateStream:
    """Runs its operations only when they are waited for: by the host, once it may, or by a step."""

    def __init__(self) -> None:
        self.launched, self.may_end = threading.Semaphore(0), threading.Event()
        self.may_end.set()
        self._lock = threading.Lock()
        self._work: list[Callable[[], None]] = []

    def launch(self, work: Callable[[], None]) -> StreamEvent:
        self._work.append(work)
        self.launched.release()
        return self

    def synchronize(self) -> None:
        assert self.may_end.wait(TIMEOUT_S)
        self.hold_steps()
        settle()

    def hold_steps(self) -> None:
        with self._lock, torch.inference_mode():
            for work in self._work:
                work()
            self._work.clear()


class Moved:
    """A pool on a device, a mover, and what it reports."""

    def __init__(
        self,
        memory: MemoryPages | None,
        files: PageFiles | None = None,
        stream_: Any = None,
        peers: PeerTier | None = None,
    ) -> None:
        self.pool = random_pool()
        self.pages = DevicePool([self.pool], stream_ or stream())
        if isinstance(memory, SharedPages):
            self.pages.take_from(memory)
        self.reports: SimpleQueue[StoredPages | PagesLoaded] = SimpleQueue()
        self.mover = PageMover(
            self.pages, 4, memory, files, lambda: self.reports.put, lambda: None, peers
        )
        self.mover.begin_session(1)

    def store(self, *pages: int) -> None:
        self.mover.store(StorePages(pack_ids(pages), b"".join(map(name_of, pages))))

    def load(self, page: int, *numbers: int) -> None:
        pages = range(page, page + len(numbers))
        self.mover.load(LoadPages(5, pack_ids(pages), b"".join(map(name_of, numbers))))

    def report(self) -> StoredPages | PagesLoaded:
        return self.reports.get(timeout=TIMEOUT_S)


def overwriting(page: int) -> Any:
    return plan_of(new=[NewSlot(0, pack_ids([1]), 0, pack_ids([page]), 0.0, 0, 1.0, 0)])


def test_a_page_is_stored_when_the_step_that_computes_it_has_ended() -> None:
    tier = HostPages(100)
    moved = Moved(tier)
    moved.mover.before_step(overwriting(3))
    moved.mover.before_step(overwriting(4))
    moved.store(3)
    moved.mover.after_step()
    for _ in range(20):  # the thread has the time to store the page too early
        moved.load(7, 9)
        assert isinstance(moved.report(), PagesLoaded), "a load does not wait for steps"
    moved.pool[:, 3] = 5.0  # the second step goes on
    settle()
    expected = bytes_of(moved.pool, 3)
    assert name_of(3) not in tier
    moved.mover.after_step()
    report = moved.report()
    assert isinstance(report, StoredPages) and report.added == name_of(3)
    stored = tier.get(name_of(3))
    np.testing.assert_array_equal(stored, expected)


@pytest.mark.parametrize("overwritten", [3, 4])
def test_the_device_lets_a_step_wait_for_the_copy_of_a_page_that_it_overwrites(
    overwritten: int,
) -> None:
    late, tier = LateStream(), HostPages(100)
    moved = Moved(tier, stream_=late)
    expected = [bytes_of(moved.pool, page) for page in range(NUM_PAGES)]
    assert late.launched.acquire(timeout=TIMEOUT_S)  # the first copy of the pool
    late.may_end.clear()
    moved.store(3)
    assert late.launched.acquire(timeout=TIMEOUT_S)
    moved.mover.before_step(overwriting(overwritten))
    moved.pool[:, overwritten] = 0  # as the step does
    late.may_end.set()
    assert isinstance(moved.report(), StoredPages)
    np.testing.assert_array_equal(tier.get(name_of(3)), expected[3])


def test_a_new_scheduler_loads_nothing_until_the_steps_of_the_last_one_have_ended() -> None:
    moved = Moved(HostPages(100))
    moved.mover.before_step(plan_of())
    moved.mover.before_step(plan_of())
    begun = threading.Event()

    def begin() -> None:
        moved.mover.begin_session(2)
        begun.set()

    threading.Thread(target=begin, daemon=True).start()
    moved.mover.after_step()
    assert not begun.wait(0.05)
    moved.mover.after_step()
    assert begun.wait(TIMEOUT_S)


def test_loads_of_many_batches_come_from_memory_and_disk_in_the_buffers_that_were_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_bytes = NUM_PIECES * 4 * 2 * 8 * 4
    monkeypatch.setattr(pool_pages, "BATCH_BYTES", 3 * page_bytes)
    monkeypatch.setattr(pool_pages, "SLAB_BYTES", 4 * page_bytes)
    files = PageFiles(tmp_path, NAMESPACE, page_bytes, 100 * (page_bytes + HEADER.size))
    moved = Moved(HostPages(2), files)
    assert moved.pages.max_batch == 3
    before = moved.pool.clone()
    settle()
    monkeypatch.setattr(moved.pages, "_allocate", lambda: pytest.fail("no buffer is left"))
    moved.store(*range(8))
    added = b""
    while len(added) < 8 * len(name_of(0)):
        report = moved.report()
        assert isinstance(report, StoredPages)
        added += report.added
    for _ in range(5):
        moved.pool.zero_()
        settle()
        moved.load(0, 7, 6, 5, 4, 3, 2, 1, 0)
        loaded = moved.report()
        assert isinstance(loaded, PagesLoaded) and loaded.num_loaded == 8
        for page in range(8):
            np.testing.assert_array_equal(bytes_of(moved.pool, page), bytes_of(before, 7 - page))
    next(tmp_path.rglob(f"{name_of(3).hex()}.kv")).write_bytes(b"damaged")
    for missing in (3, 99):
        moved.load(0, 7, 6, 5, 4, missing, 2)
        loaded, report = moved.report(), moved.report()
        assert isinstance(loaded, PagesLoaded) and loaded.num_loaded == 4
        assert isinstance(report, StoredPages) and report.removed == name_of(missing)
    files.close()


def test_a_page_with_a_nan_is_neither_stored_nor_loaded() -> None:
    tier = HostPages(100)
    moved = Moved(tier)
    moved.pool[2, 1, 0] = torch.nan
    settle()
    moved.store(0, 1, 2)
    report = moved.report()
    assert isinstance(report, StoredPages)
    assert (report.added, report.removed) == (name_of(0) + name_of(2), name_of(1))
    wrong = bytes_of(moved.pool, 1)
    tier.keep(name_of(1), wrong)
    moved.load(5, 0, 1, 2)
    loaded = moved.report()
    assert isinstance(loaded, PagesLoaded) and loaded.num_loaded == 1


# --- the engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}])
def test_pages_that_left_and_came_back_give_the_same_tokens_in_graphs(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    """A pool of another runner takes them in, at other places, after its graphs were captured."""
    directory, (prompt,) = small_llama(tmp_path), prompts_of([14])
    first = Driver(runner_with(directory, capture(), **flags))
    request = first.add(prompt)
    first.generate([request], 4, chunk=8)
    second = Driver(runner_with(directory, capture(), **flags), seed=8)
    source, target = (
        DevicePool(driver.runner.engine.kv_pools(), stream()) for driver in (first, second)
    )
    places = [second.free_pages.pop() for _ in range(3)]
    assert places != request.pages[:3]
    buffers = [source.take_buffer() for _ in places]
    assert all(source.begin_copy_out(request.pages[:3], buffers).wait())
    assert all(target.begin_copy_in(places, buffers).wait())
    again = second.add(prompt, like=Request(prompt, 0, places, 0, 12, 14), shared=12)
    second.generate([again], 4)
    assert again.output == request.output


def test_memory_that_is_not_there_to_be_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "PINNED_WAIT_S", 0.0)
    monkeypatch.setattr(opening, "free_memory", lambda device: 3 * 2**30)
    args = WorkerArgs(kv_offloading_size=4.0)
    with pytest.raises(ConfigError, match=r"is 4: a GPU needs it pinned, and of 4.0 GiB for each"):
        opening._check_pinned(args, 4 * 2**30)
    free = iter([2**30, 2**30, 5 * 2**30])  # the memory of a killed worker comes back
    monkeypatch.setattr(opening, "PINNED_WAIT_S", TIMEOUT_S)
    monkeypatch.setattr(opening, "PINNED_POLL_S", 0.0)
    monkeypatch.setattr(opening, "free_memory", lambda device: next(free))
    opening._check_pinned(args, 4 * 2**30)


# --- shared memory --------------------------------------------------------------------------------


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """Yield a directory in shared memory: CUDA pins no other files."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as directory:
        yield Path(directory)


def page_bytes() -> int:
    return DevicePool([random_pool()], stream()).page_bytes


def shared_pages(directory: Path, max_pages: int) -> SharedPages:
    return SharedPages(directory, NAMESPACE, page_bytes(), max_pages, page_copies(), 8)


class PinningStream(HostStream):
    """Notes which memory was pinned."""

    def __init__(self) -> None:
        self.pinned: list[Bytes] = []

    def pin(self, memory: Bytes) -> None:
        self.pinned.append(memory)


def test_pages_of_a_device_go_through_shared_memory_to_that_of_another_replica(
    shared_directory: Path,
) -> None:
    shared = shared_pages(shared_directory, 20)
    source = Moved(shared)
    peers = SharedPeers([shared_directory], NAMESPACE, page_bytes(), page_copies())
    target = Moved(None, peers=peers)
    numbers = range(1, NUM_PAGES)
    source.store(*numbers)
    stored = b""
    while len(stored) < len(b"".join(map(name_of, numbers))):
        report = source.report()
        assert isinstance(report, StoredPages)
        stored += report.added
    target.pool.zero_()
    settle()
    target.load(1, *numbers)
    loaded = target.report()
    assert isinstance(loaded, PagesLoaded)
    assert (loaded.num_loaded, loaded.num_fetched) == (len(numbers), len(numbers))
    settle()
    for page in numbers:
        np.testing.assert_array_equal(bytes_of(target.pool, page), bytes_of(source.pool, page))
    shared.close()


def test_all_of_the_shared_memory_is_pinned_before_the_first_step(shared_directory: Path) -> None:
    shared, pinning = shared_pages(shared_directory, 20), PinningStream()
    moved = Moved(shared, stream_=pinning)
    (memory,) = pinning.pinned
    begin, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    for _ in range(28):
        buffer = moved.pages.take_buffer()
        assert begin <= buffer.ctypes.data <= end - buffer.nbytes
    shared.close()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: copies beside its steps")
def test_a_gpu_copies_to_shared_memory_while_its_steps_go_on(shared_directory: Path) -> None:
    shared = shared_pages(shared_directory, 20)
    pages = DevicePool([random_pool()], CudaStream(DEVICE))
    pages.take_from(shared)
    pages.reserve(28)
    buffer = pages.take_buffer()
    torch.cuda._sleep(200_000_000)  # a step of about 100 ms on the stream of the steps
    began = time.perf_counter()
    copy = pages.begin_copy_out([3], [buffer])
    assert copy.wait() == [True]
    assert time.perf_counter() - began < 0.05, "the copy waited for the step"
    settle()
    shared.close()
