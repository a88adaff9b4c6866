"""StoredResponses: the ResponseStore whose responses outlive the server.

Its bounds come first: what is least recently used goes first.
"""

import sqlite3
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from string import hexdigits
from typing import Any, NamedTuple, TypeVar

import msgspec

from http_proc.apis.responses import tables
from http_proc.apis.responses.database import RETRY_S, Database, StorageError
from http_proc.apis.responses.input import check_num_items
from http_proc.apis.responses.schema import ResponseObject
from http_proc.apis.responses.store import RESPONSE_STORE, EndedResponse, Items, ResponseStore
from http_proc.apis.responses.tables import (
    ItemKey,
    ObjectKind,
    StoredItem,
    StoredObject,
    TenantReader,
    continued_items,
    stored_items,
)
from http_proc.core.call import MAX_CONTAINERS
from http_proc.core.caller import current_caller
from http_proc.core.errors import RETRY_AFTER_S, ApiError
from http_proc.core.gateway import UNIQUE_MARK, Gateway
from http_proc.core.resumption import id_chars
from http_proc.core.shares import SharedBound, Shares, hold
from quadriga.clock import now
from quadriga.wire.client import MAX_TURNS

# Removals of old objects with one write, and pages that are then given back to the disk.
MAX_EXPIRED = 100
MAX_VACUUMED_PAGES = 256


class NoRoomError(Exception):
    """An object has more bytes than the store may have, beside what cannot be removed."""


@dataclass(frozen=True, slots=True)
class StoreBounds:
    """How much is kept. What is least recently used of the party that has the most goes first.

    Attributes:
        max_objects: responses and conversations together.
        max_bytes: of the file's pages that are in use.
        max_age_s: seconds since the last use.
        shares: how that is divided among tenants.
    """

    max_objects: int
    max_bytes: int
    max_age_s: float
    shares: Shares

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
        """Return the least recently used object of the party that has the most of something."""
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


# What makes the id of a response unique.
NUM_UNIQUE_CHARS = 8
# The code of the error for what the store has no room for.
TOO_LARGE = "object_too_large"
# Of one page of items, unless its first item has more.
MAX_PAGE_BYTES = 4 * 1024 * 1024
# The compressed stream of a response is read from the file in such pieces.
READ_BYTES = 256 * 1024

T = TypeVar("T")


