"""KV pages in shared memory: their copies and checksums, their owner, and its peers."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from quadriga.errors import ConfigError
from tests.shared_pages import damage_pages, forget_pages
from worker_proc.cpu.build import kernels_at_hand, load_kernels
from worker_proc.kv_tiers import shared_pages
from worker_proc.kv_tiers.page_copies import (
    Bytes,
    NativeCopies,
    NumpyCopies,
    PageCopies,
    PagePlace,
    Pieces,
)
from worker_proc.kv_tiers.pool_pages import HostPool
from worker_proc.kv_tiers.shared_pages import (
    SharedPages,
    SharedPeers,
    file_bytes,
    places_in,
    shared_file,
)

PAGE_BYTES = 300
NAMESPACE = bytes(range(16))


def name_of(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def page_of(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


@pytest.fixture(params=["native", "numpy"])
def copies(request: pytest.FixtureRequest) -> PageCopies:
    return NativeCopies(load_kernels()) if request.param == "native" else NumpyCopies()


def open_pages(
    directory: Path, max_pages: int = 20, namespace: bytes = NAMESPACE, num_spare: int = 1
) -> SharedPages:
    return SharedPages(directory, namespace, PAGE_BYTES, max_pages, NumpyCopies(), num_spare)


def keep(pages: SharedPages, *numbers: int) -> list[bytes]:
    """Keep pages, and return the names of those that made room for them."""
    removed = []
    for number in numbers:
        buffer = pages.take()
        if buffer is None:
            buffer = np.empty(PAGE_BYTES, dtype=np.uint8)
        buffer[:] = page_of(number)
        removed += pages.keep(name_of(number), buffer)[0]
    return removed


def read(peers: SharedPeers, number: int) -> Bytes | None:
    page = np.zeros(PAGE_BYTES, dtype=np.uint8)
    return page if peers.read(name_of(number), PagePlace.at(page[:100], page[100:])) else None


def peers_of(*directories: Path, namespace: bytes = NAMESPACE) -> SharedPeers:
    return SharedPeers(directories, namespace, PAGE_BYTES, NumpyCopies())


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[64], [1], [63, 65, 1, 200], [8192, 8191, 8193], [12288] * 3])
def test_compiled_copies_and_checksums_are_those_of_numpy(sizes: list[int]) -> None:
    draw = np.random.default_rng(len(sizes))
    native, reference = NativeCopies(load_kernels()), NumpyCopies()
    parts = [draw.integers(0, 256, (3, size), dtype=np.uint8) for size in sizes]
    place = PagePlace(Pieces(parts), 1)
    gathered = [np.zeros(sum(sizes), dtype=np.uint8) for _ in range(2)]
    word_bytes = 4 if all(size % 4 == 0 for size in sizes) else 0
    found = native.gather(place, gathered[0], word_bytes)
    assert found == reference.gather(place, gathered[1], word_bytes)
    np.testing.assert_array_equal(gathered[0], np.concatenate([part[1] for part in parts]))
    np.testing.assert_array_equal(gathered[0], gathered[1])
    checksum = native.checksum(gathered[0])
    assert checksum == reference.checksum(gathered[0]) == found.checksum
    source = draw.integers(0, 256, sum(sizes), dtype=np.uint8)
    before = [part.copy() for part in parts]
    assert native.scatter(source, place) == reference.checksum(source)
    np.testing.assert_array_equal(np.concatenate(place.buffers), source)
    for part, old in zip(parts, before, strict=True):
        np.testing.assert_array_equal(part[[0, 2]], old[[0, 2]])  # other pages
    assert reference.scatter(gathered[0], place) == checksum
    if all(size % 4 == 0 for size in sizes):
        for word in (2, 4):
            assert native.largest_word(place, word) == reference.largest_word(place, word)


def test_a_checksum_sees_one_or_two_changed_bits_and_exchanged_words(copies: PageCopies) -> None:
    page = page_of(1)
    expected = copies.checksum(page)
    bits = random.Random(2)
    for count in (1, 2):
        for _ in range(500):
            changed = page.copy()
            for place in bits.sample(range(8 * PAGE_BYTES), count):
                changed[place // 8] ^= 1 << place % 8
            assert copies.checksum(changed) != expected
    words = page.view(np.uint32).copy()
    words[[3, 19]] = words[[19, 3]]
    assert copies.checksum(words.view(np.uint8)) != expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_page_is_finite_as_torch_says(dtype: torch.dtype, copies: PageCopies) -> None:
    limits = torch.finfo(dtype)
    numbers = [0.0, -0.0, 1.0, -1.0, limits.max, limits.min, limits.tiny, -limits.tiny / 4]
    others = [float("inf"), -float("inf"), float("nan"), -float("nan")]
    pages = torch.tensor([[*numbers, each] for each in (*numbers, *others)], dtype=dtype)
    pool = HostPool([torch.zeros_like(pages), pages], copies=copies)
    expected = pages.isfinite().all(1).tolist()
    assert [pool.is_finite(page) for page in range(len(pages))] == expected
    assert expected == [True] * len(numbers) + [False] * len(others)
    assert HostPool([torch.full((1, 4), -1, dtype=torch.int8)]).is_finite(0), "whole numbers are"


def test_kernels_are_at_hand_once_they_are_compiled() -> None:
    load_kernels()
    assert kernels_at_hand() is not None


# --- the owner ------------------------------------------------------------------------------------


def test_the_pages_that_were_used_last_are_kept(tmp_path: Path) -> None:
    pages = open_pages(tmp_path, 3)
    assert keep(pages, 0, 1, 2) == []
    found = pages.get(name_of(0))
    np.testing.assert_array_equal(found, page_of(0))
    assert keep(pages, 3) == [name_of(1)]
    assert keep(pages, 3) == []
    assert [number for number in range(4) if name_of(number) in pages] == [0, 2, 3]
    assert list(pages.names()) == [name_of(number) for number in (2, 0, 3)]
    pages.close()


def test_a_thousand_pages_are_kept_and_found_in_a_hundred_places(tmp_path: Path) -> None:
    pages, peers = open_pages(tmp_path, 100), peers_of(tmp_path)
    removed = keep(pages, *range(1000))
    kept = set(pages.names())
    assert len(removed) == 900 and len(kept) == 100 and not kept & set(removed)
    for number in range(1000):
        found = read(peers, number)
        assert (found is not None) == (name_of(number) in kept)
        if found is not None:
            np.testing.assert_array_equal(found, page_of(number))
    assert (peers.num_read, peers.num_damaged) == (100, 0)
    pages.close()


def test_the_next_process_of_a_replica_takes_its_pages_over(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from tests.unit.worker.test_shared_pages import *;"
        f"pages = open_pages(Path({str(tmp_path)!r}));"
        "keep(pages, *range(9)); pages.take()[:] = 7; os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], timeout=60)
    pages = open_pages(tmp_path, max_pages=4)  # the file has its own number
    assert set(pages.names()) == {name_of(number) for number in range(9)}
    assert pages.max_pages == 20
    for number in range(9):
        np.testing.assert_array_equal(pages.get(name_of(number)), page_of(number))
    assert len(keep(pages, *range(9, 29))) == 9
    pages.close()


def test_a_file_that_is_none_is_made_again_and_others_are_removed(tmp_path: Path) -> None:
    other = open_pages(tmp_path, namespace=bytes(16))
    other.close()
    path = shared_file(tmp_path, NAMESPACE)
    path.write_bytes(b"something else")
    pages = open_pages(tmp_path)
    assert list(pages.names()) == [] and not shared_file(tmp_path, bytes(16)).exists()
    with pytest.raises(ConfigError, match="another server uses it"):
        open_pages(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    pages.close()


def test_changed_pages_are_misses_of_the_owner_and_of_its_peers(tmp_path: Path) -> None:
    pages, peers = open_pages(tmp_path), peers_of(tmp_path)
    keep(pages, *range(6))
    assert damage_pages(shared_file(tmp_path, NAMESPACE)) == 6
    assert [read(peers, number) for number in range(6)] == [None] * 6
    assert (peers.num_read, peers.num_damaged) == (0, 6)
    assert [pages.get(name_of(number)) for number in range(6)] == [None] * 6
    assert pages.num_damaged == 6 and list(pages.names()) == []
    keep(pages, *range(6))
    assert all(read(peers, number) is not None for number in range(6))
    assert forget_pages(shared_file(tmp_path, NAMESPACE)) == 6
    assert [read(peers, number) for number in range(6)] == [None] * 6
    assert peers.num_damaged == 6
    pages.close()


def test_without_more_memory_the_oldest_pages_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_pages, "GROWTH_BYTES", 4096)
    allocate, left = shared_pages._allocate, iter(range(5))

    def allocate_five(fd: int, begin: int, num_bytes: int) -> None:
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        allocate(fd, begin, num_bytes)

    pages, peers = open_pages(tmp_path), peers_of(tmp_path)
    monkeypatch.setattr(shared_pages, "_allocate", allocate_five)
    assert keep(pages, *range(12)) == [name_of(number) for number in range(7)]
    np.testing.assert_array_equal(read(peers, 11), page_of(11))
    assert sum("takes no more KV pages" in line for line in caplog.messages) == 1
    pages.close()


def test_without_any_memory_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate_none(fd: int, begin: int, num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    pages = open_pages(tmp_path)
    monkeypatch.setattr(shared_pages, "_allocate", allocate_none)
    assert keep(pages, 1, 2) == [name_of(1), name_of(2)]
    pages.close()


def test_as_many_places_fit_as_the_size_says() -> None:
    for page_bytes in (1, 4096, 300_000):
        for num_bytes in (0, 10_000, 10_000_000):
            count = places_in(num_bytes, page_bytes)
            assert count == 0 or file_bytes(page_bytes, count) <= num_bytes
        assert file_bytes(page_bytes, places_in(10_000_000, page_bytes) + 20) > 10_000_000 * 0.9


# --- peers ----------------------------------------------------------------------------------------


def test_pages_of_other_replicas_are_found_where_these_have_them(tmp_path: Path) -> None:
    directories = [tmp_path / str(number) for number in range(3)]
    peers = peers_of(*directories)
    assert read(peers, 1) is None
    owners = [open_pages(directory) for directory in directories[:2]]
    keep(owners[0], 1, 3)
    keep(owners[1], 2, 3)
    assert [read(peers, number) is not None for number in (1, 2, 4)] == [True, True, False]
    damage_pages(shared_file(directories[0], NAMESPACE))
    np.testing.assert_array_equal(read(peers, 3), page_of(3))
    assert (peers.num_read, peers.num_damaged) == (3, 1)
    assert read(peers_of(*directories, namespace=bytes(16)), 2) is None, "other bytes"
    for each in owners:
        each.close()


def test_a_file_that_was_made_again_is_found(tmp_path: Path) -> None:
    pages, peers = open_pages(tmp_path), peers_of(tmp_path)
    keep(pages, 1)
    assert read(peers, 1) is not None
    pages.close()
    shared_file(tmp_path, NAMESPACE).unlink()
    assert read(peers, 1) is not None, "what was mapped stays"
    pages = open_pages(tmp_path)
    keep(pages, 2)
    assert read(peers, 2) is not None
    pages.close()


def test_a_file_of_another_size_is_not_mapped(tmp_path: Path) -> None:
    pages = open_pages(tmp_path)
    keep(pages, 1)
    pages.close()
    path = shared_file(tmp_path, NAMESPACE)
    os.truncate(path, path.stat().st_size - 4096)
    assert read(peers_of(tmp_path), 1) is None


def test_a_page_that_is_replaced_while_it_is_read_is_a_miss_or_whole(tmp_path: Path) -> None:
    pages = open_pages(tmp_path, 2)
    keep(pages, 1, 2)

    class Replacing(NumpyCopies):
        """Copies between whose halves the owner keeps other pages."""

        def scatter(self, source: Bytes, target: PagePlace) -> bytes:
            half = len(source) // 2
            (buffer,) = target.buffers
            buffer[:half] = source[:half]
            keep(pages, 3, 4)
            buffer[half:] = source[half:]
            return self.checksum(buffer)

    peers = SharedPeers([tmp_path], NAMESPACE, PAGE_BYTES, Replacing())
    page = np.zeros(PAGE_BYTES, dtype=np.uint8)
    assert not peers.read(name_of(1), PagePlace.at(page))
    assert (peers.num_read, peers.num_damaged) == (0, 0)
    pages.close()
