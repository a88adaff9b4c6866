"""The tables of the store, and the statements that change them; tenant_reader.py reads them.

An object is a response or a conversation. Its items are rows of their own, so that each is found by
its id. A response is open, with a job, while it is made in the background. JSON is compressed.
"""

import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from http_proc.endpoints.body_shape import MAX_CONTAINERS, num_containers

SCHEMA = """
CREATE TABLE objects (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, kind INTEGER NOT NULL,
    tenant TEXT NOT NULL, previous TEXT, is_open INTEGER NOT NULL DEFAULT 0, used_at REAL NOT NULL);
CREATE INDEX objects_by_use ON objects (is_open, used_at, seq);
CREATE TABLE contents (
    owner INTEGER PRIMARY KEY REFERENCES objects ON DELETE CASCADE, body BLOB NOT NULL,
    events BLOB NOT NULL);
CREATE TABLE jobs (
    owner INTEGER PRIMARY KEY REFERENCES objects ON DELETE CASCADE, data BLOB NOT NULL);
CREATE TABLE items (
    seq INTEGER PRIMARY KEY, owner INTEGER NOT NULL REFERENCES objects ON DELETE CASCADE,
    is_output INTEGER NOT NULL, id TEXT NOT NULL, data BLOB NOT NULL);
CREATE INDEX items_by_owner ON items (owner, is_output, seq);
CREATE INDEX items_by_id ON items (id);
CREATE TABLE removed (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
    reason TEXT NOT NULL);
CREATE TABLE counts (kind INTEGER PRIMARY KEY, num INTEGER NOT NULL);
INSERT INTO counts VALUES (1, 0), (2, 0);
CREATE TRIGGER count_added AFTER INSERT ON objects BEGIN
    UPDATE counts SET num = num + 1 WHERE kind = NEW.kind; END;
CREATE TRIGGER count_removed AFTER DELETE ON objects BEGIN
    UPDATE counts SET num = num - 1 WHERE kind = OLD.kind; END;
"""
# What a file of an earlier version lacks: the sizes of objects, and the usage of each tenant.
ADDITIONS = """
BEGIN;
ALTER TABLE objects ADD COLUMN num_bytes INTEGER NOT NULL DEFAULT 0;
CREATE INDEX objects_by_tenant ON objects (tenant, is_open, used_at, seq);
CREATE TABLE usage (
    tenant TEXT PRIMARY KEY, num INTEGER NOT NULL, num_bytes INTEGER NOT NULL) WITHOUT ROWID;
UPDATE objects SET num_bytes =
    (SELECT coalesce(sum(length(body) + length(events)), 0) FROM contents WHERE owner = objects.seq)
    + (SELECT coalesce(sum(length(data)), 0) FROM jobs WHERE owner = objects.seq)
    + (SELECT coalesce(sum(length(data)), 0) FROM items WHERE owner = objects.seq);
INSERT INTO usage SELECT tenant, count(*), sum(num_bytes) FROM objects GROUP BY tenant;
CREATE TRIGGER usage_added AFTER INSERT ON objects BEGIN
    INSERT OR IGNORE INTO usage VALUES (NEW.tenant, 0, 0);
    UPDATE usage SET num = num + 1 WHERE tenant = NEW.tenant; END;
CREATE TRIGGER usage_changed AFTER UPDATE OF num_bytes ON objects BEGIN
    UPDATE usage SET num_bytes = num_bytes + NEW.num_bytes - OLD.num_bytes
    WHERE tenant = NEW.tenant; END;
CREATE TRIGGER usage_removed AFTER DELETE ON objects BEGIN
    UPDATE usage SET num = num - 1, num_bytes = num_bytes - OLD.num_bytes
    WHERE tenant = OLD.tenant;
    DELETE FROM usage WHERE tenant = OLD.tenant AND num <= 0; END;
CREATE TRIGGER content_added AFTER INSERT ON contents BEGIN
    UPDATE objects SET num_bytes = num_bytes + length(NEW.body) + length(NEW.events)
    WHERE seq = NEW.owner; END;
CREATE TRIGGER content_changed AFTER UPDATE ON contents BEGIN
    UPDATE objects SET num_bytes = num_bytes + length(NEW.body) + length(NEW.events)
    - length(OLD.body) - length(OLD.events) WHERE seq = NEW.owner; END;
CREATE TRIGGER job_added AFTER INSERT ON jobs BEGIN
    UPDATE objects SET num_bytes = num_bytes + length(NEW.data) WHERE seq = NEW.owner; END;
CREATE TRIGGER job_removed AFTER DELETE ON jobs BEGIN
    UPDATE objects SET num_bytes = num_bytes - length(OLD.data) WHERE seq = OLD.owner; END;
CREATE TRIGGER item_added AFTER INSERT ON items BEGIN
    UPDATE objects SET num_bytes = num_bytes + length(NEW.data) WHERE seq = NEW.owner; END;
CREATE TRIGGER item_removed AFTER DELETE ON items BEGIN
    UPDATE objects SET num_bytes = num_bytes - length(OLD.data) WHERE seq = OLD.owner; END;
COMMIT;
"""
# A stream is unpacked in such pieces.
PIECE_BYTES = 64 * 1024
# Ids of removed objects beyond these are forgotten, the oldest first: then they are unknown.
MAX_REMOVED_IDS = 100_000


