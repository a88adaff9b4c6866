"""KV pages in shared memory: a tier of one process, which others of the machine read.

One file holds the pages of a replica, in places of one size, with their names. Its owner,
`SharedPages`, maps it, and writes pages there like those of a tier in memory. Other replicas map
it, too: `SharedPeers`. They copy a page straight to their pool, and look at its name and checksum
before and after that, so that they need no lock: a page that has made room for another one
meanwhile is a miss.

    DIR/NAMESPACE.pages
        header    magic, namespace, bytes of a page, number of places
        index     buckets of 16 numbers of places. A page is in the bucket that its name chooses
        entries   of each place the name of its page and a digest of its bytes; zeros: it is free
        places    each as large as a page, rounded up to 4096 bytes

Memory is taken when it is first used, and what is not there is not written to, since a write to
memory that the machine does not have ends a process.
"""

import logging
import mmap
import os
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from quadriga import disk
from quadriga.errors import ConfigError
from worker_proc.kv_tiers.page_copies import Bytes, PageCopies, PagePlace
from worker_proc.kv_tiers.tiers import lock_directory

SUFFIX = ".pages"
MAGIC = b"QUADSHM1"
HEADER = struct.Struct("<8s16sqq")  # magic, namespace, bytes of a page, number of places
BUCKET = struct.Struct("<16i")  # numbers of places, from 1 on; 0: none
ENTRY = struct.Struct("16s16s")  # name, digest
NAMESPACE_BYTES = 16
FREE = bytes(ENTRY.size)
PAGES_PER_BUCKET = 4  # on average, so that hardly any has more than 16
BLOCK_BYTES = 4096
GROWTH_BYTES = 2**23  # of the memory that is taken at once


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


