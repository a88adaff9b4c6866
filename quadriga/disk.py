"""Files on disk: opened only where they are files, and written so that a power cut halves none."""

import errno
import fcntl
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# Only the server's user may read what clients upload.
FILE_MODE, DIRECTORY_MODE = 0o600, 0o700

# The end of the name of a file that takes another's place once it is whole.
UNFINISHED_SUFFIX = ".new"

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
}


# --- open -----------------------------------------------------------------------------------------


def check_regular(path: str | Path, mode: int | None = None) -> None:
    """Check that a file is a regular one, so that nothing waits for its other end.

    Args:
        path: of the file.
        mode: as in os.stat_result; None: it is read.

    Raises:
        OSError: there is no such file, or strerror says what it is instead.
    """
    kind = stat.S_IFMT(os.stat(path).st_mode if mode is None else mode)
    if kind != stat.S_IFREG:
        what = _KINDS.get(kind, "no file")
        raise OSError(errno.EINVAL, f"it is {what}, not a regular file", str(path))


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Return the descriptor of a regular file, which only its owner can read if it is made.

    Raises:
        OSError: it cannot be opened, or strerror says what it is instead.
    """
    with suppress(FileNotFoundError):
        check_regular(path)  # the opening of a device may have effects
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, FILE_MODE)
    try:
        check_regular(path, os.fstat(fd).st_mode)
    except OSError:
        os.close(fd)
        raise
    return fd


def read_bytes(path: str | Path) -> bytes:
    """Return the content of a regular file. Raise OSError as open_regular."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def read_text(path: str | Path) -> str:
    """Return the text of a regular file in UTF-8. Raise OSError, or UnicodeDecodeError."""
    with os.fdopen(open_regular(path), encoding="utf-8") as file:
        return file.read()


class FileStamp(NamedTuple):
    """What changes when a file is overwritten or replaced."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def file_stamp(path: str | Path) -> FileStamp | None:
    """Return the stamp of a file; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return FileStamp(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def make_sqlite_file(path: Path) -> None:
    """Make a file for SQLite that only its owner can read, unless there is one.

    SQLite would make one that others can read, and wait for the other end of a FIFO, which it may
    find also as one of the files beside it.

    Raises:
        OSError: the file cannot be opened, or is no regular one.
    """
    os.close(open_regular(path, os.O_RDWR | os.O_CREAT))
    for ending in ("-wal", "-shm", "-journal"):
        with suppress(FileNotFoundError):
            check_regular(f"{path}{ending}")


# --- write ----------------------------------------------------------------------------------------


def make_directory(path: Path) -> None:
    """Make a directory that only its owner can read, with its parents, durably."""
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for directory in reversed(missing):
        if not directory.exists():
            with suppress(FileExistsError):  # another process makes it, too
                os.mkdir(directory, DIRECTORY_MODE)
            sync_directory(directory.parent)


def lock_directory(path: Path) -> int:
    """Lock a directory, which is made if it is missing, until the descriptor is closed.

    The lock is one of the directory itself: it leaves no file, and ends with the process.

    Returns:
        The descriptor.

    Raises:
        BlockingIOError: another process has the lock.
        OSError: the directory cannot be made, opened or locked.
    """
    make_directory(path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def create(path: Path) -> int:
    """Return the descriptor of a new, empty file that only its owner can read."""
    return open_regular(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes. Raise OSError, also where a part was written before."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(path: Path) -> None:
    """Make a directory durable with all that lies in it."""
    for directory, _, names in os.walk(path):
        for name in names:
            fd = open_regular(os.path.join(directory, name))
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        sync_directory(Path(directory))


def replace(path: Path, data: bytes, mode: int = FILE_MODE) -> None:
    """Give a file this content: after any crash it has the old content or the new one.

    Each writer has an unfinished file of its own, so that of two at one time the last one's content
    stays, and neither fails. A crash may leave it; `remove_unfinished` removes it.
    """
    fd, fresh = tempfile.mkstemp(UNFINISHED_SUFFIX, f"{path.name}.", path.parent)
    try:
        try:
            os.fchmod(fd, mode)
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(fresh, path)
    except OSError:
        with suppress(OSError):  # it only takes space
            os.unlink(fresh)
        raise
    sync_directory(path.parent)


def remove_unfinished(directory: Path) -> None:
    """Remove what crashes have left in a directory in which no other process writes."""
    for path in directory.glob(f"*{UNFINISHED_SUFFIX}"):
        path.unlink(missing_ok=True)
