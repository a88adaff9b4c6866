"""LineLog: the answered lines of a batch, in its output file and its error file.

The two files are the state of the batch: a line whose custom_id stands in one of them has its
answer and never gets another one. A line that a crash has cut is removed when they are opened.
"""

import logging
import os
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import msgspec

from http_proc.apis.batch.input_lines import ShortStep, digest
from quadriga import disk

# What a power cut may take: these lines are answered again.
MAX_UNSYNCED_LINES = 64
SYNC_INTERVAL_S = 1.0


class _Answered(msgspec.Struct):
    custom_id: str
    response: Any
    error: Any


_decode = msgspec.json.Decoder(_Answered).decode


class LineLog:
    """The output of a batch. Its methods may be called in any thread.

    Args:
        answers: path of the output file.
        failures: path of the error file.

    Attributes:
        num_completed: lines of the output file.
        num_failed: lines of the error file.
    """

    def __init__(self, answers: Path, failures: Path) -> None:
        self._paths = (answers, failures)
        self._lock = threading.Lock()
        self._answered: set[bytes] = set()
        self._files: list[_AppendFile] = []
        self.num_completed = self.num_failed = 0

    def open(self) -> Iterator[None]:
        """Open the files, remove lines that were cut, and find what is answered, in short steps."""
        self.close()
        files = [_AppendFile(path) for path in self._paths]
        with self._lock:
            self._files = files
        counts = []
        for file in files:
            counts.append((yield from file.recover(self._answered)))
        disk.sync_directory(self._paths[0].parent)
        self.num_completed, self.num_failed = counts

    def has(self, custom_id: str) -> bool:
        """Return whether a line has its answer."""
        return digest(custom_id) in self._answered

    def append(self, custom_id: str, line: bytes, is_failure: bool) -> bool:
        """Write the answer of a line, unless it has one or the log is closed.

        Args:
            custom_id: of the line.
            line: its answer as JSON, without a newline.
            is_failure: it belongs into the error file.

        Returns:
            Whether it was written.

        Raises:
            OSError: nothing was written; it can be tried again.
        """
        key = digest(custom_id)
        with self._lock:
            if key in self._answered or not self._files:
                return False
            self._files[is_failure].append(line + b"\n")
            self._answered.add(key)
            self.num_failed += is_failure
            self.num_completed += not is_failure
            return True

    def sync(self) -> None:
        """Make all lines durable. Raise OSError."""
        with self._lock:
            for file in self._files:
                file.sync()

    def close(self) -> None:
        """Close the files. What is appended later is discarded."""
        with self._lock:
            files, self._files = self._files, []
            for file in files:
                file.close()


class _AppendFile:
    """A file to whose end whole lines are written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = disk.open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._size = os.fstat(self._fd).st_size
        self._num_unsynced = 0
        self._synced_at = time.monotonic()

    def recover(self, answered: set[bytes]) -> Generator[None, None, int]:
        """Cut the file before the first broken line; return the number of lines before it.

        Each step takes about STEP_S.
        """
        size = num_lines = 0
        step = ShortStep()
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for line in file:
                try:
                    key = digest(_decode(line).custom_id)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    break
                if not line.endswith(b"\n"):
                    break
                answered.add(key)
                size, num_lines = size + len(line), num_lines + 1
                if step.is_over():
                    yield
            if size < self._size:
                lost = self._size - size
                logging.warning("%s: %d bytes after line %d are cut", self._path, lost, num_lines)
                os.ftruncate(file.fileno(), size)
                os.fsync(file.fileno())
                self._size = size
        return num_lines

    def append(self, line: bytes) -> None:
        """Write a line, and sync at times. Raise OSError if it is not in the file."""
        try:
            disk.write_all(self._fd, line)
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(line)
        self._num_unsynced += 1
        now = time.monotonic()
        if self._num_unsynced >= MAX_UNSYNCED_LINES or now - self._synced_at >= SYNC_INTERVAL_S:
            try:
                self.sync()
            except OSError as error:  # the line is in the file, and `sync` before the end counts
                logging.warning("%s cannot be synced: %s", self._path, error)

    def sync(self) -> None:
        """Make the file durable."""
        if self._num_unsynced:
            os.fsync(self._fd)
        self._num_unsynced, self._synced_at = 0, time.monotonic()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
