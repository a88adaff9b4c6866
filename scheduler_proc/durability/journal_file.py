"""The journal's file: written whole frames at a time, replaced as a whole, held by one process."""

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from quadriga.wire.sockets import encode
from scheduler_proc.durability.journal_records import (
    MAGIC,
    NOT_GIVEN_UP,
    JournalHeader,
    make_frame,
    tag,
)

WRITE_BYTES = 1 << 20
"""Of a new file, at once."""
SYNC_INTERVAL_S = 1.0


class JournalFile:
    """Appends frames, and starts the file anew. What fails raises OSError; the owner then gives the
    file up, and may start a new one.

    Attributes:
        path: of the file. Its directory is locked as long as this process lives.
        size: bytes of whole frames; 0 while no file is open.
    """

    def __init__(self, path: Path, header: JournalHeader, durable: bool) -> None:
        """durable: the file is synced, so that it outlasts a loss of power."""
        self.path = path
        self.header = header
        self.size = 0
        self._durable = durable
        self._checksum = 0
        self._fd = -1
        self._directory_fd = -1
        self._syncer = Syncer() if durable else None

    def hold_directory(self) -> None:
        """Make the directory and lock it, if that is not done yet. BlockingIOError where another
        process has the lock; the system releases it when that process ends."""
        if self._directory_fd >= 0:
            return
        if not self.path.parent.is_dir():
            os.makedirs(self.path.parent, 0o700, exist_ok=True)
        self._directory_fd = _lock(self.path.parent)

    def append(self, payload: bytes) -> None:
        """Write a frame. Where that fails half-way, the file ends with the frame before."""
        if self._syncer is not None:
            self._syncer.check()
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
            self._syncer.written()

    def rewrite(self, payloads: Iterable[bytes]) -> None:
        """Put a new file, once it is whole, in the place of the one that is there."""
        self.hold_directory()
        fresh = self.path.with_suffix(".new")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            size, checksum = self._fill(fd, payloads)
            if self._durable:
                os.fdatasync(fd)
            os.replace(fresh, self.path)
        except OSError:
            _close(fd)
            with suppress(OSError):  # it only takes room
                os.unlink(fresh)
            raise
        self._close()
        self._fd, self.size, self._checksum = fd, size, checksum
        if self._syncer is not None:
            self._syncer.watch(fd)
            os.fsync(self._directory_fd)

    def _fill(self, fd: int, payloads: Iterable[bytes]) -> tuple[int, int]:
        """Write a whole file. Its size, and the checksum of its last frame."""
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
        """Close the file, and see to it that the next scheduler of this run does not go on with it:
        by then its requests may have ended.

        One that is to outlive the run stays, for another run that resumes: there it is better to
        compute a request twice than to lose it.
        """
        if self._directory_fd < 0:
            return  # it may be another server's
        with suppress(OSError):
            if self._durable:
                self._mark()
            else:
                os.unlink(self.path)
        self._close()

    def _mark(self) -> None:
        """In place, for which a full disk has room."""
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        os.pwrite(self._fd, tag(self.header.run), len(MAGIC))

    def release(self) -> None:
        """Leave everything as it is, to another process."""
        self._close()
        if self._directory_fd >= 0:
            _close(self._directory_fd)
        self._directory_fd = -1

    def remove(self) -> None:
        """No request needs the file any more."""
        self._close()
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    def _close(self) -> None:
        if self._syncer is not None:
            self._syncer.watch(-1)
        if self._fd >= 0:
            _close(self._fd)
        self._fd, self.size = -1, 0


def _write(fd: int, data: bytes) -> None:
    """Write all of it."""
    written = os.write(fd, data)
    while written < len(data):
        if written <= 0:
            raise OSError(errno.EIO, "nothing was written")
        data = data[written:]
        written = os.write(fd, data)


def _close(fd: int) -> None:
    """Close a file of which nothing is expected any more."""
    with suppress(OSError):
        os.close(fd)


def _lock(directory: Path) -> int:
    """Lock a directory by its own file descriptor, which leaves no file behind, and which children
    do not inherit."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise BlockingIOError(errno.EWOULDBLOCK, "another server has it", str(directory)) from None
    except OSError as error:  # some network file systems
        logging.warning(
            "%s cannot be locked (%s): see to it that no other server has it as --journal",
            directory,
            error,
        )
    return fd


class Syncer:
    """Makes what was written outlast a loss of power, in a thread, at most once a second."""

    def __init__(self) -> None:
        self._fd = -1
        self._error: OSError | None = None
        self._dirty = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="journal-sync", daemon=True).start()

    def watch(self, fd: int) -> None:
        """From now on it is this file; -1: none."""
        with self._lock:
            self._fd, self._error = fd, None

    def written(self) -> None:
        self._dirty.set()

    def check(self) -> None:
        """Raise the OSError of a sync that failed: the system may have dropped what it could not
        write, and would not say so again."""
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
            watched, fd = self._fd, -1
            try:
                fd = os.dup(watched) if watched >= 0 else -1
            except OSError as error:
                self._error = error
        if fd < 0:
            return
        try:
            os.fdatasync(fd)
        except OSError as error:
            with self._lock:
                if self._fd == watched:
                    self._error = error
        finally:
            _close(fd)