class ObjectKind(IntEnum):
    """What an object is."""

    RESPONSE = 1
    CONVERSATION = 2

    @property
    def title(self) -> str:
        """Its name in messages."""
        return self.name.lower()


class StoredObject(NamedTuple):
    """Row of an object. previous: id of the response that it continues."""

    seq: int
    id: str
    previous: str | None
    is_open: bool


class ItemKey(NamedTuple):
    """Row of an item, without the item."""

    seq: int
    id: str


@dataclass(slots=True)
class StoredItem:
    """An item, compressed."""

    id: str
    data: bytes

    @property
    def body(self) -> dict[str, Any]:
        """The item's JSON object."""
        item: dict[str, Any] = unpacked(self.data)
        return item


class Unpacker:
    """Unpack items for one request, up to a number of bytes.

    Attributes:
        num_bytes: JSON of the items that were unpacked.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = self._num_containers = 0

    def body(self, item: StoredItem) -> dict[str, Any] | None:
        """Return the JSON object of an item; None if it is over the bound.

        No more is unpacked than the bound allows, whatever the item holds.
        """
        stream = zlib.decompressobj()
        rest = self._max_bytes - self.num_bytes
        data = stream.decompress(item.data, rest + 1)
        if len(data) > rest or not stream.eof:
            return None
        self.num_bytes += len(data)
        self._num_containers += num_containers(data)
        if self._num_containers > MAX_CONTAINERS:
            return None
        body: dict[str, Any] = msgspec.json.decode(data)
        return body


def add_missing(connection: sqlite3.Connection) -> None:
    """Add what a file of an earlier version lacks."""
    columns = {name for _, name, *_ in connection.execute("PRAGMA table_info(objects)")}
    if "num_bytes" in columns:
        return
    try:
        connection.executescript(ADDITIONS)
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


class StoredUsage(NamedTuple):
    """What a tenant has in the store. num_bytes: of compressed JSON."""

    num_objects: int
    num_bytes: int


def usage(connection: sqlite3.Connection) -> dict[str, StoredUsage]:
    """Return what each tenant has."""
    rows = connection.execute("SELECT tenant, num, num_bytes FROM usage")
    return {tenant: StoredUsage(*numbers) for tenant, *numbers in rows}


def packed(body: Any) -> bytes:
    """Return compressed JSON."""
    return zlib.compress(msgspec.json.encode(body), 1)


def unpacked(data: bytes) -> Any:
    """Return what `packed` was given, as plain objects."""
    return msgspec.json.decode(zlib.decompress(data))


class StreamUnpacker:
    """Unpack a compressed stream, piece by piece."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj()

    def pieces(self, packed: bytes) -> Iterator[bytes]:
        """Yield what the next bytes hold, in pieces of at most PIECE_BYTES."""
        while packed:
            if piece := self._stream.decompress(packed, PIECE_BYTES):
                yield piece
            packed = self._stream.unconsumed_tail


