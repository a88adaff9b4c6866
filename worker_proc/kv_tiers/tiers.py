"""The tiers of KV pages beyond the pool: copies by their names, up to a size.

`HostPages` is in memory, `PageFiles` on disk, and a `PeerTier` has those of other replicas:
`PeerFiles` on this machine. shared_pages.py has the tiers in shared memory, peer_pages.py that of
other machines. Each is used by one thread at a time.
"""

import fcntl
import logging
import os
import re
import struct
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from quadriga import disk
from quadriga.errors import ConfigError
from worker_proc.kv_tiers.page_copies import Bytes, PagePlace


class MemoryPages(Protocol):
    """The contract of a tier in memory.

    Attributes:
        max_pages: number of pages that are kept at most.
        num_damaged: number of pages that were found changed since they were written.
    """

    max_pages: int
    num_damaged: int

    def names(self) -> Iterable[bytes]:
        """Return the names of all pages, the least recently used first."""

    def __contains__(self, name: bytes) -> bool: ...

    def get(self, name: bytes) -> Bytes | None:
        """Return a page, which is valid until the next call of `keep`; None if it is not there."""

    def keep(
        self, name: bytes, page: Bytes, checksum: bytes | None = None
    ) -> tuple[list[bytes], list[Bytes]]:
        """Keep a page in its own memory.

        Args:
            name: of the page.
            page: its bytes.
            checksum: of the page, as PageCopies has it; None: it was not made yet.

        Returns:
            The names of the pages that made room for it, and the memory that is not needed now.
        """


class HostPages:
    """Copies of pages in memory, up to a number of them; the least recently used ones go first.

    It keeps the memory that it is given, and gives it back with the page.
    """

    num_damaged = 0  # what is in the memory of this process is taken as it is

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self._pages: OrderedDict[bytes, Bytes] = OrderedDict()

    def names(self) -> Iterable[bytes]:
        """Return the names of all pages, the least recently used first."""
        return list(self._pages)

    def __contains__(self, name: bytes) -> bool:
        return name in self._pages

    def get(self, name: bytes) -> Bytes | None:
        """Return a page, which is valid until the next call of `keep`; None if it is not there."""
        page = self._pages.get(name)
        if page is not None:
            self._pages.move_to_end(name)
        return page

    def keep(
        self,
        name: bytes,
        page: Bytes,
        checksum: bytes | None = None,  # noqa: ARG002
    ) -> tuple[list[bytes], list[Bytes]]:
        """Keep a page in its own memory.

        Args:
            name: of the page.
            page: its bytes.
            checksum: not needed.

        Returns:
            The names of the pages that made room for it, and the memory that is not needed now.
        """
        old = self._pages.pop(name, None)
        removed, freed = [], [] if old is None else [old]
        if len(self._pages) == self.max_pages:
            oldest, memory = self._pages.popitem(last=False)
            removed.append(oldest)
            freed.append(memory)
        self._pages[name] = page
        return removed, freed


# The tier on disk (--kv-cache-dir): one file for each page.
#
# DIR/NAMESPACE/ab/abcdef….kv, where the namespace is a hash of all that says what the bytes mean
# (opening.py), and the file's name is that of the page. A file begins with both, and with a
# checksum of the bytes; a file that has anything else is removed when it is read. Files are
# written under another name and then renamed, so that there is no half of one. They are not
# synced: what a loss of power damages is found by the checksum.
#
# Files are read straight into the pool and not mapped: where a disk fails, or a file becomes
# shorter, access to a mapping kills the process.

SUFFIX = ".kv"
HEADER = struct.Struct("<8s16s16sI20x")  # magic, namespace, name, checksum
MAGIC = b"QUADKV01"
RETRY_S = 60.0  # between attempts to write to a disk that has failed
LOCK_TIMEOUT_S = 2.0  # a worker that was killed is gone by then
LOCK_POLL_S = 0.02
HEX_DIGITS = 32  # of the name of a page or of a namespace
HEX_NAME = re.compile(f"[0-9a-f]{{{HEX_DIGITS}}}")


