"""Find what the store has of one tenant, and say why it does not have the rest."""

import sqlite3
from collections.abc import Iterable, Iterator

from http_proc.apis.responses.stored.item_forms import first_item_ids
from http_proc.apis.responses.stored.tables import ItemKey, ObjectKind, StoredItem, StoredObject
from http_proc.protocol.errors import ApiError


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
        (body,) = self._connection.execute(
            "SELECT body FROM contents WHERE owner = ?", (owner.seq,)
        ).fetchone()
        found: bytes = body
        return found

    def events(self, owner: StoredObject, first: int, count: int) -> bytes:
        """Return bytes of the compressed stream of a response, from number `first` on."""
        (events,) = self._connection.execute(
            "SELECT substr(events, ?, ?) FROM contents WHERE owner = ?",
            (first + 1, count, owner.seq),
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