def add_object(
    connection: sqlite3.Connection, kind: ObjectKind, object_id: str, tenant: str, used_at: float,
    body: Any, previous: str | None = None, is_open: bool = False, events: bytes = b"",
) -> StoredObject:  # fmt: skip
    """Add an object without items, and return it."""
    seq = connection.execute(
        "INSERT INTO objects (id, kind, tenant, previous, is_open, used_at)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (object_id, kind, tenant, previous, is_open, used_at),
    ).lastrowid
    assert seq is not None
    connection.execute(
        "INSERT INTO contents VALUES (?, ?, ?)",
        (seq, packed(body), zlib.compress(events, 1)),
    )
    return StoredObject(seq, object_id, previous, is_open)


def set_body(connection: sqlite3.Connection, owner: StoredObject, body: Any) -> None:
    """Replace the body of an object."""
    connection.execute("UPDATE contents SET body = ? WHERE owner = ?", (packed(body), owner.seq))


def set_job(connection: sqlite3.Connection, owner: StoredObject, data: bytes) -> None:
    """Keep the job of an open response."""
    connection.execute("INSERT INTO jobs VALUES (?, ?)", (owner.seq, data))


def jobs(connection: sqlite3.Connection) -> list[tuple[bytes, bytes]]:
    """Return the compressed body and the job of each open response, the oldest first."""
    return connection.execute(
        "SELECT body, data FROM jobs JOIN contents USING (owner) ORDER BY owner"
    ).fetchall()


def close_object(
    connection: sqlite3.Connection, owner: StoredObject, body: Any, events: bytes
) -> None:
    """Give an open response its last body and its stream, and remove its job."""
    set_body(connection, owner, body)
    connection.execute(
        "UPDATE contents SET events = ? WHERE owner = ?", (zlib.compress(events, 1), owner.seq)
    )
    connection.execute("DELETE FROM jobs WHERE owner = ?", (owner.seq,))
    connection.execute("UPDATE objects SET is_open = 0 WHERE seq = ?", (owner.seq,))


def add_items(
    connection: sqlite3.Connection,
    owner: StoredObject,
    items: Iterable[dict[str, Any]],
    is_output: bool,
) -> None:
    """Add items, which have ids, after those of an object."""
    connection.executemany(
        "INSERT INTO items (owner, is_output, id, data) VALUES (?, ?, ?, ?)",
        ((owner.seq, is_output, item["id"], packed(item)) for item in items),
    )


def remove_item(connection: sqlite3.Connection, owner: StoredObject, item_id: str) -> bool:
    """Remove an item of an object. Return whether there was one."""
    return bool(
        connection.execute(
            "DELETE FROM items WHERE owner = ? AND id = ?", (owner.seq, item_id)
        ).rowcount
    )


def touch(connection: sqlite3.Connection, owners: Iterable[StoredObject], used_at: float) -> None:
    """Note that objects were used."""
    connection.executemany(
        "UPDATE objects SET used_at = ? WHERE seq = ?", ((used_at, one.seq) for one in owners)
    )


def remove(connection: sqlite3.Connection, seq: int, reason: str) -> None:
    """Remove an object with its items, and remember its id and the reason: deleted or expired."""
    connection.execute(
        "INSERT OR REPLACE INTO removed (id, tenant, reason)"
        " SELECT id, tenant, ? FROM objects WHERE seq = ?",
        (reason, seq),
    )
    connection.execute("DELETE FROM objects WHERE seq = ?", (seq,))
    connection.execute(
        "DELETE FROM removed WHERE seq <= (SELECT max(seq) FROM removed) - ?", (MAX_REMOVED_IDS,)
    )
