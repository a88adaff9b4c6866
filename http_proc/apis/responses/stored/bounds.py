"""The bounds of the store: what is least recently used goes first.

Where there are tenants, it goes first in the tenant that has the most for its weight.
"""

import sqlite3
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from http_proc.apis.responses.stored import tables
from http_proc.shares import Shares

# Removals of old objects with one write, and pages that are then given back to the disk.
MAX_EXPIRED = 100
MAX_VACUUMED_PAGES = 256


class NoRoomError(Exception):
    """An object has more bytes than the store may have, beside what cannot be removed."""


@dataclass(frozen=True, slots=True)
class StoreBounds:
    """How much is kept.

    Attributes:
        max_objects: responses and conversations together.
        max_bytes: of the file's pages that are in use.
        max_age_s: seconds since the last use.
        shares: how that is divided among tenants; None: there are no tenants.
    """

    max_objects: int
    max_bytes: int
    max_age_s: float
    shares: Shares | None = None

    def enforce(
        self, connection: sqlite3.Connection, used_at: float, keeps_used: bool = False
    ) -> None:
        """Remove what is over a bound, least recently used first, but no open response.

        Args:
            connection: in a transaction.
            used_at: the time now.
            keeps_used: do not remove what is used now.

        Raises:
            NoRoomError: what is used now would have to be removed.
        """
        rows = connection.execute(
            "SELECT seq FROM objects WHERE is_open = 0 AND used_at < ? LIMIT ?",
            (used_at - self.max_age_s, MAX_EXPIRED),
        ).fetchall()
        for (seq,) in rows:
            tables.remove(connection, seq, "expired")
        while (excess := self._excess(connection)) is not None:
            oldest = self._oldest_of_largest(connection, excess)
            if oldest is None:
                return
            if keeps_used and oldest.used_at >= used_at:
                raise NoRoomError
            tables.remove(connection, oldest.seq, "expired")

    def _excess(self, connection: sqlite3.Connection) -> "_Excess | None":
        """Return the bound that is exceeded; None for none."""
        size = store_size(connection)
        if size.num_responses + size.num_conversations > self.max_objects:
            return _Excess.OBJECTS
        return _Excess.BYTES if size.num_bytes > self.max_bytes else None

    def _oldest_of_largest(
        self, connection: sqlite3.Connection, excess: "_Excess"
    ) -> "_Oldest | None":
        """Return the least recently used object of the tenant that has the most of something."""
        if self.shares is None or not self.shares.has_tenants:
            row = connection.execute(
                "SELECT used_at, seq FROM objects WHERE is_open = 0 ORDER BY used_at, seq LIMIT 1"
            ).fetchone()
            return None if row is None else _Oldest(*row)
        used = {tenant: one[excess] for tenant, one in tables.usage(connection).items()}
        parties = self.shares.by_party(used)
        while parties:
            party = self.shares.largest(parties)
            tenants = [tenant for tenant in used if self.shares.party(tenant) == party]
            if found := [one for tenant in tenants for one in _oldest_of(connection, tenant)]:
                return min(found)
            del parties[party]  # all that it has is open
        return None


class _Excess(IntEnum):
    """The bound that is exceeded: the place of what it bounds in StoredUsage."""

    OBJECTS = 0
    BYTES = 1


class _Oldest(NamedTuple):
    """An object that may be removed."""

    used_at: float
    seq: int


def _oldest_of(connection: sqlite3.Connection, tenant: str) -> list[_Oldest]:
    """Return the least recently used object of a tenant that is not open, if it has one."""
    rows = connection.execute(
        "SELECT used_at, seq FROM objects WHERE tenant = ? AND is_open = 0"
        " ORDER BY used_at, seq LIMIT 1",
        (tenant,),
    )
    return [_Oldest(*row) for row in rows]


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
