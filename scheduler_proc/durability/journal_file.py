"""The file of the journal: it grows by whole frames, and is locked by one process."""

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from quadriga import disk
from quadriga.wire.sockets import encode
from scheduler_proc.durability.journal_records import (
    MAGIC,
    NOT_GIVEN_UP,
    JournalHeader,
    make_frame,
    run_tag,
)

WRITE_BYTES = 1 << 20  # a new file is written in pieces of this size
SYNC_INTERVAL_S = 1.0


class JournalFile:
    """Append frames, and replace the file.

    Every method but `give_up` and `release` raises OSError where the disk fails. The owner then
    gives the file up, and may start a new one.

    Attributes:
        path: where the file is. Its directory is locked as long as this process lives.
        size: number of bytes of whole frames; 0 while no file is open.
    """

    def __init__(self, path: Path, header: JournalHeader, durable: bool) -> None:
        """Initialize. durable: sync the file, so that it survives a loss of power."""
        self.path = path
        self.header = header
        self.size = 0
        self._durable = durable
        self._checksum = 0
        self._fd = -1
        self._directory_fd = -1
        self._syncer = Syncer() if durable else None

    def lock_directory(self) -> None:
        """Make the directory and lock it, if that is not done yet.

        Raises:
            BlockingIOError: another process has the lock; it is released when that process ends.
        """
        if self._directory_fd >= 0:
            return
        if not self.path.parent.is_dir():
            disk.make_directory(self.path.parent)
        self._directory_fd = _lock(self.path.parent)

    def append(self, payload: bytes) -> None:
        """Append a frame. Where that fails half-way, the file ends with the frame before."""
        if self._syncer is not None:
            self._syncer.raise_error()
        frame, checksum = make_frame(payload, self._checksum)
        try:
            _write(self._fd, frame)
        except OSError:
            with suppress(OSError):  # a reader stops at half a frame, too
                os.ftruncate(self._fd, self.size)
            raise
        self.size += len(frame)
        self._checksum = checksum
        if self._syncer is not None:
            self._syncer.mark_dirty()

    def rewrite(self, payloads: Iterable[bytes]) -> None:
        """Write a new file, and put it in the place of the present one once it is whole."""
        self.lock_directory()
        fresh = self.path.with_suffix(".new")
        fd = disk.open_regular(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            size, checksum = self._fill(fd, payloads)
            if self._durable:
                os.fdatasync(fd)
            os.replace(fresh, self.path)
        except OSError:
            _close(fd)
            with suppress(OSError):  # it only takes space
                os.unlink(fresh)
            raise
        self._close()
        self._fd, self.size, self._checksum = fd, size, checksum
        if self._syncer is not None:
            self._syncer.set_file(fd)
            os.fsync(self._directory_fd)

    def _fill(self, fd: int, payloads: Iterable[bytes]) -> tuple[int, int]:
        """Write a whole file. Return its size, and the checksum of its last frame."""
        frame, checksum = make_frame(encode(self.header), 0)
        buffer, size = bytearray(MAGIC + NOT_GIVEN_UP + frame), 0
        for payload in payloads:
            frame, checksum = make_frame(payload, checksum)
            buffer += frame
            if len(buffer) >= WRITE_BYTES:
                _write(fd, bytes(buffer))
                size += len(buffer)
                buffer.clear()
        _write(fd, bytes(buffer))
        return size + len(buffer), checksum

    def give_up(self) -> None:
        """Close the file, and keep the next scheduler of this run from resuming it.

        By then its requests may have ended. A durable file stays for a later run that resumes:
        after a loss of power it is better to compute a request twice than to lose it.
        """
        if self._directory_fd < 0:
            return  # it may be another server's
        with suppress(OSError):
            if self._durable:
                self._mark_given_up()
            else:
                os.unlink(self.path)
        self._close()

    def _mark_given_up(self) -> None:
        """Mark the file as given up, in place: a full disk has room for that."""
        if self._fd < 0:
            self._fd = disk.open_regular(self.path, os.O_WRONLY)
        os.pwrite(self._fd, run_tag(self.header.run), len(MAGIC))

    def release(self) -> None:
        """Leave file and directory to another process, as they are."""
        self._close()
        if self._directory_fd >= 0:
            _close(self._directory_fd)
        self._directory_fd = -1

    def remove(self) -> None:
        """Remove the file, which no request needs any more."""
        self._close()
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    def _close(self) -> None:
        if self._syncer is not None:
            self._syncer.set_file(-1)
        if self._fd >= 0:
            _close(self._fd)
        self._fd, self.size = -1, 0


def _write(fd: int, data: bytes) -> None:
    """Write all bytes."""
    written = os.write(fd, data)
    while written < len(data):
        if written <= 0:
            raise OSError(errno.EIO, "nothing was written")
        data = data[written:]
        written = os.write(fd, data)


def _close(fd: int) -> None:
    """Close a file; errors do not matter any more."""
    with suppress(OSError):
        os.close(fd)


def _lock(directory: Path) -> int:
    """Lock a directory by its own descriptor: that leaves no file, and no child inherits it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise BlockingIOError(errno.EWOULDBLOCK, "another server has it", str(directory)) from None
    except OSError as error:  # some network file systems
        logging.warning(
            "%s cannot be locked (%s): make sure that no other server uses it as --journal",
            directory,
            error,
        )
    return fd


class Syncer:
    """Sync a file in a thread, at most once in SYNC_INTERVAL_S."""

    def __init__(self) -> None:
        self._fd = -1
        self._error: OSError | None = None
        self._dirty = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="journal-sync", daemon=True).start()

    def set_file(self, fd: int) -> None:
        """Sync this file from now on; -1 for none."""
        with self._lock:
            self._fd, self._error = fd, None

    def mark_dirty(self) -> None:
        """Ask for a sync of what was written."""
        self._dirty.set()

    def raise_error(self) -> None:
        """Raise the OSError of a sync that failed.

        The system may have dropped what it could not write, and reports that only once.
        """
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            self._dirty.wait()
            self._dirty.clear()
            self._sync()
            time.sleep(SYNC_INTERVAL_S)

    def _sync(self) -> None:
        with self._lock:
            synced, fd = self._fd, -1
            try:
                fd = os.dup(synced) if synced >= 0 else -1
            except OSError as error:
                self._error = error
        if fd < 0:
            return
        try:
            os.fdatasync(fd)
        except OSError as error:
            with self._lock:
                if self._fd == synced:
                    self._error = error
        finally:
            _close(fd)
