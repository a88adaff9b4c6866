"""Writes that a power cut cannot leave half done."""

import os
from pathlib import Path

# Only the server's user may read what clients upload.
FILE_MODE, DIRECTORY_MODE = 0o600, 0o700


def make_directory(path: Path) -> None:
    """Make a directory that only its owner can read, with its parents."""
    path.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)


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
