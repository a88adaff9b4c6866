"""KV pages from other machines: whole, in time, and from the right model, or missing."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from quadriga.server.processes.page_sources import (
    PageSources,
    SourcesFile,
    format_sources,
    write_sources,
)
from quadriga.wire.curve import make_server_keys
from quadriga.wire.links import NodeLinks, ReservedPort
from tests.link_proxy import LinkProxy
from worker_proc.kv_tiers import peer_pages
from worker_proc.kv_tiers.page_copies import NumpyCopies, PagePlace
from worker_proc.kv_tiers.page_server import PageServer
from worker_proc.kv_tiers.peer_pages import PeerPages
from worker_proc.kv_tiers.shared_pages import SharedPages, SharedReader

PAGE_BYTES = 4096
NAMESPACE = bytes(range(16))
FACTS = {"model": "one", "dtype": "float32", "page_size": "16"}
TIMEOUT_S = 20.0
# Longer than the bounds that the tests set, and much shorter than TIMEOUT_S.
SOON_S = 5.0


def name_of(number: int) -> bytes:
    return blake2b(number.to_bytes(4, "big"), digest_size=16).digest()


def page_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


class Source:
    """A replica that keeps pages, and a proxy before it."""

    def __init__(self, directory: Path, key_dir: str, numbers: range, facts: dict[str, str]):
        self.directory = directory
        self.pages = SharedPages(directory, NAMESPACE, PAGE_BYTES, 2000, NumpyCopies())
        for number in numbers:
            self.keep(number, page_of(number))
        self._port = ReservedPort("127.0.0.1")
        self._links, self._facts = NodeLinks(pages=self._port.address, key_dir=key_dir), facts
        self.errors: list[str] = []
        self.proxy = LinkProxy(self._port.address)
        self.start()

    def keep(self, number: int, page: np.ndarray) -> None:
        memory = self.pages.take()
        assert memory is not None
        memory[:] = page
        assert self.pages.keep(name_of(number), memory) == ([], [])

    def damage(self, number: int) -> None:
        """Change a bit of a page in its memory."""
        page = self.pages.get(name_of(number))
        assert page is not None
        page[number] ^= 4

    def remove(self, number: int) -> None:
        """Let a page make room for others."""
        self.pages._free.append(self.pages._forget(name_of(number)))

    def start(self) -> None:
        reader = SharedReader(self.directory, NAMESPACE, PAGE_BYTES)
        self._server = PageServer(
            self._links, reader, self._facts, lambda: self.errors.append("it has died")
        )

    def stop(self) -> None:
        self._server.close()
        self.proxy.cut()

    def close(self) -> None:
        self.stop()
        self.pages.close()
        self.proxy.close()
        self._port.close()
        assert not self.errors


class World:
    """Sources, and a replica that reads from them."""

    def __init__(self, directory: Path) -> None:
        make_server_keys(directory / "keys")
        self.key_dir = str(directory / "keys")
        self._directory = directory
        self.sources: list[Source] = []
        self.addresses: dict[int, str] = {}
        self.tier = self.new_tier()

    def new_tier(self, key_dir: str | None = None) -> PeerPages:
        keys = self.key_dir if key_dir is None else key_dir
        return PeerPages(lambda: self.addresses, keys, NAMESPACE, PAGE_BYTES, FACTS, NumpyCopies())

    def add(self, numbers: range, **facts: str) -> Source:
        number = len(self.sources)
        source = Source(self._directory / str(number), self.key_dir, numbers, {**FACTS, **facts})
        self.sources.append(source)
        self.addresses[number] = source.proxy.address
        return source

    def load(self, numbers: range, is_wanted: Callable[[], bool] = lambda: True) -> int:
        """Return how many pages of a load come, each of which is the right one."""
        self.tier.begin([name_of(number) for number in numbers], is_wanted, time.monotonic())
        page = np.zeros(PAGE_BYTES, dtype=np.uint8)
        for count, number in enumerate(numbers):
            if not self.tier.read(name_of(number), PagePlace.at(page[:1000], page[1000:])):
                return count
            np.testing.assert_array_equal(page, page_of(number))
        return len(numbers)

    def load_until(self, numbers: range, wanted: int) -> None:
        """Load again and again, until so many pages come."""
        give_up_at = time.monotonic() + TIMEOUT_S
        while self.load(numbers) != wanted:
            assert time.monotonic() < give_up_at
            time.sleep(0.02)

    def close(self) -> None:
        self.tier.close()
        for source in self.sources:
            source.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(peer_pages, "SILENCE_S", 1.5)
    monkeypatch.setattr(peer_pages, "RETRY_S", 0.5)
    world = World(tmp_path)
    yield world
    world.close()


pytestmark = pytest.mark.timeout(60)


def test_pages_come_whole_and_those_that_are_not_there_are_missing(world: World) -> None:
    world.add(range(600))
    assert world.load(range(600)) == 600
    assert world.load(range(590, 700)) == 10
    assert world.load(range(700, 710)) == 0
    assert world.load(range(0)) == 0
    assert (world.tier.num_read, world.tier.num_damaged) == (610, 0)
    assert not world.tier.read(name_of(5), PagePlace.at(np.zeros(PAGE_BYTES, np.uint8))), (
        "not of this load"
    )


def test_no_more_is_on_its_way_than_a_window(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_pages, "WINDOW_BYTES", 8 * PAGE_BYTES)
    world.tier = world.new_tier()
    source = world.add(range(600))
    world.tier.begin([name_of(number) for number in range(600)], lambda: True, time.monotonic())
    time.sleep(0.3)
    assert 7 * PAGE_BYTES < source.proxy.num_bytes < 12 * PAGE_BYTES
    assert world.load(range(600)) == 600


def test_pages_of_several_replicas_make_one_load(world: World) -> None:
    world.add(range(10))
    world.add(range(5, 30))
    assert world.load(range(35)) == 30


def test_a_replica_that_joins_later_or_moves_is_found(world: World) -> None:
    assert world.load(range(3)) == 0
    world.add(range(10))
    assert world.load(range(10)) == 10
    world.add(range(20))
    world.addresses = {0: world.addresses[1]}
    assert world.load(range(20)) == 20


def test_damaged_pages_are_counted_and_missing_or_come_from_another_replica(world: World) -> None:
    first = world.add(range(40))
    for number in range(10, 40, 10):
        first.damage(number)
    assert world.load(range(40)) == 10
    assert world.tier.num_damaged == 1
    second = world.add(range(40))
    assert world.load(range(40)) == 40
    assert world.tier.num_damaged == 4
    first.remove(5)
    second.remove(6)
    assert world.load(range(40)) == 40
    second.remove(5)
    assert world.load(range(40)) == 5


@pytest.mark.parametrize(
    ("fact", "there"), [("dtype", "bfloat16"), ("page_size", "32"), ("model", "another")]
)
def test_a_replica_with_other_pages_is_named_and_none_is_taken(
    fact: str, there: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    source = world.add(range(10), **{fact: there})
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert world.load(range(10)) == 0
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"replica 0 at {source.proxy.address} keeps KV pages of another kind")
    assert message.endswith(f"{fact} is {there} there and {FACTS[fact]} here")
    world.add(range(5))
    assert world.load(range(10)) == 5


@pytest.mark.parametrize("fault", ["cut", "stopped"])
def test_a_broken_or_silent_link_ends_the_load_in_time_and_is_used_again_later(
    fault: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_pages, "WINDOW_BYTES", 8 * PAGE_BYTES)
    world.tier = world.new_tier()
    source = world.add(range(200))
    names = [name_of(number) for number in range(200)]
    for _ in range(3):
        world.load_until(range(200), 200)
        world.tier.begin(names, lambda: True, time.monotonic())
        page = np.zeros(PAGE_BYTES, np.uint8)
        assert all(world.tier.read(name, PagePlace.at(page)) for name in names[:50])
        if fault == "cut":
            source.proxy.cut()
        source.proxy.is_stopped = fault == "stopped"
        began_at = time.monotonic()
        read = [world.tier.read(name, PagePlace.at(page)) for name in names[50:]]
        assert not all(read) and time.monotonic() - began_at < SOON_S
        if fault == "stopped":
            # No other load waits for it.
            assert world.load(range(200)) == 0
            began_at = time.monotonic()
            assert world.load(range(200)) == world.load(range(200)) == 0
            assert time.monotonic() - began_at < 0.4
        source.proxy.is_stopped = False


def test_a_replica_that_is_started_again_gives_its_pages_again(world: World) -> None:
    source = world.add(range(20))
    assert world.load(range(20)) == 20
    source.stop()
    assert world.load(range(20)) == 0
    source.start()
    world.load_until(range(20), 20)


def test_what_a_slow_link_has_brought_in_time_is_used(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_pages, "LOAD_S", 0.6)
    source = world.add(range(200))
    assert world.load(range(20)) == 20
    source.proxy.bytes_per_s = 400_000
    began_at = time.monotonic()
    assert 0 < world.load(range(200)) < 200
    assert time.monotonic() - began_at < SOON_S
    source.proxy.bytes_per_s = None
    world.load_until(range(200), 200)


def test_what_has_waited_behind_other_loads_for_too_long_is_missing_at_once(world: World) -> None:
    world.add(range(20))
    assert world.load(range(20)) == 20
    began_at = time.monotonic()
    asked_at = began_at - peer_pages.LOAD_S
    world.tier.begin([name_of(1)], lambda: True, asked_at)
    assert not world.tier.read(name_of(1), PagePlace.at(np.zeros(PAGE_BYTES, np.uint8)))
    assert time.monotonic() - began_at < SOON_S
    assert world.load(range(20)) == 20, "the replica is not taken for silent"


def test_a_load_that_is_not_needed_any_more_ends_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_pages, "SILENCE_S", TIMEOUT_S)
    source = world.add(range(20))
    assert world.load(range(20)) == 20
    source.proxy.is_stopped = True
    is_needed = threading.Event()
    is_needed.set()
    threading.Timer(0.3, is_needed.clear).start()
    began_at = time.monotonic()
    assert world.load(range(20), is_needed.is_set) == 0
    assert 0.2 < time.monotonic() - began_at < SOON_S
    source.proxy.is_stopped = False
    world.load_until(range(20), 20)


def test_bytes_that_are_changed_on_the_way_never_arrive_as_a_page(world: World) -> None:
    source = world.add(range(100))
    assert world.load(range(100)) == 100
    source.proxy.change = lambda data: data[:-1] + bytes([data[-1] ^ 1])
    assert world.load(range(100)) < 100, "each page that came was the right one"
    source.proxy.change = lambda data: data
    source.proxy.cut()
    world.load_until(range(100), 100)


def test_without_keys_a_changed_byte_is_found_by_the_checksum(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.key_dir, world.tier = "", world.new_tier("")
    source = world.add(range(100))
    assert world.load(range(100)) == 100

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        if len(data) > 2 * PAGE_BYTES:
            changed[len(data) // 2] ^= 1
        return bytes(changed)

    source.proxy.change = change
    assert world.load(range(100)) < 100
    assert world.tier.num_damaged == 1
    source.proxy.change = lambda data: data
    world.load_until(range(100), 100)
    world.close()


def test_a_stranger_gets_no_page_and_nothing_is_in_clear(world: World, tmp_path: Path) -> None:
    source = world.add(range(3))
    source.proxy.seen = []
    assert world.load(range(3)) == 3
    wire = b"".join(source.proxy.seen)
    assert b"CURVE" in wire and page_of(1).tobytes()[:64] not in wire
    make_server_keys(tmp_path / "theirs")
    for keys in ("", str(tmp_path / "theirs")):
        tier = world.new_tier(keys)
        began_at = time.monotonic()
        tier.begin([name_of(1)], lambda: True, time.monotonic())
        assert not tier.read(name_of(1), PagePlace.at(np.zeros(PAGE_BYTES, np.uint8)))
        assert time.monotonic() - began_at < SOON_S
        tier.close()
    assert world.load(range(3)) == 3


def test_malformed_questions_are_dropped(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.key_dir, world.tier = "", world.new_tier("")
    source = world.add(range(3))
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(source.proxy.address)
    for frames in ([b""], [b"x", b"y"], [b"\xc1"], [msgspec.msgpack.encode(["send", 1])]):
        socket.send_multipart(frames)
    socket.send(msgspec.msgpack.encode(["send", 1, b"too short"]))
    assert world.load(range(3)) == 3
    socket.close(linger=0)
    world.close()


def test_the_file_of_sources_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    sources = PageSources(tmp_path, (0, 2))
    assert sources.find() == {}
    write_sources(tmp_path, format_sources({2: "tcp://10.0.0.2:1", 1: "tcp://10.0.0.1:1"}))
    assert sources.find() == {2: "tcp://10.0.0.2:1"}
    write_sources(tmp_path, "")
    assert sources.find() == {}


def test_sources_that_were_said_earlier_and_come_later_do_not_count(tmp_path: Path) -> None:
    file, sources = SourcesFile(tmp_path), PageSources(tmp_path, (0,))
    file.update("2 0=tcp://10.0.0.1:1")
    file.update("1 0=tcp://10.0.0.1:7")
    assert sources.find() == {0: "tcp://10.0.0.1:1"}
    file.update("3 ")
    assert sources.find() == {}