class StoredResponses(ResponseStore):
    """The responses and conversations of one file. Each call is one for the caller's tenant.

    Args:
        path: of the file.
        bounds: how much is kept.
        is_durable: as in Database.
        max_items_bytes: of the items that one request may refer to.
        held: bytes of the items of all open requests.

    Attributes:
        size: what the file held after the last write.
        outcomes: number of responses that were kept ("stored") and that could not be ("failed").
    """

    def __init__(
        self,
        path: Path,
        bounds: StoreBounds,
        is_durable: bool,
        max_items_bytes: int,
        held: SharedBound,
    ) -> None:
        super().__init__()
        self._database = Database(path, tables.SCHEMA, self._on_change, is_durable)
        self._bounds = bounds
        self._max_items_bytes = max_items_bytes
        self._held = held
        self.size = StoreSize()
        self.outcomes: Counter[str] = Counter()

    async def open(self) -> None:
        """Open the file, if that succeeds, and remove what has expired meanwhile."""
        try:
            await self._database.write(lambda connection: self._bounds.enforce(connection, now()))
        except StorageError:
            return  # it is logged, and tried again by each request

    async def close(self) -> None:
        """Finish what was begun and close the file."""
        await self._database.close()

    @property
    def has_failed(self) -> bool:
        """Whether the file could not be used when it was tried last."""
        return self._database.has_failed

    @property
    def keeps_responses(self) -> bool:
        """Whether the next response can probably be kept."""
        return self._database.can_write

    async def unused_id(self, response_id: str, is_taken: bool = False) -> str:
        """Return the id for a new response, which is longer if it is taken."""
        with suppress(ApiError):  # the file cannot be read, and nothing is stored
            is_taken |= await self.read(
                lambda reader: reader.knows(response_id) or reader.has_items_of(response_id)
            )
        unique = UNIQUE_MARK + id_chars(NUM_UNIQUE_CHARS, hexdigits[:16])
        return response_id + (unique if is_taken or response_id in self.ids else "")

    async def items_of_response(self, response_id: str) -> Items:
        """Return the input and output items up to and with a response. Raise ApiError."""
        return await self._loaded(
            "previous_response_id", lambda reader: _items_up_to(reader, response_id)
        )

    async def items_of_conversation(self, conversation_id: str) -> Items:
        """Return the items of a conversation. Raise ApiError."""

        def found(reader: TenantReader) -> Iterator[StoredItem]:
            owner = reader.find(ObjectKind.CONVERSATION, conversation_id, "conversation")
            return reader.items(owner, is_output=False)

        return await self._loaded("conversation", found)

    async def items(self, names: Mapping[str, str]) -> Items:
        """Return items by their ids; `names`: the request's names of them. Raise ApiError."""
        if not names:
            return []

        def found(reader: TenantReader) -> Iterator[StoredItem]:
            return (reader.item(item_id, name) for item_id, name in names.items())

        return await self._loaded("input", found, keeps_all=True)

    async def _loaded(
        self,
        param: str,
        find: Callable[[TenantReader], Iterator[StoredItem]],
        keeps_all: bool = False,
    ) -> Items:
        """Return the items that a request refers to, which it holds until its end.

        Args:
            param: the request's name of the reference.
            find: yields the items.
            keeps_all: also calls that were cut.

        Raises:
            ApiError: they have more bytes than a request may have, or there is no room for them.
        """
        unpacker = tables.Unpacker(self._max_items_bytes)

        def work(reader: TenantReader) -> Items:
            items: Items = []
            for item in find(reader):
                check_num_items(len(items) + 1, "input with the stored conversation")
                body = unpacker.body(item)
                if body is None:
                    raise self._too_large(param)
                items.append(body)
            return items if keeps_all else continued_items(items)

        items = await self.read(work)
        if not hold(self._held, unpacker.num_bytes):
            raise no_room_for_items(self._held)
        return items

    def _too_large(self, param: str) -> ApiError:
        return ApiError(
            400,
            f"the stored items that {param} refers to have more than {self._max_items_bytes} bytes,"
            f" the most that a request may have (--max-body-bytes), or more than {MAX_CONTAINERS}"
            " objects and arrays: refer to fewer, or begin a new conversation",
            param=param,
            code="stored_items_too_large",
        )

    def check_size(self, items: Items) -> None:
        """Raise an ApiError where a response with these items cannot be kept for their size."""
        limit = self._bounds.max_bytes
        if sum(len(msgspec.json.encode(item)) for item in items) <= limit:
            return
        size = sum(len(tables.packed(item)) for item in items)
        if size > limit:
            raise ApiError(
                413,
                f"input has {size} bytes in the store, which has {limit} (--max-stored-bytes): send"
                " store: false, or start the server with a larger --max-stored-bytes",
                param="input",
                code=TOO_LARGE,
            )

    async def save(self, ended: EndedResponse) -> bool:
        """Keep a response. Return whether that has succeeded."""
        try:
            return await self._kept(lambda connection, reader: _save(connection, reader, ended))
        except ApiError:  # it is too large
            return False

    async def open_response(self, response: ResponseObject, given: Items, job: bytes) -> None:
        """Keep a response that is made from now on, and what makes it again. Raise ApiError."""

        def work(connection: sqlite3.Connection, reader: TenantReader) -> None:
            owner = _add(connection, reader, response, given, is_open=True)
            tables.set_job(connection, owner, job)

        await self.write(work)

    async def open_responses(self) -> list[tuple[dict[str, Any], bytes]]:
        """Return the response and the job of each that has not ended, of all tenants.

        Raises:
            StorageError: the file cannot be read.
        """
        found = await self._database.read(tables.jobs)
        return [(tables.unpacked(body), job) for body, job in found]

    async def close_response(self, ended: EndedResponse, keeps_it: bool = True) -> bool:
        """Keep an open response as it has ended. Return whether that has succeeded.

        Args:
            ended: the response.
            keeps_it: refuse it, and leave it open, where the store would remove it at once.

        Raises:
            ApiError: it is refused.
        """

        def work(connection: sqlite3.Connection, reader: TenantReader) -> None:
            response = ended.response
            with suppress(ApiError):  # it was deleted meanwhile
                owner = reader.find(ObjectKind.RESPONSE, response.id)
                body = _without_output(response)
                tables.close_object(connection, owner, body, ended.events)
                tables.add_items(connection, owner, response.output, is_output=True)
                tables.touch(connection, [owner], reader.read_at)
                _add_to_conversation(connection, reader, ended)

        return await self._kept(work, keeps_it)

    async def _kept(
        self, work: Callable[[sqlite3.Connection, TenantReader], None], keeps_used: bool = True
    ) -> bool:
        """Return whether a change could be written; a failure is logged. Raise where it is refused.

        Args:
            work: makes the change.
            keeps_used: as `write`.
        """
        try:
            await self.write(work, keeps_used)
        except ApiError as error:
            self.outcomes["failed"] += 1
            if error.answer.error.code == TOO_LARGE:
                raise
            return False
        self.outcomes["stored"] += 1
        return True

    async def response(self, response_id: str) -> dict[str, Any]:
        """Return a response as JSON object. Raise ApiError."""
        return await self.read(lambda reader: _response(reader, response_id))

    async def events(self, response_id: str) -> AsyncGenerator[bytes, None]:
        """Yield the stream of a response in pieces, as they are asked for. Raise ApiError."""
        first = 0

        def work(reader: TenantReader) -> bytes:
            owner = reader.find(ObjectKind.RESPONSE, response_id)
            return reader.events(owner, first, READ_BYTES)

        stream = tables.StreamUnpacker()
        while packed := await self.read(work):
            first += len(packed)
            for piece in stream.pieces(packed):
                yield piece

    async def input_items(self, response_id: str) -> list[ItemKey]:
        """Return the keys of all items of which a response was made, in order. Raise ApiError."""

        def work(reader: TenantReader) -> list[ItemKey]:
            owner = reader.find(ObjectKind.RESPONSE, response_id)
            before = reader.chain(owner.previous, MAX_TURNS) if owner.previous else []
            keys: list[ItemKey] = []
            for one in before:
                keys += reader.item_keys(one, is_output=False)
                keys += reader.item_keys(one, is_output=True)
            return keys + reader.item_keys(owner, is_output=False)

        return await self.read(work)

    async def page(self, keys: Sequence[ItemKey]) -> Items:
        """Return the first items of keys: those that fit in MAX_PAGE_BYTES, and at least one."""

        def work(reader: TenantReader) -> Items:
            unpacker = tables.Unpacker(MAX_PAGE_BYTES)
            items: Items = []
            for item in reader.with_keys(keys):
                body = unpacker.body(item)
                if body is None and items:
                    break
                items.append(item.body if body is None else body)
            return items

        return await self.read(work)

    async def delete(self, kind: ObjectKind, object_id: str) -> None:
        """Remove an object. Raise ApiError."""

        def work(connection: sqlite3.Connection, reader: TenantReader) -> None:
            tables.remove(connection, reader.find(kind, object_id).seq, "deleted")

        await self.write(work)

    async def read(self, work: Callable[[TenantReader], T]) -> T:
        """Return what `work` reads for the caller's tenant. Raise ApiError."""
        tenant, read_at, max_age_s = current_caller().owner, now(), self._bounds.max_age_s
        try:
            return await self._database.read(
                lambda connection: work(TenantReader(connection, tenant, read_at, max_age_s))
            )
        except StorageError as error:
            raise _unavailable(error) from None

    async def write(
        self, work: Callable[[sqlite3.Connection, TenantReader], T], keeps_used: bool = True
    ) -> T:
        """Change what the caller's tenant has, in one transaction. Raise ApiError.

        Args:
            work: makes the change.
            keeps_used: refuse a change of which nothing would be kept.
        """
        tenant, written_at = current_caller().owner, now()

        def change(connection: sqlite3.Connection) -> T:
            reader = TenantReader(connection, tenant, written_at, self._bounds.max_age_s)
            result = work(connection, reader)
            self._bounds.enforce(connection, written_at, keeps_used)
            return result

        try:
            return await self._database.write(change)
        except StorageError as error:
            raise _unavailable(error) from None
        except NoRoomError:
            raise ApiError(
                507,
                "this has no room in the store beside what cannot be removed: the store has"
                f" {self._bounds.max_bytes} bytes (--max-stored-bytes) for"
                f" {self._bounds.max_objects} objects",
                code=TOO_LARGE,
            ) from None

    def _on_change(self, connection: sqlite3.Connection) -> None:
        tables.add_missing(connection)
        # The file needs no transaction to give pages back to the disk.
        connection.execute(f"PRAGMA incremental_vacuum({MAX_VACUUMED_PAGES})").fetchall()
        self.size = store_size(connection)


