"""Quadriga's cache directory: the built-in model's weights and the contents of GGUF headers."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quadriga import disk, errors


def cache_directory() -> Path:
    """Return $QUADRIGA_CACHE, else $XDG_CACHE_HOME/quadriga, else ~/.cache/quadriga."""
    if directory := os.environ.get("QUADRIGA_CACHE"):
        return Path(directory).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quadriga"


@contextmanager
def cache_lock(directory: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a scratch directory's cache; the system releases it if its holder dies.

    Args:
        directory: the scratch directory.
        on_wait: called once if another process holds the lock.
    """
    with os.fdopen(
        disk.open_regular(directory.parent / "lock", os.O_WRONLY | os.O_CREAT), "w"
    ) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make a temporary directory on the cache's file system.

    A file that is renamed out of it appears in the cache whole or not at all.

    Raises:
        ModelError: the cache cannot be written.
    """
    cache = cache_directory()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=cache))
    except OSError as error:
        raise errors.ModelError(
            f"cannot write to the cache {cache} ({error.strerror}); set QUADRIGA_CACHE to a"
            " directory that can be written"
        ) from None
    try:
        yield scratch
    except OSError as error:
        raise errors.ModelError(
            f"cannot write to the cache {cache} ({error.strerror}); make room there, or set"
            " QUADRIGA_CACHE to another directory"
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def publish_directory(directory: Path, final: Path) -> None:
    """Rename a finished directory into place, unless another process was first."""
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.rename(final)
    except OSError:
        if not final.is_dir():
            raise
