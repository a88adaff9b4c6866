"""Our own cache directory: the built-in model's weights and what was read from GGUF headers."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quadriga.errors import ModelError


def cache_directory() -> Path:
    """$QUADRIGA_CACHE, else $XDG_CACHE_HOME/quadriga, else ~/.cache/quadriga."""
    if own := os.environ.get("QUADRIGA_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quadriga"


@contextmanager
def alone(directory: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a scratch directory's cache, so that the others find what this one made.

    waiting: called once if another process holds it. The system releases it if its holder dies.
    """
    with (directory.parent / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A fresh directory on the cache's file system, gone afterwards; what is renamed out of it
    appears in the cache whole or not at all. ModelError where the cache cannot be written."""
    cache = cache_directory()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=cache))
    except OSError as error:
        raise ModelError(
            f"cannot write to the cache {cache} ({error.strerror}); set QUADRIGA_CACHE to a"
            " directory that can be written"
        ) from None
    try:
        yield scratch
    except OSError as error:
        raise ModelError(
            f"cannot write to the cache {cache} ({error.strerror}); make room there, or set"
            " QUADRIGA_CACHE to another directory"
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def publish_directory(made: Path, final: Path) -> None:
    """Rename a finished directory into place; if another process was first, keep the other's."""
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        made.rename(final)
    except OSError:
        if not final.is_dir():
            raise