def _save(connection: sqlite3.Connection, reader: TenantReader, ended: EndedResponse) -> None:
    response = ended.response
    if ended.is_repeat and ended.is_kept and reader.knows(response.id):
        return  # it was kept, with its turn of the conversation, before the earlier gateway died
    _add_to_conversation(connection, reader, ended)
    if ended.is_kept:
        owner = _add(connection, reader, response, ended.input_items, events=ended.events)
        tables.add_items(connection, owner, response.output, is_output=True)


def _add(
    connection: sqlite3.Connection, reader: TenantReader, response: ResponseObject, given: Items,
    is_open: bool = False, events: bytes = b"",
) -> StoredObject:  # fmt: skip
    """Add a response without its output, and note that those before it were used."""
    if reader.knows(response.id):
        raise ApiError(409, f"response {response.id!r} exists already", code="response_exists")
    previous = response.previous_response_id
    if previous is not None:
        with suppress(ApiError):  # a response of the chain was deleted meanwhile
            tables.touch(connection, reader.chain(previous, MAX_TURNS), reader.read_at)
    owner = tables.add_object(
        connection, ObjectKind.RESPONSE, response.id, reader.tenant, reader.read_at,
        _without_output(response), previous, is_open, events,
    )  # fmt: skip
    tables.add_items(connection, owner, stored_items(given, response.id), is_output=False)
    return owner


