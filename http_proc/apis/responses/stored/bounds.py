"""The bounds of the store: what is least recently used goes first."""

import sqlite3
from dataclasses import dataclass

from http_proc.apis.responses.stored import tables

# Removals of old objects with one write, and pages that are then given back to the disk.
MAX_EXPIRED = 100
MAX_VACUUMED_PAGES = 256


@dataclass(frozen=True, slots=True)
class StoreBounds:
    """How much is kept.

    Attributes:
        max_objects: responses and conversations together.
        max_bytes: of the file's pages that are in use.
        max_age_s: seconds since the last use.
    """

    max_objects: int
    max_bytes: int
    max_age_s: float

    def enforce(self, connection: sqlite3.Connection, used_at: float) -> None:
        """Remove what is over a bound, least recently used first, but no open response.

        Args:
            connection: in a transaction.
            used_at: the time now.
        """
        rows = connection.execute(
            "SELECT seq FROM objects WHERE is_open = 0 AND used_at < ? LIMIT ?",
            (used_at - self.max_age_s, MAX_EXPIRED),
        ).fetchall()
        for (seq,) in rows:
            tables.remove(connection, seq, "expired")
        while self._is_over(connection):
            row = connection.execute(
                "SELECT seq FROM objects WHERE is_open = 0 ORDER BY used_at, seq LIMIT 1"
            ).fetchone()
            if row is None:
                return
            tables.remove(connection, row[0], "expired")

    def _is_over(self, connection: sqlite3.Connection) -> bool:
        size = store_size(connection)
        num_objects = size.num_responses + size.num_conversations
        return num_objects > self.max_objects or size.num_bytes > self.max_bytes


@dataclass(frozen=True, slots=True)
class StoreSize:
    """What the store holds.

    Attributes:
        num_open: responses that have not ended.
        num_bytes: of the file's pages that are in use.
    """

    num_responses: int = 0
    num_conversations: int = 0
    num_open: int = 0
    num_bytes: int = 0


def store_size(connection: sqlite3.Connection) -> StoreSize:
    """Return what the store holds."""
    counts = dict(connection.execute("SELECT kind, num FROM counts"))
    pages, free, page_bytes = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    return StoreSize(
        counts[tables.ObjectKind.RESPONSE],
        counts[tables.ObjectKind.CONVERSATION],
        connection.execute("SELECT count(*) FROM jobs").fetchone()[0],
        (pages - free) * page_bytes,
    )


def give_back_pages(connection: sqlite3.Connection) -> None:
    """Return some free pages to the disk; the file needs no transaction for it."""
    connection.execute(f"PRAGMA incremental_vacuum({MAX_VACUUMED_PAGES})").fetchall()
