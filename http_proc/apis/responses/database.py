"""Database: a SQLite file that one thread uses, so that the event loop never waits for the disk.

A disk that is full, a file that is damaged or cannot be written end the storing for RETRY_S, and
nothing else: the next call after that tries again.
"""

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from quadriga import disk

RETRY_S = 10.0
LOCK_TIMEOUT_S = 0.5
CACHE_KIB = 2048
# The log of SQLite is copied into the file at this size; after that it is cut to it.
MAX_WAL_BYTES = 4 * 1024 * 1024

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


class StorageError(Exception):
    """The file cannot be read or written now; the text says why."""


class Outage:
    """A time in which the file cannot be used. It is logged once, and at its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reason = ""
        self._retry_at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the file may be tried."""
        return not self._reason or time.monotonic() >= self._retry_at

    @property
    def has_failed(self) -> bool:
        """Whether the last attempt has failed."""
        return bool(self._reason)

    def begin(self, reason: str) -> StorageError:
        """Note a failure, and return it as an error."""
        if not self._reason:
            logging.error(
                "%s cannot be used, and responses are not stored until it can: %s",
                self._path,
                reason,
            )
        self._reason, self._retry_at = reason, time.monotonic() + RETRY_S
        return self.error()

    def error(self) -> StorageError:
        """Return the last failure."""
        return StorageError(self._reason)

    def end(self) -> None:
        """Note a success."""
        if self._reason:
            logging.info("%s can be used again", self._path)
        self._reason = ""


class _Write(NamedTuple):
    """A change that waits for the thread."""

    work: Work[Any]
    done: "Future[Any]"


def _outcome(connection: sqlite3.Connection, work: Work[Any]) -> Any:
    """Return the result of a change, or the error that it has raised, and then it is undone."""
    connection.execute("SAVEPOINT change")
    try:
        result = work(connection)
    except sqlite3.Error:
        raise
    except Exception as error:
        connection.execute("ROLLBACK TO change")
        result = error
    connection.execute("RELEASE change")
    return result


class Database:
    """One file. Only one process can use it.

    Args:
        path: of the file; its directory is made if it is missing.
        schema: makes the tables of a new file; its version is 1.
        on_change: called in the thread after the file was opened or written.
        is_durable: what was written survives a power cut; else only the death of this process.
    """

    def __init__(
        self,
        path: Path,
        schema: str,
        on_change: Callable[[sqlite3.Connection], None],
        is_durable: bool,
    ) -> None:
        self._synchronous = "FULL" if is_durable else "OFF"
        self._path = path
        self._schema = schema
        self._on_change = on_change
        self._thread = ThreadPoolExecutor(1, "response-store")
        self._lock = threading.Lock()
        self._writes: list[_Write] = []
        self._connection: sqlite3.Connection | None = None
        self._outage = Outage(path)

    @property
    def can_write(self) -> bool:
        """Whether the file could be written when it was tried last, or may be tried again."""
        return self._outage.is_over

    @property
    def has_failed(self) -> bool:
        """Whether the file could not be written when it was tried last."""
        return self._outage.has_failed

    async def read(self, work: Work[T]) -> T:
        """Return what `work` reads.

        Raises:
            StorageError: the file cannot be read.
        """
        return await self._in_thread(lambda: self._read(work))

    async def write(self, work: Work[T]) -> T:
        """Do `work`, all or nothing of which is on the disk afterwards.

        What waits at one time shares a transaction, and so a sync of the disk.

        Raises:
            StorageError: the file cannot be written, and nothing was.
        """
        write = _Write(work, Future())
        with self._lock:
            self._writes.append(write)
            is_first = len(self._writes) == 1
        if is_first:
            self._thread.submit(self._write_all)
        result: T = await asyncio.shield(asyncio.wrap_future(write.done))
        return result

    async def close(self) -> None:
        """Finish what was begun and close the file."""
        await self._in_thread(self._close)
        self._thread.shutdown()

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _read(self, work: Work[T]) -> T:
        if self._connection is None and not self._outage.is_over:
            raise self._outage.error()
        with self._errors():
            return work(self._opened())

    def _write_all(self) -> None:
        """Do what waits in one transaction."""
        with self._lock:
            writes, self._writes = self._writes, []
        for write, outcome in zip(writes, self._outcomes(writes), strict=True):
            if isinstance(outcome, BaseException):
                write.done.set_exception(outcome)
            else:
                write.done.set_result(outcome)

    def _outcomes(self, writes: "list[_Write]") -> list[Any]:
        """Return the result of each write, or its error, after one transaction of all."""
        if not self._outage.is_over:
            return [self._outage.error() for _ in writes]
        try:
            with self._errors():
                connection = self._opened()
                connection.execute("BEGIN IMMEDIATE")
                try:
                    outcomes = [_outcome(connection, write.work) for write in writes]
                    connection.execute("COMMIT")
                finally:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                self._on_change(connection)
        except StorageError as error:
            return [error for _ in writes]
        self._outage.end()
        return outcomes

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            # Python has a class of errors for each group of SQLite's codes, and this for damages.
            is_damaged = type(error) is sqlite3.DatabaseError
            if is_damaged:
                self._close()
            remedy = "; move it away, and an empty one is made" if is_damaged else ""
            raise self._outage.begin(f"{error}{remedy}") from None

    def _opened(self) -> sqlite3.Connection:
        """Return the connection, after the file was opened if it is not."""
        if self._connection is None:
            disk.make_directory(self._path.parent)
            disk.make_sqlite_file(self._path)
            connection = sqlite3.connect(
                self._path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        for setting in (
            "locking_mode = EXCLUSIVE",
            "auto_vacuum = INCREMENTAL",
            "journal_mode = WAL",
            f"synchronous = {self._synchronous}",
            "secure_delete = FAST",
            f"cache_size = -{CACHE_KIB}",
            f"journal_size_limit = {MAX_WAL_BYTES}",
            "foreign_keys = ON",
        ):
            connection.execute(f"PRAGMA {setting}")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > 1:
            raise sqlite3.DatabaseError(f"it was made by a later version of the server ({version})")
        if not version:
            connection.executescript(f"BEGIN; {self._schema} PRAGMA user_version = 1; COMMIT;")
        self._on_change(connection)

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()
