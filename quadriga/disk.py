"""Directories of one process, and writes that a power cut cannot leave half done."""

import fcntl
import os
from pathlib import Path

# Only the server's user may read what clients upload.
FILE_MODE, DIRECTORY_MODE = 0o600, 0o700


def make_directory(path: Path) -> None:
    """Make a directory that only its owner can read, with its parents, durably."""
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for directory in reversed(missing):
        if not directory.exists():
            directory.mkdir(DIRECTORY_MODE, exist_ok=True)
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
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    return os.open(path, flags, FILE_MODE)


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
            fd = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        sync_directory(Path(directory))


def replace(path: Path, data: bytes) -> None:
    """Give a file this content: after any crash it has the old content or the new one."""
    fresh = path.with_name(path.name + ".new")
    fd = create(fresh)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(fresh, path)
    sync_directory(path.parent)
