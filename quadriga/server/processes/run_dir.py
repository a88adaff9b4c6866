"""The directory of a run, and its files in shared memory, which go with it.

KV pages that replicas exchange are in shared memory. Where it takes no files, they are in the run
directory.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from quadriga.clock import now
from quadriga.errors import ConfigError

RUN_PREFIX = "quadriga-"
SHARED_MEMORY = Path("/dev/shm")
LOCK = "lock"
# Without a locked file, a directory in shared memory is removed when it is so old.
MIN_AGE_S = 60.0


def make_run_dir() -> Path:
    """Make the directory of a run's sockets and, by default, its journal. Raise ConfigError."""
    try:
        return Path(tempfile.mkdtemp(prefix=RUN_PREFIX))
    except OSError as error:
        raise ConfigError(
            f"no directory for this run can be made ({error}): make room, or set TMPDIR to a"
            " directory that can be written"
        ) from None


def shared_dir(run_dir: Path) -> Path:
    """Return the directory of a run for files in shared memory. It need not be there."""
    if run_dir.name.startswith(RUN_PREFIX) and os.access(SHARED_MEMORY, os.W_OK):
        return SHARED_MEMORY / run_dir.name
    return run_dir / "shared"


def remove_run_dir(run_dir: Path) -> None:
    """Remove the directory of a run, and what it has in shared memory."""
    shutil.rmtree(shared_dir(run_dir), ignore_errors=True)
    shutil.rmtree(run_dir, ignore_errors=True)


def remove_left_behind(own: Path) -> None:
    """Remove what servers of this user have left in shared memory that were killed at once.

    Args:
        own: what is not removed: a directory of this run, which an earlier process of it may have
            left.
    """
    with suppress(OSError):
        for entry in os.scandir(SHARED_MEMORY):
            if own.is_relative_to(entry.path):
                continue
            if entry.name.startswith(RUN_PREFIX) and entry.is_dir(follow_symlinks=False):
                stat = entry.stat(follow_symlinks=False)
                is_own, is_old = stat.st_uid == os.geteuid(), now() - stat.st_mtime > MIN_AGE_S
                if is_own and is_old and not _is_used(Path(entry.path)):
                    shutil.rmtree(entry.path, ignore_errors=True)


def _is_used(directory: Path) -> bool:
    """Return whether a process holds a lock file in a directory."""
    for path in directory.rglob(LOCK):
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(fd)
    return False
