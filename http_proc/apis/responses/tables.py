"""The tables of the store: the form of items, the statements that change them, and the reader.

An object is a response or a conversation. Its items are rows of their own, so that each is found by
its id. A response is open, with a job, while it is made in the background. JSON is compressed. The
reader finds what the store has of one tenant, and says why it does not have the rest.
"""

import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from http_proc.apis.responses.output import item_id
from http_proc.apis.responses.store import Items
from http_proc.core.call import MAX_CONTAINERS, num_containers
from http_proc.core.errors import ApiError

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


_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_CALLS = ("function_call", "custom_tool_call")


def stored_items(items: Items, owner_id: str) -> Items:
    """Return checked items of an input in the form in which they are stored.

    Args:
        items: as the client sent them.
        owner_id: id of the response, of which new ids are made.
    """
    return [_stored(item, owner_id, number) for number, item in enumerate(items)]


def first_item_ids(response_id: str) -> list[str]:
    """Return the ids that the first item of a response's input or output may have been given."""
    return [
        item_id(prefix, response_id, place)
        for prefix in _PREFIXES.values()
        for place in ("0", "input/0")
    ]


def continued_items(output: Items) -> Items:
    """Return the output items that the next answer continues: calls that were cut are left out."""
    return [item for item in output if not _is_cut_call(item)]


def _is_cut_call(item: dict[str, Any]) -> bool:
    return item.get("type") in _CALLS and item.get("status") == "incomplete"


def _stored(item: dict[str, Any], owner_id: str, number: int) -> dict[str, Any]:
    kind = item["type"]
    known_id = item.get("id")
    new_id = known_id or item_id(_PREFIXES[kind], owner_id, f"input/{number}")
    stored = {**item, "id": new_id, "status": item.get("status") or "completed"}
    if kind == "message":
        stored["content"] = _parts(item["role"], item["content"])
    if kind == "reasoning":
        stored.setdefault("summary", [])
    return stored


def _parts(role: str, content: str | Items) -> Items:
    """Return a content as a list of parts."""
    if isinstance(content, list):
        return content
    if role == "assistant":
        return [{"type": "output_text", "text": content, "annotations": [], "logprobs": []}]
    return [{"type": "input_text", "text": content}]


class TenantReader:
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

    def has_items_of(self, response_id: str) -> bool:
        """Return whether a conversation has items of a response of this id, kept or not."""
        ids = first_item_ids(response_id)
        query = f"SELECT 1 FROM items WHERE id IN ({', '.join('?' * len(ids))}) LIMIT 1"
        return self._connection.execute(query, ids).fetchone() is not None

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

    def items(self, owner: StoredObject, is_output: bool) -> Iterator[StoredItem]:
        """Yield the items of an object, in order. Those of conversations are no outputs."""
        rows = self._connection.execute(
            "SELECT id, data FROM items WHERE owner = ? AND is_output = ? ORDER BY seq",
            (owner.seq, is_output),
        )
        return (StoredItem(*row) for row in rows)

    def item_keys(self, owner: StoredObject, is_output: bool) -> list[ItemKey]:
        """Return the keys of the items of an object, in order."""
        rows = self._connection.execute(
            "SELECT seq, id FROM items WHERE owner = ? AND is_output = ? ORDER BY seq",
            (owner.seq, is_output),
        )
        return [ItemKey(*row) for row in rows]

    def item_of(self, owner: StoredObject, item_id: str) -> StoredItem | None:
        """Return an item of a conversation; None if it has none of this id."""
        row = self._connection.execute(
            "SELECT id, data FROM items WHERE owner = ? AND is_output = 0 AND id = ? LIMIT 1",
            (owner.seq, item_id),
        ).fetchone()
        return None if row is None else StoredItem(*row)

    def with_keys(self, keys: Iterable[ItemKey]) -> Iterator[StoredItem]:
        """Yield the items of keys that were read before, without those removed meanwhile."""
        for key in keys:
            row = self._connection.execute(
                "SELECT id, data FROM items WHERE seq = ? AND id = ?", key
            ).fetchone()
            if row is not None:
                yield StoredItem(*row)

    def body(self, owner: StoredObject) -> bytes:
        """Return the compressed body of an object."""
        query = "SELECT body FROM contents WHERE owner = ?"
        return bytes(self._connection.execute(query, (owner.seq,)).fetchone()[0])

    def events(self, owner: StoredObject, first: int, count: int) -> bytes:
        """Return bytes of the compressed stream of a response, from number `first` on."""
        query = "SELECT substr(events, ?, ?) FROM contents WHERE owner = ?"
        return bytes(self._connection.execute(query, (first + 1, count, owner.seq)).fetchone()[0])

    def _check_tenant(
        self, kind: ObjectKind | str, object_id: str, tenant: str | None, param: str
    ) -> None:
        if tenant != self.tenant:
            title = kind if isinstance(kind, str) else kind.title
            raise ApiError(
                403,
                f"{title} {object_id[:100]!r} belongs to another tenant: use the API key with which"
                " it was made",
                param=param,
                code="not_yours",
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
