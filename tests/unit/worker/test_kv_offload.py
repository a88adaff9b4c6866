"""Pages beyond the pool: files, memory, what moves them, and what engines keep in them."""

import os
import random
import resource
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.resolve import resolve_model
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import (
    LoadPages,
    NewSlot,
    PagesLoaded,
    ResetWorker,
    StoredPages,
    StorePages,
)
from tests.tiny_models import tiny_mistral
from tests.unit.worker_driver import Driver, Request, plan_of, prompts_of, runner_of
from worker_proc.kv_tiers.opening import namespace_of, open_tiers
from worker_proc.kv_tiers.page_copies import Bytes, PagePlace
from worker_proc.kv_tiers.page_mover import PageMover
from worker_proc.kv_tiers.pool_pages import HostPool
from worker_proc.kv_tiers.tiers import HEADER, HostPages, PageFiles, PeerFiles, PeerTier
from worker_proc.rank import is_stale

PAGE_BYTES = 256
NAMESPACE = bytes(range(16))
TIMEOUT_S = 20.0


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def page_of(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


def open_files(directory: Path, namespace: bytes = NAMESPACE, max_pages: int = 10_000) -> PageFiles:
    """Open a directory, whose lock the last owner in this process has given up."""
    max_bytes = max_pages * (PAGE_BYTES + HEADER.size)
    return PageFiles(directory, namespace, PAGE_BYTES, max_bytes)


def read(files: PageFiles | HostPages, number: int) -> Bytes | None:
    if isinstance(files, HostPages):
        return files.get(name_of(number))
    page = np.zeros(PAGE_BYTES, dtype=np.uint8)
    return page if files.read(name_of(number), [page[:100], page[100:]]) else None


def read_peer(peers: PeerTier, number: int) -> Bytes | None:
    page = np.zeros(PAGE_BYTES, dtype=np.uint8)
    return page if peers.read(name_of(number), PagePlace.at(page[:100], page[100:])) else None


def files_in(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.kv"))


# --- files ----------------------------------------------------------------------------------------


def test_files_are_found_again_at_the_next_start_and_are_the_owner_s_only(tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    files = open_files(directory)
    for number in range(20):
        assert files.write(name_of(number), page_of(number)) == []
    files.close()
    later = open_files(directory)
    assert sorted(later.names()) == [name_of(number) for number in range(20)]
    for number in range(20):
        np.testing.assert_array_equal(read(later, number), page_of(number))
    assert read(later, 99) is None and later.num_damaged == 0
    for path in [directory, *directory.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    later.close()


def test_a_thousand_damaged_files_are_a_thousand_misses(tmp_path: Path) -> None:
    source = random.Random(3)
    files = open_files(tmp_path)
    for number in range(1000):
        files.write(name_of(number), page_of(number))
    found = files_in(tmp_path)
    contents = [path.read_bytes() for path in found]
    for number, path in enumerate(found):
        content = bytearray(contents[number])
        place = source.randrange(len(content))
        match number % 4:
            case 0:
                content[place] ^= 1 << source.randrange(8)
            case 1:
                del content[place:]
            case 2:
                content = bytearray(contents[number - 1])  # of another page
            case 3:
                content = bytearray(source.randbytes(len(content)))
        path.write_bytes(content)
    assert [read(files, number) for number in range(1000)] == [None] * 1000
    assert files.num_damaged == 1000
    assert files_in(tmp_path) == [] and list(files.names()) == []
    assert files.write(name_of(5), page_of(5)) == []
    np.testing.assert_array_equal(read(files, 5), page_of(5))
    files.close()


def test_pages_of_another_model_are_misses_even_under_the_right_name(tmp_path: Path) -> None:
    other = open_files(tmp_path, bytes(16))
    other.write(name_of(1), page_of(1))
    other.close()
    files = open_files(tmp_path)
    assert list(files.names()) == [] and read(files, 1) is None
    files.write(name_of(1), page_of(2))
    (tmp_path / NAMESPACE.hex() / "00" / f"{name_of(1).hex()}.kv").write_bytes(
        (tmp_path / bytes(16).hex() / "00" / f"{name_of(1).hex()}.kv").read_bytes()
    )
    assert read(files, 1) is None
    files.close()


def test_the_least_recently_used_files_make_room_also_those_of_other_models(
    tmp_path: Path,
) -> None:
    other = open_files(tmp_path, bytes(16))
    for number in range(4):
        other.write(name_of(number), page_of(number))
    other.close()
    (tmp_path / "notes.txt").write_text("not a page")
    files = open_files(tmp_path, max_pages=6)
    assert [files.write(name_of(number), page_of(number)) for number in range(6)] == [[]] * 6
    assert len(files_in(tmp_path)) == 6
    for path in files_in(tmp_path):
        os.utime(path, (1, 1))
    assert read(files, 0) is not None
    assert files.write(name_of(6), page_of(6)) == [name_of(1)]
    files.close()
    smaller = open_files(tmp_path, max_pages=2)
    assert set(smaller.names()) == {name_of(0), name_of(6)}
    assert (tmp_path / "notes.txt").exists()
    smaller.close()


@contextmanager
def full_disk() -> Iterator[None]:
    """Let every write to a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER.size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_the_writing_for_a_while_and_not_the_reading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_files(tmp_path)
    files.write(name_of(1), page_of(1))
    with full_disk():
        assert [files.write(name_of(n), page_of(n)) for n in (2, 3)] == [[name_of(2)], [name_of(3)]]
        assert files.has_failed
    assert len(files_in(tmp_path)) == 1 and not list(tmp_path.rglob("*.new"))
    assert read(files, 1) is not None and read(files, 2) is None
    assert files.write(name_of(4), page_of(4)) == [name_of(4)], "it is tried again later"
    monkeypatch.setattr("worker_proc.kv_tiers.tiers.RETRY_S", 0.0)
    monkeypatch.setattr(files, "_retry_at", 0.0)
    assert files.write(name_of(4), page_of(4)) == [] and not files.has_failed
    with caplog.at_level("INFO"):
        assert sum("cannot write KV pages" in line for line in caplog.messages) == 1
    files.close()


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv_cache_dir is .*/file: File exists; name"):
        open_files(tmp_path / "file")
    files = open_files(tmp_path / "kv")
    with pytest.raises(ConfigError, match="another server uses it"):
        open_files(tmp_path / "kv")
    files.close()


# --- files of other replicas ----------------------------------------------------------------------


def test_pages_of_other_replicas_are_found_where_these_have_them_and_nothing_is_changed(
    tmp_path: Path,
) -> None:
    directories = [tmp_path / str(number) for number in range(3)]
    files = [open_files(directory) for directory in directories[:2]]
    files[0].write(name_of(1), page_of(1))
    files[1].write(name_of(2), page_of(2))
    peers = PeerFiles(directories, NAMESPACE)
    assert [read_peer(peers, number) is not None for number in (1, 2, 3)] == [True, True, False]
    np.testing.assert_array_equal(read_peer(peers, 2), page_of(2))
    assert (peers.num_read, peers.num_damaged) == (3, 0)
    assert read_peer(PeerFiles(directories, bytes(16)), 1) is None, "other bytes"
    for number in (1, 2):
        (path,) = files_in(directories[number - 1])
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert read_peer(peers, number) is None
        path.write_bytes(content + b"!")
        assert read_peer(peers, number) is None
        assert path.read_bytes() == content + b"!", "it is not this replica's"
    assert (peers.num_read, peers.num_damaged) == (3, 4)
    for each in files:
        each.close()


def test_a_damaged_page_of_one_replica_is_found_at_another(tmp_path: Path) -> None:
    directories = [tmp_path / str(number) for number in range(2)]
    for directory in directories:
        files = open_files(directory)
        files.write(name_of(1), page_of(1))
        files.close()
    (damaged,) = files_in(directories[0])
    damaged.write_bytes(b"")
    peers = PeerFiles(directories, NAMESPACE)
    np.testing.assert_array_equal(read_peer(peers, 1), page_of(1))
    assert (peers.num_read, peers.num_damaged) == (1, 1)


# --- memory ---------------------------------------------------------------------------------------


def test_memory_holds_the_pages_that_were_used_last() -> None:
    pages = HostPages(3)
    first = page_of(1)
    kept = [pages.keep(name_of(n), first if n == 1 else page_of(n)) for n in range(3)]
    assert kept == [([], [])] * 3
    np.testing.assert_array_equal(read(pages, 0), page_of(0))
    removed, freed = pages.keep(name_of(3), page_of(3))
    assert removed == [name_of(1)] and freed[0] is first
    removed, freed = pages.keep(name_of(3), page_of(3))
    assert (removed, len(freed)) == ([], 1)
    assert [number for number in range(4) if read(pages, number) is not None] == [0, 2, 3]


# --- the thread -----------------------------------------------------------------------------------


class GatedPages(HostPages):
    """Pages in memory, each of which is kept only when the test allows it."""

    def __init__(self) -> None:
        super().__init__(100)
        self.begun, self.allowed = threading.Semaphore(0), threading.Semaphore(0)

    def keep(
        self, name: bytes, page: Bytes, checksum: bytes | None = None
    ) -> tuple[list[bytes], list[Bytes]]:
        self.begun.release()
        assert self.allowed.acquire(timeout=TIMEOUT_S)
        return super().keep(name, page, checksum)


class Moved:
    """A pool of pages, a mover, and what it reports."""

    def __init__(
        self, tier: HostPages | None, peers: PeerTier | None = None, max_batch: int = 1
    ) -> None:
        self.pool = torch.from_numpy(np.stack([page_of(n) for n in range(10)]))
        self.reports: SimpleQueue[StoredPages | PagesLoaded] = SimpleQueue()
        self.failed = threading.Event()
        pages = HostPool([self.pool])
        pages.max_batch = max_batch
        self.mover = PageMover(
            pages, 4, tier, None, lambda: self.reports.put, self.failed.set, peers
        )
        self.mover.begin_session(1)

    def store(self, *pages: int) -> None:
        names = b"".join(map(name_of, pages))
        self.mover.store(StorePages(pack_ids(pages), names))

    def load(self, page: int, *numbers: int, is_ahead: bool = False) -> None:
        pages = pack_ids(range(page, page + len(numbers)))
        names = b"".join(map(name_of, numbers))
        self.mover.load(LoadPages(page, pages, names, is_ahead=is_ahead))

    def report(self) -> StoredPages | PagesLoaded:
        return self.reports.get(timeout=TIMEOUT_S)


def test_pages_are_stored_and_loaded_up_to_the_first_that_is_gone() -> None:
    moved = Moved(HostPages(100))
    moved.store(1, 2)
    report = moved.report()
    assert report == StoredPages(name_of(1) + name_of(2), b"", 1)
    moved.load(7, 2, 1, 9)
    loaded = moved.report()
    assert isinstance(loaded, PagesLoaded)
    assert (loaded.load, loaded.num_loaded, loaded.session) == (7, 2, 1)
    np.testing.assert_array_equal(moved.pool[7].numpy(), page_of(2))
    np.testing.assert_array_equal(moved.pool[8].numpy(), page_of(1))
    assert moved.report() == StoredPages(b"", name_of(9), 1)


def test_a_mover_without_tiers_of_its_own_loads_from_other_replicas(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    for number in (1, 2, 3):
        files.write(name_of(number), page_of(number))
    moved = Moved(None, PeerFiles([tmp_path], NAMESPACE))
    assert moved.mover.fetches and moved.mover.begin_session(1) is None
    damaged = files_in(tmp_path)[2]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    moved.load(6, 1, 2, 3)
    loaded = moved.report()
    assert isinstance(loaded, PagesLoaded)
    assert (loaded.num_loaded, loaded.num_fetched, loaded.num_damaged) == (2, 2, 1)
    np.testing.assert_array_equal(moved.pool[7].numpy(), page_of(2))
    files.close()


class SlowPeers:
    """Pages of another replica that come one at a time, when the test allows it."""

    num_read = num_damaged = 0

    def __init__(self) -> None:
        self.asked, self.allowed = threading.Semaphore(0), threading.Semaphore(0)
        self._is_wanted: Callable[[], bool] = lambda: True

    def begin(self, names: Sequence[bytes], is_wanted: Callable[[], bool], asked_at: float) -> None:
        self._is_wanted = is_wanted

    def read(self, name: bytes, place: PagePlace) -> bool:
        self.asked.release()
        assert self.allowed.acquire(timeout=TIMEOUT_S)
        if not self._is_wanted():
            return False
        self.num_read += 1
        return True


def test_a_load_for_which_no_request_waits_ends_early_where_one_waits_for_another() -> None:
    peers = SlowPeers()
    moved = Moved(None, peers)
    moved.load(1, 1, 2, 3, 4, is_ahead=True)
    peers.allowed.release()
    for _ in range(2):
        assert peers.asked.acquire(timeout=TIMEOUT_S)
    moved.load(7, 5, is_ahead=True)
    moved.load(6, 6)
    peers.allowed.release(4)
    reports = [moved.report() for _ in range(4)]
    loaded = [report for report in reports if isinstance(report, PagesLoaded)]
    assert [(each.load, each.num_loaded) for each in loaded] == [(1, 1), (6, 1), (7, 1)]
    assert peers.num_read == 3


def test_pages_that_a_step_overwrites_before_their_turn_are_not_stored() -> None:
    tier = GatedPages()
    moved = Moved(tier)
    moved.store(1, 2, 3, 4, 5)
    assert tier.begun.acquire(timeout=TIMEOUT_S)  # page 1 was copied
    new = NewSlot(0, pack_ids(range(9)), 4, pack_ids([5, 2, 6]), 0.0, 0, 1.0, 0)
    moved.mover.before_step(plan_of(new=[new], grown=pack_ids([0, 3])))
    moved.pool[1:4] = 0  # as the step does
    tier.allowed.release(9)
    report = moved.report()
    assert isinstance(report, StoredPages)
    assert report.added == b"".join(map(name_of, (1, 4, 5)))
    assert report.removed == name_of(3) + name_of(2)
    np.testing.assert_array_equal(read(tier, 1), page_of(1))


def test_pages_that_were_copied_together_are_stored_though_a_step_overwrites_them() -> None:
    tier = GatedPages()
    moved = Moved(tier, max_batch=3)
    moved.store(1, 2, 3, 4, 5)
    assert tier.begun.acquire(timeout=TIMEOUT_S)  # pages 1 to 3 were copied
    new = NewSlot(0, pack_ids(range(9)), 4, pack_ids([5, 2, 4]), 0.0, 0, 1.0, 0)
    moved.mover.before_step(plan_of(new=[new], grown=pack_ids([0, 3])))
    moved.pool[1:5] = 0  # as the step does
    tier.allowed.release(9)
    report = moved.report()
    assert isinstance(report, StoredPages)
    assert report.added == b"".join(map(name_of, (1, 2, 3, 5)))
    assert report.removed == name_of(4)
    for number in (1, 2, 3, 5):
        np.testing.assert_array_equal(read(tier, number), page_of(number))


def test_a_page_that_was_missing_and_then_stored_is_reported_as_there() -> None:
    tier = GatedPages()
    moved = Moved(tier)
    moved.store(1, 2, 9)
    assert tier.begun.acquire(timeout=TIMEOUT_S)  # page 1 was copied
    moved.load(7, 9)
    tier.allowed.release(9)
    loaded, report = moved.report(), moved.report()
    assert isinstance(loaded, PagesLoaded) and loaded.num_loaded == 0
    assert isinstance(report, StoredPages)
    assert (len(report.added), report.removed) == (3 * len(name_of(9)), b"")


def test_a_new_scheduler_hears_of_what_is_stored_and_of_nothing_that_an_earlier_one_began() -> None:
    tier = GatedPages()
    moved = Moved(tier)
    moved.store(1, 2, 3)
    assert tier.begun.acquire(timeout=TIMEOUT_S)
    tier.allowed.release(9)
    assert (moved.mover.begin_session(2) or b"").startswith(name_of(1))
    moved.store(6)
    report = moved.report()
    while report.session == 1:
        report = moved.report()
    assert report == StoredPages(name_of(6), b"", 2)


def test_a_thread_that_cannot_go_on_says_so_before_requests_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(HostPages):
        def keep(
            self, name: bytes, page: Bytes, checksum: bytes | None = None
        ) -> tuple[list[bytes], list[Bytes]]:
            raise RuntimeError("a mistake")

    unhandled: SimpleQueue[threading.ExceptHookArgs] = SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", unhandled.put)
    moved = Moved(Broken(100))
    moved.store(1)
    assert moved.failed.wait(TIMEOUT_S)
    error = unhandled.get(timeout=TIMEOUT_S).exc_value
    assert isinstance(error, RuntimeError) and str(error) == "a mistake"


# --- engines --------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "native": {"page_size": 4},
    "native, bfloat16": {"page_size": 16, "dtype": "bfloat16"},
    "native, int8 pages": {"page_size": 16, "kv_cache_dtype": "int8"},
    "torch": {"page_size": 4, "attention_backend": "torch"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_pages_copied_to_other_places_of_another_pool_give_the_same_tokens(
    kind: str, llama_dir: Path
) -> None:
    (prompt,) = prompts_of([41])
    computed, loaded = (runner_of(llama_dir, **KINDS[kind]) for _ in range(2))
    first = Driver(computed)
    request = first.add(prompt)
    first.generate([request], 12)
    second = Driver(loaded, seed=8)
    pages = [second.free_pages.pop() for _ in range(32 // loaded.table.page_size)]
    source, target = (
        HostPool(r.engine.kv_parts(), r.engine.kv_numbers()) for r in (computed, loaded)
    )
    for number, page in enumerate(pages):
        buffer = source.take_buffer()
        assert source.begin_copy_out([request.pages[number]], [buffer]).wait() == [True]
        assert target.begin_copy_in([page], [buffer]).wait() == [True]
    again = second.add(prompt, like=Request(prompt, 0, pages, 0, 32, 41), shared=32)
    second.generate([again], 12)
    assert again.output == request.output


def open_with(directory: Path, **values: Any) -> PageMover | None:
    config = ServerConfig().replace(**values)
    runner = runner_of(directory, **values)
    files = resolve_model(ModelArgs(model=str(directory)))
    return open_tiers(config.worker, files, runner, config.replicas.place_of(0), "inproc://none")


def test_models_devices_and_sizes_that_cannot_have_tiers_are_refused(
    tmp_path: Path, llama_dir: Path
) -> None:
    flags: dict[str, Any] = {"kv_offloading_size": 1.0, "page_size": 4}
    with pytest.raises(
        ConfigError, match="--kv-offloading-size needs a model with a layer that sees"
    ):
        open_with(tiny_mistral(tmp_path), **flags)
    with pytest.raises(ConfigError, match=r"room for 10 bytes .* takes \d+: raise it"):
        open_with(llama_dir, **flags | {"kv_offloading_size": 1e-8})
    for values, message in (
        ({"tp": 2}, "tp is 2: --kv-offloading-size works with one process only"),
        ({"disable_radix_cache": True}, "--kv-offloading-size keeps cached prefixes: leave"),
        ({"kv_offloading_size": -1.0}, "kv_offloading_size is -1.0: it must be 0"),
        ({"kv_cache_dir_size": 0.0}, "kv_cache_dir_size must be positive"),
        ({"cluster": "ray", "kv_cache_dir": "d"}, "--kv-cache-dir is a directory of one machine"),
    ):
        with pytest.raises(ConfigError, match=message):
            ServerConfig().replace(**flags | values).validate()


def test_each_model_and_number_format_has_a_namespace_of_its_own(
    tmp_path: Path, llama_dir: Path
) -> None:
    def namespace(directory: Path, **values: Any) -> bytes:
        config = ServerConfig().replace(**values)
        files = resolve_model(ModelArgs(model=str(directory)))
        return namespace_of(config.worker, files, runner_of(directory, **values), PAGE_BYTES)

    copy = tmp_path / "copy"
    shutil.copytree(llama_dir, copy)
    assert namespace(copy, page_size=16) == namespace(llama_dir, page_size=16)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    begin = len(weights) // 3
    weights[begin : begin + 8192] = bytes(8192)  # one tensor differs
    (copy / "model.safetensors").write_bytes(weights)
    found = [namespace(copy, page_size=16), namespace(llama_dir, page_size=16)]
    for values in (
        {"page_size": 32},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int8"},
        {"attention_backend": "torch"},
    ):
        found.append(namespace(llama_dir, **{"page_size": 16, **values}))
    assert len(set(found)) == len(found)


def test_messages_about_pages_of_a_worker_before_are_dropped() -> None:
    """They wait in the socket where a worker was killed, and name pages that another one has."""
    pages, hashes = pack_ids([1]), name_of(1)
    for message in (
        plan_of(),
        StorePages(pages, hashes, session=4),
        LoadPages(0, pages, hashes, session=4),
    ):
        assert is_stale(message, 5)
        assert not is_stale(msgspec.structs.replace(message, session=5), 5)
    assert not is_stale(ResetWorker(), 5)