class FileLayout:
    """Where everything is in a file.

    Attributes:
        header: of the file.
        num_places: number of places.
        page_bytes: size of a page.
        place_bytes: size of a place.
        first_place: where the places begin.
        num_bytes: size of the file.
    """

    def __init__(self, namespace: bytes, page_bytes: int, num_places: int) -> None:
        self.header = HEADER.pack(MAGIC, namespace, page_bytes, num_places)
        self.num_places = num_places
        self.page_bytes, self.place_bytes = page_bytes, _round_up(page_bytes)
        self._num_buckets = -(-num_places // PAGES_PER_BUCKET)
        self._entries = HEADER.size + self._num_buckets * BUCKET.size
        self.first_place = _round_up(self._entries + num_places * ENTRY.size)
        self.num_bytes = self.first_place + num_places * self.place_bytes

    def bucket(self, name: bytes) -> int:
        """Return where the bucket of a page is."""
        number = int.from_bytes(name[:8], "little") % self._num_buckets
        return HEADER.size + number * BUCKET.size

    def buckets(self) -> range:
        """Return where all buckets are."""
        return range(HEADER.size, self._entries, BUCKET.size)

    def entry(self, place: int) -> int:
        """Return where the entry of a place is."""
        return self._entries + place * ENTRY.size

    def place(self, place: int) -> int:
        """Return where a place is."""
        return self.first_place + place * self.place_bytes


class _Map:
    """A file in memory.

    Attributes:
        layout: where everything is in it.
        memory: its bytes.
        inode: of the file.
    """

    def __init__(self, fd: int, layout: FileLayout, is_written: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_written else 0)
        self.layout = layout
        self.inode = os.fstat(fd).st_ino
        self._map = mmap.mmap(fd, layout.num_bytes, prot=access)
        self.memory = np.frombuffer(self._map, dtype=np.uint8)
        self.bytes = memoryview(self._map)

    def entry(self, place: int) -> bytes:
        """Return the entry of a place as it is now."""
        begin = self.layout.entry(place)
        return bytes(self.bytes[begin : begin + ENTRY.size])

    def page(self, place: int) -> Bytes:
        """Return the memory of the page in a place."""
        begin = self.layout.place(place)
        return self.memory[begin : begin + self.layout.page_bytes]

    def places_of(self, name: bytes) -> Sequence[int]:
        """Return the places among which a page is, if it is there."""
        numbers = BUCKET.unpack_from(self.bytes, self.layout.bucket(name))
        return [number - 1 for number in numbers if 0 < number <= self.layout.num_places]


def digest_of(namespace: bytes, name: bytes, checksum: bytes) -> bytes:
    """Return what says that a page is what was written under a name."""
    return blake2b(checksum, digest_size=16, key=name, salt=namespace).digest()


def shared_file(directory: Path, namespace: bytes) -> Path:
    """Return the file with the pages of a replica."""
    return directory / f"{namespace.hex()}{SUFFIX}"


def file_bytes(page_bytes: int, num_places: int) -> int:
    """Return the size of a file."""
    return FileLayout(bytes(NAMESPACE_BYTES), page_bytes, num_places).num_bytes


def places_in(num_bytes: int, page_bytes: int) -> int:
    """Return how many places a file of some size has at least."""
    num_bytes -= HEADER.size + BUCKET.size + BLOCK_BYTES
    return max(0, num_bytes // (_round_up(page_bytes) + ENTRY.size + BUCKET.size))


def _layout_of(fd: int, namespace: bytes, page_bytes: int) -> FileLayout | None:
    """Return the layout of a file with pages of a namespace; None if it is none."""
    header = os.pread(fd, HEADER.size, 0)
    if len(header) < HEADER.size:
        return None
    num_places = HEADER.unpack(header)[3]
    if not 0 < num_places < 2**31:
        return None
    layout = FileLayout(namespace, page_bytes, num_places)
    is_whole = header == layout.header and os.fstat(fd).st_size == layout.num_bytes
    return layout if is_whole else None


class SharedPages:
    """The pages of this replica, up to a number of them; the least recently used ones go first.

    A page is kept in the memory that `take` has given for it. What an earlier process of the
    replica has left in the file is taken over.

    Attributes:
        max_pages: number of pages that are kept at most.
        num_damaged: number of pages that were found changed since they were written.
    """

    def __init__(
        self,
        directory: Path,
        namespace: bytes,
        page_bytes: int,
        max_pages: int,
        copies: PageCopies,
        num_spare: int = 1,
    ) -> None:
        """Make the file, or open it. Those of other namespaces are removed.

        Args:
            directory: where the file is. It is made if it is missing.
            namespace: 16 bytes, other ones wherever the same tokens have other bytes.
            page_bytes: size of a page.
            max_pages: number of pages that are kept. A file that is there has its own.
            copies: what makes checksums.
            num_spare: places of pages that are not kept yet.

        Raises:
            ConfigError: the directory cannot be used, or another process uses it.
        """
        self.num_damaged = 0
        self._namespace, self._copies = namespace, copies
        self._path = shared_file(directory, namespace)
        try:
            os.makedirs(directory, 0o700, exist_ok=True)
            self._lock = lock_directory(directory)
            for other in directory.glob(f"*{SUFFIX}"):
                if other != self._path:
                    other.unlink()
            self._fd, layout = self._open(FileLayout(namespace, page_bytes, max_pages + num_spare))
            self._map = _Map(self._fd, layout, is_written=True)
        except OSError as error:
            raise ConfigError(
                f"no KV pages can be exchanged in {directory}: {error.strerror}; make room, or name"
                " another directory by --kv-cache-dir"
            ) from None
        self.max_pages = layout.num_places - num_spare
        self._layout = layout
        self._begin_of_places = int(self._map.memory.ctypes.data) + layout.first_place
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # places; the oldest name first
        self._free: list[int] = []  # places that have memory, and are not in use
        self._num_backed = 0  # places that have memory
        self._is_full = False
        self._take_over()

    def _open(self, new: FileLayout) -> tuple[int, FileLayout]:
        """Open the file that is there, or make one with a new layout.

        None is made shorter, since another replica may have it mapped.
        """
        fd = disk.open_regular(self._path, os.O_RDWR | os.O_CREAT)
        layout = _layout_of(fd, self._namespace, new.page_bytes)
        if layout is not None:
            return fd, layout
        os.close(fd)
        os.unlink(self._path)
        fd = disk.open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.ftruncate(fd, new.num_bytes)
        _allocate(fd, 0, new.first_place)
        os.pwrite(fd, new.header, 0)
        return fd, new

    def _take_over(self) -> None:
        """Find the pages that are in the file, and free everything else."""
        layout, found = self._layout, self._map
        for begin in layout.buckets():
            numbers = list(BUCKET.unpack_from(found.bytes, begin))
            for index, number in enumerate(numbers):
                name = b""
                if 0 < number <= layout.num_places:
                    name, _digest = ENTRY.unpack(found.entry(number - 1))
                if any(name) and layout.bucket(name) == begin and name not in self._kept:
                    self._kept[name] = number - 1
                else:
                    numbers[index] = 0
            BUCKET.pack_into(found.bytes, begin, *numbers)
        self._num_backed = max(self._kept.values(), default=-1) + 1
        used = set(self._kept.values())
        for place in range(self._num_backed):
            if place not in used:
                self._write_entry(place, FREE)
                self._free.append(place)

    def names(self) -> Iterable[bytes]:
        """Return the names of all pages, the least recently used first."""
        return list(self._kept)

    def __contains__(self, name: bytes) -> bool:
        return name in self._kept

    def back_all(self) -> Bytes:
        """Take memory for all places, as far as the machine has it, and return it."""
        while self._num_backed < self._layout.num_places and not self._is_full:
            self._grow()
        first, last = self._layout.first_place, self._layout.place(self._num_backed)
        return self._map.memory[first:last]

    def take(self) -> Bytes | None:
        """Return memory for a page, `[page_bytes]`; None: the machine has no more."""
        if not self._free:
            self._grow()
        return self._map.page(self._free.pop()) if self._free else None

    def _grow(self) -> None:
        """Take memory for some more places, if there is any."""
        layout = self._layout
        count = max(1, GROWTH_BYTES // layout.place_bytes)
        count = min(count, layout.num_places - self._num_backed)
        if count <= 0 or self._is_full:
            return
        try:
            _allocate(self._fd, layout.place(self._num_backed), count * layout.place_bytes)
        except OSError as error:
            self._is_full = True
            logging.warning(
                "shared memory takes no more KV pages: %s; %d are kept in %s, and the least"
                " recently used ones make room for others",
                error.strerror, self._num_backed, self._path,
            )  # fmt: skip
            return
        self._free += range(self._num_backed, self._num_backed + count)
        self._num_backed += count

    def get(self, name: bytes) -> Bytes | None:
        """Return a page, which is valid until the next call of `keep`; None if it is not there."""
        place = self._kept.get(name)
        if place is None:
            return None
        page = self._map.page(place)
        digest = digest_of(self._namespace, name, self._copies.checksum(page))
        if self._map.entry(place) != ENTRY.pack(name, digest):
            self.num_damaged += 1
            self._forget(name)
            self._free.append(place)
            return None
        self._kept.move_to_end(name)
        return page

    def keep(
        self, name: bytes, page: Bytes, checksum: bytes | None = None
    ) -> tuple[list[bytes], list[Bytes]]:
        """Keep a page in its own memory, or in that of an older page.

        Args:
            name: of the page.
            page: its bytes.
            checksum: of the page; None: it was not made yet.

        Returns:
            The names of the pages that made room for it, or its own, and the memory that is not
            needed now.
        """
        removed: list[bytes] = []
        if name in self._kept:
            self._free.append(self._forget(name))
        place = self._place_of(page)
        while len(self._kept) >= self.max_pages or (
            place is None and not self._free and self._kept
        ):
            oldest = next(iter(self._kept))
            removed.append(oldest)
            self._free.append(self._forget(oldest))
        if place is None:  # there was no memory for it here
            if not self._free:
                return [name], []
            place = self._free.pop()
            self._map.page(place)[:] = page
        checksum = self._copies.checksum(page) if checksum is None else checksum
        if not self._publish(name, place, checksum):
            removed.append(name)
            self._free.append(place)
        return removed, []

    def _place_of(self, page: Bytes) -> int | None:
        """Return the place that is the memory of a page; None if it has other memory."""
        place = (int(page.ctypes.data) - self._begin_of_places) // self._layout.place_bytes
        return place if 0 <= place < self._layout.num_places else None

    def _publish(self, name: bytes, place: int, checksum: bytes) -> bool:
        """Let others find a page. Return whether its bucket has room for it."""
        found = self._map
        bucket = self._layout.bucket(name)
        numbers = BUCKET.unpack_from(found.bytes, bucket)
        if 0 not in numbers:
            return False
        digest = digest_of(self._namespace, name, checksum)
        self._write_entry(place, ENTRY.pack(name, digest))
        self._write_number(bucket, numbers.index(0), place + 1)
        self._kept[name] = place
        return True

    def _forget(self, name: bytes) -> int:
        """Let others not find a page any more. Return its place."""
        place, bucket = self._kept.pop(name), self._layout.bucket(name)
        numbers = BUCKET.unpack_from(self._map.bytes, bucket)
        if place + 1 in numbers:
            self._write_number(bucket, numbers.index(place + 1), 0)
        self._write_entry(place, FREE)
        return place

    def _write_number(self, bucket: int, index: int, number: int) -> None:
        struct.pack_into("<i", self._map.bytes, bucket + 4 * index, number)

    def _write_entry(self, place: int, entry: bytes) -> None:
        begin = self._layout.entry(place)
        self._map.bytes[begin : begin + ENTRY.size] = entry

    def close(self) -> None:
        """Give up the directory, for another owner in this process."""
        os.close(self._fd)
        os.close(self._lock)


def _allocate(fd: int, begin: int, num_bytes: int) -> None:
    """Give a part of a file memory. Raise OSError if there is none."""
    if sys.platform == "linux":
        os.posix_fallocate(fd, begin, num_bytes)
    else:
        os.pwrite(fd, bytes(num_bytes), begin)


class SharedReader:
    """Reads the pages of this replica beside their owner, in another thread.

    Args:
        directory: as of SharedPages, which has made the file.
        namespace: as of SharedPages.
        page_bytes: size of a page.

    Raises:
        OSError: the file cannot be read.
    """

    def __init__(self, directory: Path, namespace: bytes, page_bytes: int) -> None:
        found = _open_map(shared_file(directory, namespace), namespace, page_bytes)
        if found is None:
            raise FileNotFoundError(shared_file(directory, namespace))
        self._map = found

    def __contains__(self, name: bytes) -> bool:
        return self._place_of(name) is not None

    def copy(self, name: bytes) -> tuple[bytes, Bytes] | None:
        """Return the digest that was written with a page, and its bytes; None if it is not there.

        Whether they belong together is for the receiver to check.
        """
        place = self._place_of(name)
        if place is None:
            return None
        entry = self._map.entry(place)
        page = self._map.page(place).copy()
        is_same = entry[: len(name)] == name and self._map.entry(place) == entry
        return (entry[len(name) :], page) if is_same else None

    def _place_of(self, name: bytes) -> int | None:
        places = self._map.places_of(name)
        return next((one for one in places if self._map.entry(one)[: len(name)] == name), None)


class SharedPeers:
    """The pages in shared memory of other replicas, which may remove them at any time.

    Nothing is known of what they have: a page is there if it is found.

    Attributes:
        num_read: number of pages that were read.
        num_damaged: number of pages that were found changed since they were written.
    """

    def __init__(
        self, directories: Iterable[Path], namespace: bytes, page_bytes: int, copies: PageCopies
    ) -> None:
        """Initialize.

        Args:
            directories: one for each replica, whether it is there or not.
            namespace: as in SharedPages. A replica that computes other bytes has another one.
            page_bytes: size of a page.
            copies: what copies pages.
        """
        self.num_read = 0
        self.num_damaged = 0
        self._namespace, self._page_bytes, self._copies = namespace, page_bytes, copies
        self._maps: dict[Path, _Map | None] = {
            shared_file(directory, namespace): None for directory in directories
        }

    def begin(self, names: Sequence[bytes], is_wanted: Callable[[], bool], asked_at: float) -> None:
        """Do nothing: pages are there at once."""

    def read(self, name: bytes, place: PagePlace) -> bool:
        """Copy a page.

        Returns:
            False if no replica has it as it was written. The place holds anything then.
        """
        for path, found in self._maps.items():
            if found is not None and self._copy(found, name, place):
                return True
            if self._is_new(path, found):
                found = self._maps[path] = _open_map(path, self._namespace, self._page_bytes)
                if found is not None and self._copy(found, name, place):
                    return True
        return False

    def _copy(self, found: _Map, name: bytes, place: PagePlace) -> bool:
        """Copy a page from a file; return False if it is not there as it was written."""
        for number in found.places_of(name):
            entry = found.entry(number)
            if entry[: len(name)] != name:
                continue
            checksum = self._copies.scatter(found.page(number), place)
            if found.entry(number) != entry:
                continue  # it has made room for another one meanwhile
            if entry == ENTRY.pack(name, digest_of(self._namespace, name, checksum)):
                self.num_read += 1
                return True
            self.num_damaged += 1
        return False

    @staticmethod
    def _is_new(path: Path, found: _Map | None) -> bool:
        """Return whether there is a file that is not mapped."""
        try:
            return found is None or os.stat(path).st_ino != found.inode
        except OSError:
            return False


def _open_map(path: Path, namespace: bytes, page_bytes: int) -> _Map | None:
    """Map a file to read it; return None if it is not there, or has other pages."""
    try:
        fd = disk.open_regular(path)
    except OSError:
        return None
    try:
        layout = _layout_of(fd, namespace, page_bytes)
        return None if layout is None else _Map(fd, layout, is_written=False)
    finally:
        os.close(fd)