class PageFiles:
    """The files of a directory, up to a size; the least recently used ones go first.

    Those of other namespaces count, too, and are removed when it is their turn.

    Attributes:
        num_damaged: number of pages that were found changed since they were written.
        has_failed: whether it takes no pages at present.
    """

    def __init__(self, directory: Path, namespace: bytes, page_bytes: int, max_bytes: int) -> None:
        """Lock the directory, and find the files in it.

        Args:
            directory: where they are. It is made if it is missing.
            namespace: 16 bytes, other ones wherever the same tokens have other bytes.
            page_bytes: size of a page.
            max_bytes: size of all files together.

        Raises:
            ConfigError: the directory cannot be used, or another server uses it.
        """
        self.num_damaged = 0
        self.has_failed = False
        self._namespace = namespace
        self._page_bytes = page_bytes
        self._max_bytes = max_bytes
        self._root, self._own = directory, directory / namespace.hex()
        self._retry_at = 0.0
        # Sizes of all files by path, the least recently used first.
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._num_bytes = 0
        try:
            for made in (directory, self._own):
                os.makedirs(made, 0o700, exist_ok=True)
            self._check_owner()
            self._lock = lock_directory(directory)
            self._scan()
        except OSError as error:
            raise ConfigError(
                f"kv_cache_dir is {directory}: {error.filename}: {error.strerror}; name a directory"
                " that this user can write to"
            ) from None

    def names(self) -> Iterable[bytes]:
        """Return the names of all pages of the namespace, the least recently used first."""
        prefix = f"{self._own}/"
        return [_name_of(path) for path in self._sizes if path.startswith(prefix)]

    def __contains__(self, name: bytes) -> bool:
        return self._path(name) in self._sizes

    def read(self, name: bytes, buffers: Sequence[Bytes]) -> bool:
        """Copy a page to memory in pieces.

        Returns:
            False if the page is not there, or is not what was written. It is forgotten then, and
            the memory holds anything.
        """
        path = self._path(name)
        if path not in self._sizes:
            return False
        try:
            is_whole = _read_page(path, self._namespace, name, buffers)
        except OSError:  # it was removed, or the disk fails
            is_whole = False
        if is_whole:
            self._sizes.move_to_end(path)
            with suppress(OSError):
                os.utime(path)  # the order of use, for the next start
        else:
            self.num_damaged += os.path.exists(path)
            self._remove(path)
        return is_whole

    def write(self, name: bytes, page: Bytes) -> list[bytes]:
        """Take a page in. Return the names of those that made room for it, or its own."""
        path, size = self._path(name), HEADER.size + self._page_bytes
        if path in self._sizes:
            return []
        if self.has_failed and time.monotonic() < self._retry_at:
            return [name]
        removed = self._make_room(self._max_bytes - size)
        try:
            self._write(
                path, HEADER.pack(MAGIC, self._namespace, name, zlib.crc32(page.data)), page
            )
        except OSError as error:
            self._fail(error)
            return [*removed, name]
        if self.has_failed:
            logging.info("KV pages are written to %s again", self._root)
            self.has_failed = False
        self._sizes[path] = size
        self._num_bytes += size
        return removed

    def _path(self, name: bytes) -> str:
        return path_of(self._own, name)

    def _write(self, path: str, header: bytes, page: Bytes) -> None:
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        unfinished = f"{path}.new"
        fd = disk.open_regular(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            with os.fdopen(fd, "wb", buffering=0) as file:
                for data in (header, page.data):
                    if file.write(data) != len(data):
                        raise OSError("the disk took only a part of the file")
            os.rename(unfinished, path)
        except OSError:
            with suppress(OSError):  # it only takes space
                os.unlink(unfinished)
            raise

    def _fail(self, error: OSError) -> None:
        """Stop writing for a while. What is stored can still be read."""
        if not self.has_failed:
            logging.warning(
                "cannot write KV pages to %s: %s; requests go on, and no further pages are stored"
                " until that works again", error.filename or self._root, error.strerror or error,
            )  # fmt: skip
        self.has_failed = True
        self._retry_at = time.monotonic() + RETRY_S

    def _make_room(self, max_bytes: int) -> list[bytes]:
        """Remove files until all others fit. Return the names of those of this namespace."""
        removed = []
        while self._num_bytes > max_bytes and self._sizes:
            path = next(iter(self._sizes))
            self._remove(path)
            if path.startswith(f"{self._own}/"):
                removed.append(_name_of(path))
        return removed

    def _remove(self, path: str) -> None:
        self._num_bytes -= self._sizes.pop(path)
        with suppress(OSError):
            os.unlink(path)

    def close(self) -> None:
        """Give up the directory, for another owner in this process."""
        os.close(self._lock)

    # --- the start --------------------------------------------------------------------------------

    def _check_owner(self) -> None:
        if os.stat(self._own).st_uid != os.geteuid():
            raise ConfigError(
                f"kv_cache_dir is {self._root}: {self._own.name} in it belongs to another user, who"
                " may read and change what is stored; name another directory"
            )

    def _scan(self) -> None:
        found = []
        for path in _page_files(self._root):
            stat = os.lstat(path)
            try:
                disk.check_regular(path, stat.st_mode)
            except OSError as error:
                logging.warning("%s is no stored page: %s; remove it", path, error.strerror)
                continue
            if path.endswith(".new"):
                os.unlink(path)
                continue
            found.append((stat.st_mtime_ns, path, stat.st_size))
        self._sizes.update((path, size) for _used_at, path, size in sorted(found))
        self._num_bytes = sum(self._sizes.values())
        self._make_room(self._max_bytes)


class PeerTier(Protocol):
    """The pages of other replicas, which may lose them, or die, at any time.

    Attributes:
        num_read: number of pages that were read.
        num_damaged: number of pages that were found changed since they were written.
    """

    num_read: int
    num_damaged: int

    def begin(self, names: Sequence[bytes], is_wanted: Callable[[], bool], asked_at: float) -> None:
        """Note which pages are read next, in their order, so that they can be on their way.

        Args:
            names: of all pages of a load that no own tier has. What an earlier call named and was
                not read is not needed any more.
            is_wanted: returns False once the load is not needed any more; a read that waits for
                another replica ends then.
            asked_at: when the load was asked for (time.monotonic), so that what waits for it waits
                for a bounded time.
        """

    def read(self, name: bytes, place: PagePlace) -> bool:
        """Copy a page.

        Returns:
            False if no replica has it as it was written, or sends it in time, or the last `begin`
            has not named it. The place holds anything then.
        """


class PeerFiles:
    """The files of other replicas of this machine, which may remove them at any time.

    Nothing is known of what they have: a page is there if its file is.

    Args:
        directories: one for each replica, whether it is there or not.
        namespace: as in PageFiles. A replica that computes other bytes has another one.

    Attributes:
        num_read: number of pages that were read.
        num_damaged: number of pages that were found changed since they were written.
    """

    def __init__(self, directories: Iterable[Path], namespace: bytes) -> None:
        self.num_read = 0
        self.num_damaged = 0
        self._namespace = namespace
        self._directories = [directory / namespace.hex() for directory in directories]

    def begin(self, names: Sequence[bytes], is_wanted: Callable[[], bool], asked_at: float) -> None:
        """Do nothing: files are there at once."""

    def read(self, name: bytes, place: PagePlace) -> bool:
        """Copy a page.

        Returns:
            False if no replica has it as it was written. The place holds anything then.
        """
        for directory in self._directories:
            try:
                path = path_of(directory, name)
                is_whole = _read_page(path, self._namespace, name, place.buffers)
            except OSError:  # this replica does not have it
                continue
            if is_whole:
                self.num_read += 1
                return True
            self.num_damaged += 1
        return False


def path_of(directory: Path, name: bytes) -> str:
    """Return the file of a page in the directory of its namespace."""
    digits = name.hex()
    return f"{directory}/{digits[:2]}/{digits}{SUFFIX}"


def _read_page(path: str, namespace: bytes, name: bytes, buffers: Sequence[Bytes]) -> bool:
    """Copy a page to memory in pieces. Return whether it is what was written.

    Raises:
        OSError: the file is not there, or cannot be read.
    """
    header = bytearray(HEADER.size)
    num_bytes = HEADER.size + sum(buffer.nbytes for buffer in buffers)
    fd = disk.open_regular(path)
    try:
        num_read = os.preadv(fd, [header, *(buffer.data for buffer in buffers)], 0)
        if num_read != num_bytes or os.fstat(fd).st_size != num_bytes:
            return False
    finally:
        os.close(fd)
    checksum = 0
    for buffer in buffers:
        checksum = zlib.crc32(buffer.data, checksum)
    return header == HEADER.pack(MAGIC, namespace, name, checksum)


def _name_of(path: str) -> bytes:
    """Return the name of the page in a file."""
    return bytes.fromhex(path.removesuffix(SUFFIX)[-HEX_DIGITS:])


def _page_files(root: Path) -> Iterator[str]:
    """Yield the files of pages, also of unfinished ones, and no others."""
    for namespace in os.scandir(root):
        if HEX_NAME.fullmatch(namespace.name) and namespace.is_dir(follow_symlinks=False):
            for group in os.scandir(namespace):
                for file in os.scandir(group) if group.is_dir(follow_symlinks=False) else ():
                    stem, dot, suffix = file.name.partition(".")
                    if HEX_NAME.fullmatch(stem) and dot + suffix in (SUFFIX, f"{SUFFIX}.new"):
                        yield file.path


def lock_directory(directory: Path) -> int:
    """Lock a directory as long as this process lives. Return the open file."""
    fd = disk.open_regular(directory / "lock", os.O_RDWR | os.O_CREAT)
    give_up_at = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up_at:
                os.close(fd)
                raise ConfigError(
                    f"kv_cache_dir is {directory}: another server uses it; give each server a"
                    " directory of its own"
                ) from None
            time.sleep(LOCK_POLL_S)
        else:
            return fd
