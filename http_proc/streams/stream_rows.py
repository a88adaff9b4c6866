"""What is kept on disk of each resumable stream, for the gateway that replaces this one.

A row is written before the request is sent to the ring. The events are not kept: the ring has the
tokens, and the row has all else of which they are made.
"""

import logging
import os
import sqlite3
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from http_proc.apis.files import durable
from quadriga.wire.client_address import gateway_address

FILE_NAME = "streams.sqlite"
# A gateway that dies may hold the file for a moment.
LOCK_TIMEOUT_S = 2.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS streams (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, path TEXT NOT NULL, body BLOB NOT NULL,
    tenant TEXT NOT NULL, user TEXT NOT NULL, key_hash TEXT NOT NULL,
    created INTEGER NOT NULL, model TEXT NOT NULL, ended_at REAL
);
CREATE TABLE IF NOT EXISTS address (hex TEXT NOT NULL);
"""


class StreamRow(NamedTuple):
    """One resumable stream.

    Attributes:
        id: the X-Request-Id of its request.
        key, created: as in Resumption.
        tenant, user, key_hash: as in Caller.
        ended_at: Unix seconds; None: it has not ended.
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

    @property
    def owner(self) -> str:
        """Who may read the stream, as Caller.owner."""
        return self.tenant or self.key_hash


class StreamRows:
    """A SQLite file that only one gateway uses at a time, and only the server's user can read.

    While it cannot be written, streams are resumable as long as this gateway lives.

    Args:
        directory: where the file is; None, or a directory that cannot be used: nowhere.

    Attributes:
        address: of this gateway and of those that replace it, at the ring.
        has_failed: the last new row could not be written.
        outlives_server: the file stays when the server ends.
    """

    def __init__(self, directory: Path | None = None, outlives_server: bool = False) -> None:
        self.has_failed = False
        self.outlives_server = outlives_server
        self._thread = ThreadPoolExecutor(1, "streams")
        try:
            self._database = _open(directory)
        except (sqlite3.Error, OSError) as error:
            logging.error(
                "resumable streams end with this gateway: %s cannot be used: %s", directory, error
            )
            self.has_failed, self.outlives_server = True, False
            self._database = _open(None)
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
        return [StreamRow(*row) for row in rows]

    def add(self, row: StreamRow) -> "Future[None]":
        """Write a row."""
        marks = ", ".join("?" * len(row))
        return self._thread.submit(
            self._try, f"INSERT OR REPLACE INTO streams VALUES ({marks})", row, is_new=True
        )

    def end(self, stream_id: str, at: float) -> None:
        """Note that a stream has ended."""
        statement = "UPDATE streams SET ended_at = ? WHERE id = ?"
        self._thread.submit(self._try, statement, (at, stream_id))

    def remove(self, stream_id: str) -> None:
        """Remove a row."""
        self._thread.submit(self._try, "DELETE FROM streams WHERE id = ?", (stream_id,))

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._thread.shutdown()
        self._database.close()

    def _try(self, statement: str, values: tuple[Any, ...], is_new: bool = False) -> None:
        try:
            self._database.execute(statement, values)
        except sqlite3.Error as error:
            if not self.has_failed:
                logging.error(
                    "resumable streams end with this gateway until their file can be written"
                    " again: %s; free space on the disk of --data-dir",
                    error,
                )
            self.has_failed = True
        else:
            self.has_failed = self.has_failed and not is_new


def _open(directory: Path | None) -> sqlite3.Connection:
    name = ":memory:"
    if directory is not None:
        durable.make_directory(directory)
        path = directory / FILE_NAME
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, durable.FILE_MODE))
        name = str(path)
    database = sqlite3.connect(
        name, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL"):
            database.execute(f"PRAGMA {pragma}")
        database.executescript(_SCHEMA)
    except sqlite3.Error:
        database.close()
        raise
    return database
