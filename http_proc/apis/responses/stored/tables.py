"""The tables of the store, and the statements that read and change them.

An object is a response or a conversation. Its items are rows of their own, so that each is found by
its id. A response is open, with a job, while it is made in the background. JSON is compressed.
"""

import sqlite3
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from http_proc.protocol.errors import ApiError

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


def packed(body: Any) -> bytes:
    """Return compressed JSON."""
    return zlib.compress(msgspec.json.encode(body), 1)


def unpacked(data: bytes) -> Any:
    """Return what `packed` was given, as plain objects."""
    return msgspec.json.decode(zlib.decompress(data))


class Reader:
    """Finds the objects of one tenant.

    Args:
        connection: of the store's file.
        tenant: the caller's.
        read_at: the time now.
        max_age_s: seconds after the last use in which an object expires.
    """

    def __init__(
        self, connection: sqlite3.Connection, tenant: str, read_at: float, max_age_s: float
    ) -> None:
        self._connection = connection
        self._oldest_use = read_at - max_age_s
        self.tenant = tenant
        self.read_at = read_at

    def find(
        self, kind: ObjectKind, object_id: str, param: str = "id", code: str = ""
    ) -> StoredObject:
        """Return an object of the tenant.

        Args:
            kind: what it is.
            object_id: its id.
            param: the request's name of the id.
            code: of the error; "": it is made of `kind` and the reason.

        Raises:
            ApiError: 404 for an id that is unknown, deleted or expired; 403 for another tenant's.
        """
        row = self._connection.execute(
            "SELECT tenant, used_at, seq, id, previous, is_open FROM objects"
            " WHERE id = ? AND kind = ?",
            (object_id, kind),
        ).fetchone()
        if row is not None:
            tenant, used_at, *fields = row
            self._check_tenant(kind, object_id, tenant, param)
            found = StoredObject(*fields)
            if found.is_open or used_at >= self._oldest_use:
                return found
            raise _missing(kind, object_id, "expired", param, code)
        removed = self._connection.execute(
            "SELECT tenant, reason FROM removed WHERE id = ?", (object_id,)
        ).fetchone()
        if removed is None:
            raise _missing(kind, object_id, "unknown", param, code)
        self._check_tenant(kind, object_id, removed[0], param)
        raise _missing(kind, object_id, removed[1], param, code)

    def knows(self, object_id: str) -> bool:
        """Return whether an object has this id, or had it."""
        query = "SELECT 1 FROM objects WHERE id = ? UNION ALL SELECT 1 FROM removed WHERE id = ?"
        return self._connection.execute(query, (object_id, object_id)).fetchone() is not None

    def chain(self, response_id: str, limit: int) -> list[StoredObject]:
        """Return a response after all those that it continues, at most `limit`. Raise ApiError."""
        name, code = "previous_response_id", "previous_response_not_found"
        chain = [self.find(ObjectKind.RESPONSE, response_id, name, code)]
        while (previous := chain[-1].previous) is not None and len(chain) <= limit:
            try:
                chain.append(self.find(ObjectKind.RESPONSE, previous, name, code))
            except ApiError as error:
                reason = f"response {response_id!r} cannot be continued: {error}"
                raise ApiError(error.status, reason, param=name, code=code) from None
        if chain[0].is_open:
            raise ApiError(
                409,
                f"response {response_id!r} has not ended: it can be continued when it has",
                param=name,
                code="response_not_ended",
            )
        return chain[::-1]

    def item(self, item_id: str, name: str) -> StoredItem:
        """Return the tenant's newest item of an id. Raise ApiError."""
        rows = self._connection.execute(
            "SELECT tenant, used_at, is_open, items.id, data FROM items"
            " JOIN objects ON objects.seq = owner WHERE items.id = ? ORDER BY items.seq DESC",
            (item_id,),
        )
        is_others = False
        for tenant, used_at, is_open, *item in rows:
            if tenant == self.tenant and (is_open or used_at >= self._oldest_use):
                return StoredItem(*item)
            is_others = is_others or tenant != self.tenant
        if is_others:
            self._check_tenant("item", item_id, None, name)
        raise _missing("item", item_id, "unknown", name, "item_not_found")

    def items(self, owner: StoredObject, is_output: bool) -> list[StoredItem]:
        """Return the items of an object, in order. Those of conversations are no outputs."""
        rows = self._connection.execute(
            "SELECT id, data FROM items WHERE owner = ? AND is_output = ? ORDER BY seq",
            (owner.seq, is_output),
        )
        return [StoredItem(*row) for row in rows]

    def body(self, owner: StoredObject) -> bytes:
        """Return the compressed body of an object."""
        (body,) = self._connection.execute(
            "SELECT body FROM contents WHERE owner = ?", (owner.seq,)
        ).fetchone()
        found: bytes = body
        return found

    def events(self, owner: StoredObject) -> bytes:
        """Return the compressed stream of a response."""
        (events,) = self._connection.execute(
            "SELECT events FROM contents WHERE owner = ?", (owner.seq,)
        ).fetchone()
        found: bytes = events
        return found

    def _check_tenant(
        self, kind: ObjectKind | str, object_id: str, tenant: str | None, param: str
    ) -> None:
        if tenant != self.tenant:
            title = kind if isinstance(kind, str) else kind.title
            raise ApiError(
                403,
                f"{title} {object_id[:100]!r} belongs to another tenant: use the API key with which"
                " it was made",
                "permission_error",
                param,
                "not_yours",
            )


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


def _missing(
    kind: ObjectKind | str, object_id: str, reason: str, param: str, code: str
) -> ApiError:
    title = kind if isinstance(kind, str) else kind.title
    text = {
        "unknown": f"there is no {title} {object_id[:100]!r}",
        "deleted": f"{title} {object_id[:100]!r} was deleted",
        "expired": f"{title} {object_id[:100]!r} has expired: it was the least recently used of too"
        " many, or too old",
    }
    return ApiError(404, text[reason], param=param, code=code or f"{title}_{reason}")
