"""What is kept on disk of each resumable stream, for the gateway that replaces this one.

A row is on the disk before a client sees the first event, and so is each decision (resumption.py)
before the events that follow from it. The events are not kept: the server has the tokens, and the
row has all else of which they are made.
"""

import logging
import sqlite3
import threading
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from quadriga import disk
from quadriga.wire.client import gateway_address

FILE_NAME = "streams.sqlite"
# A gateway that dies may hold the file for a moment.
LOCK_TIMEOUT_S = 2.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS streams (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, path TEXT NOT NULL, body BLOB NOT NULL,
    tenant TEXT NOT NULL, user TEXT NOT NULL, key_hash TEXT NOT NULL,
    created INTEGER NOT NULL, model TEXT NOT NULL, ended_at REAL,
    decisions BLOB NOT NULL DEFAULT x'7b7d'
);
CREATE TABLE IF NOT EXISTS address (hex TEXT NOT NULL);
"""


class StreamName(NamedTuple):
    """The name of a stream: an id is one of its owner, and others may have the same.

    Attributes:
        owner: as Caller.owner.
        id: the X-Request-Id of its request.
    """

    owner: str
    id: str

    @property
    def in_file(self) -> str:
        """The id of its row; a stream's id has no slash."""
        return f"{self.owner}/{self.id}"


class StreamRow(NamedTuple):
    """One resumable stream.

    Attributes:
        id: the X-Request-Id of its request.
        key, created: as in Resumption.
        tenant, user, key_hash: as in Caller.
        ended_at: Unix seconds; None: it has not ended.
        decisions: JSON object, as in Resumption.
    """

    id: str
    key: str
    path: str
    body: bytes
    tenant: str
    user: str
    key_hash: str
    created: int
    model: str
    ended_at: float | None = None
    decisions: bytes = b"{}"

    @property
    def owner(self) -> str:
        """Who may read the stream, as Caller.owner."""
        return self.tenant or self.key_hash

    @property
    def name(self) -> StreamName:
        """Its name."""
        return StreamName(self.owner, self.id)


class _Write(NamedTuple):
    """A statement that waits for the disk."""

    statement: str
    values: tuple[Any, ...]
    is_new: bool
    done: "Future[None]"


class StreamRows:
    """A SQLite file that only one gateway uses at a time, and only the server's user can read.

    While it cannot be written, streams are resumable as long as this gateway lives. Each write
    returns a future that is done when the write is on the disk, or was refused; those that wait
    together share one transaction.

    Args:
        directory: where the file is; None, or a directory that cannot be used: nowhere.

    Attributes:
        address: of this gateway and of those that replace it, at the server.
        has_failed: the last new row could not be written.
        outlives_server: the file stays when the server ends.
    """

    def __init__(self, directory: Path | None = None, outlives_server: bool = False) -> None:
        self.has_failed = False
        self.outlives_server = outlives_server
        self._thread = ThreadPoolExecutor(1, "streams")
        self._lock = threading.Lock()
        self._writes: list[_Write] = []
        try:
            self._database = _open(directory, outlives_server)
        except (sqlite3.Error, OSError) as error:
            logging.error(
                "resumable streams end with this gateway: %s cannot be used: %s", directory, error
            )
            self.has_failed, self.outlives_server = True, False
            self._database = _open(None, False)
        self.address = self._address()

    def _address(self) -> uuid.UUID:
        found = self._database.execute("SELECT hex FROM address").fetchone()
        if found is not None:
            return uuid.UUID(hex=found[0])
        address = gateway_address()
        self._database.execute("INSERT INTO address VALUES (?)", (address.hex,))
        return address

    def all(self) -> list[StreamRow]:
        """Return every row, in the order in which they were written."""
        names = ", ".join(StreamRow._fields)
        rows = self._database.execute(f"SELECT {names} FROM streams ORDER BY rowid")
        return [StreamRow(row[0].rpartition("/")[2], *row[1:]) for row in rows]

    def add(self, row: StreamRow) -> "Future[None]":
        """Write a row."""
        names, marks = ", ".join(StreamRow._fields), ", ".join("?" * len(row))
        statement = f"INSERT OR REPLACE INTO streams ({names}) VALUES ({marks})"
        return self._write(statement, row._replace(id=row.name.in_file), is_new=True)

    def decide(self, row: StreamRow) -> "Future[None]":
        """Write the decisions of a row that is there."""
        statement = "UPDATE streams SET decisions = ? WHERE id = ?"
        return self._write(statement, (row.decisions, row.name.in_file))

    def end(self, name: StreamName, at: float) -> "Future[None]":
        """Note that a stream has ended."""
        return self._write("UPDATE streams SET ended_at = ? WHERE id = ?", (at, name.in_file))

    def remove(self, name: StreamName) -> "Future[None]":
        """Remove a row."""
        return self._write("DELETE FROM streams WHERE id = ?", (name.in_file,))

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._thread.shutdown()
        self._database.close()

    def _write(
        self, statement: str, values: tuple[Any, ...], is_new: bool = False
    ) -> "Future[None]":
        write = _Write(statement, values, is_new, Future())
        with self._lock:
            self._writes.append(write)
            is_first = len(self._writes) == 1
        if is_first:
            self._thread.submit(self._write_all)
        return write.done

    def _write_all(self) -> None:
        """Do what waits in one transaction, or one by one if that fails."""
        with self._lock:
            writes, self._writes = self._writes, []
        if len(writes) == 1 or not self._try(writes):
            for write in writes:
                self._try([write])
        for write in writes:
            write.done.set_result(None)

    def _try(self, writes: list[_Write]) -> bool:
        """Return whether the writes are on the disk."""
        try:
            self._database.execute("BEGIN IMMEDIATE")
            for write in writes:
                self._database.execute(write.statement, write.values)
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            if len(writes) == 1:
                self._note_failure(error)
            return False
        self.has_failed = self.has_failed and not any(write.is_new for write in writes)
        return True

    def _note_failure(self, error: sqlite3.Error) -> None:
        if not self.has_failed:
            logging.error(
                "resumable streams end with this gateway until their file can be written again: %s;"
                " free space on the disk of --data-dir",
                error,
            )
        self.has_failed = True


def _open(directory: Path | None, outlives_server: bool) -> sqlite3.Connection:
    name = ":memory:"
    if directory is not None:
        disk.make_directory(directory)
        path = directory / FILE_NAME
        disk.make_sqlite_file(path)
        name = str(path)
    database = sqlite3.connect(
        name, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        synchronous = "FULL" if outlives_server else "OFF"
        for pragma in (
            "locking_mode = EXCLUSIVE",
            "journal_mode = WAL",
            f"synchronous = {synchronous}",
        ):
            database.execute(f"PRAGMA {pragma}")
        database.executescript(_SCHEMA)
        columns = {name for _, name, *_ in database.execute("PRAGMA table_info(streams)")}
        if "decisions" not in columns:  # a file of an earlier version
            database.execute(
                "ALTER TABLE streams ADD COLUMN decisions BLOB NOT NULL DEFAULT x'7b7d'"
            )
        database.execute(  # a file of an earlier version has the ids without their owners
            "UPDATE streams SET id = CASE tenant WHEN '' THEN key_hash ELSE tenant END || '/' || id"
            " WHERE instr(id, '/') = 0"
        )
    except sqlite3.Error:
        database.close()
        raise
    return database