def _add_to_conversation(
    connection: sqlite3.Connection, reader: TenantReader, ended: EndedResponse
) -> None:
    if ended.conversation_id is None:
        return
    with suppress(ApiError):  # it was deleted meanwhile
        owner = reader.find(ObjectKind.CONVERSATION, ended.conversation_id)
        given = stored_items(ended.input_items, ended.response.id)
        _add_new_items(connection, reader, owner, given + continued_items(ended.response.output))


def _add_new_items(
    connection: sqlite3.Connection, reader: TenantReader, owner: StoredObject, items: Items
) -> None:
    """Add items to a conversation, but those that it has."""
    known = {key.id for key in reader.item_keys(owner, is_output=False)}
    new = [item for item in items if item["id"] not in known]
    tables.add_items(connection, owner, new, is_output=False)
    tables.touch(connection, [owner], reader.read_at)


def _without_output(response: ResponseObject) -> ResponseObject:
    return msgspec.structs.replace(response, output=[])


def _response(reader: TenantReader, response_id: str) -> dict[str, Any]:
    owner = reader.find(ObjectKind.RESPONSE, response_id)
    body: dict[str, Any] = tables.unpacked(reader.body(owner))
    output = [item.body for item in reader.items(owner, is_output=True)]
    body["output"] = continued_items(output)
    return body


def _items_up_to(reader: TenantReader, response_id: str) -> Iterator[StoredItem]:
    """Yield the items of a chain, in order."""
    for owner in reader.chain(response_id, MAX_TURNS):
        yield from reader.items(owner, is_output=False)
        yield from reader.items(owner, is_output=True)


def _unavailable(error: StorageError) -> ApiError:
    return ApiError(
        503,
        f"responses cannot be stored or read now: {error}",
        code="no_storage",
        retry_after=RETRY_S,
    )


def no_room_for_items(held: SharedBound) -> ApiError:
    """Return the error where stored items of open requests leave no room for those of one more."""
    return ApiError(
        503,
        f"open requests refer to stored items of {held.total} bytes, and at most {held.limit} are"
        " held at one time, with a share for each tenant; try again",
        code="too_many_stored_items",
        retry_after=RETRY_AFTER_S,
    )


FILE_NAME = "responses.sqlite3"


@asynccontextmanager
async def store_lifetime(gateway: Gateway) -> AsyncIterator[None]:
    """Keep responses while the gateway runs, if it has a directory for them."""
    args, directory = gateway.args, gateway.data_dir
    bounds = StoreBounds(
        args.max_stored_responses, args.max_stored_bytes, args.max_stored_age, gateway.shares
    )
    if directory is None:
        yield
        return
    store = StoredResponses(
        directory / FILE_NAME,
        bounds,
        gateway.outlives_server,
        args.max_body_bytes,
        gateway.stored_items,
    )
    gateway[RESPONSE_STORE] = store
    await store.open()
    yield
    await store.close()
