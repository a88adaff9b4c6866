"""StoredResponses: the ResponseStore whose responses outlive the server."""

import sqlite3
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from string import hexdigits
from typing import Any, TypeVar

import msgspec

from http_proc.apis.responses.schema import ResponseObject
from http_proc.apis.responses.store import EndedResponse, Items, ResponseIds
from http_proc.apis.responses.stored import tables
from http_proc.apis.responses.stored.bounds import (
    StoreBounds,
    StoreSize,
    give_back_pages,
    store_size,
)
from http_proc.apis.responses.stored.database import RETRY_S, Database, StorageError
from http_proc.apis.responses.stored.item_forms import continued_items, stored_items
from http_proc.apis.responses.stored.tables import ObjectKind, StoredItem, StoredObject
from http_proc.apis.responses.stored.tenant_reader import TenantReader
from http_proc.caller import current_caller
from http_proc.gateway import UNIQUE_MARK
from http_proc.protocol.errors import ApiError
from http_proc.resumption import id_chars
from quadriga.clock import now
from quadriga.wire.messages.from_client import MAX_TURNS

# What makes the id of a response unique.
NUM_UNIQUE_CHARS = 8

T = TypeVar("T")


class StoredResponses:
    """The responses and conversations of one file. Each call is one for the caller's tenant.

    Args:
        path: of the file.
        bounds: how much is kept.
        is_durable: as in Database.

    Attributes:
        ids: those of the responses that are being made.
        size: what the file held after the last write.
        outcomes: number of responses that were kept ("stored") and that could not be ("failed").
    """

    def __init__(self, path: Path, bounds: StoreBounds, is_durable: bool = True) -> None:
        self._database = Database(path, tables.SCHEMA, self._on_change, is_durable)
        self._bounds = bounds
        self.ids = ResponseIds()
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

    # --- for new responses ------------------------------------------------------------------------

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
        return await self.read(lambda reader: _bodies(_items_up_to(reader, response_id)))

    async def items_of_conversation(self, conversation_id: str) -> Items:
        """Return the items of a conversation. Raise ApiError."""

        def work(reader: TenantReader) -> Items:
            owner = reader.find(ObjectKind.CONVERSATION, conversation_id, "conversation")
            return _bodies(reader.items(owner, is_output=False))

        return await self.read(work)

    async def item(self, item_id: str, name: str) -> dict[str, Any]:
        """Return an item; `name` is the request's name of the reference. Raise ApiError."""
        return await self.read(lambda reader: reader.item(item_id, name).body)

    async def save(self, ended: EndedResponse) -> bool:
        """Keep a response. Return whether that has succeeded."""
        return await self._save(lambda connection, reader: _save(connection, reader, ended))

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

    async def close_response(self, ended: EndedResponse) -> bool:
        """Keep an open response as it has ended. Return whether that has succeeded."""

        def work(connection: sqlite3.Connection, reader: TenantReader) -> None:
            response = ended.response
            with suppress(ApiError):  # it was deleted meanwhile
                owner = reader.find(ObjectKind.RESPONSE, response.id)
                body = _without_output(response)
                tables.close_object(connection, owner, body, ended.events)
                tables.add_items(connection, owner, response.output, is_output=True)
                tables.touch(connection, [owner], reader.read_at)
                _add_to_conversation(connection, reader, ended)

        return await self._save(work)

    async def _save(self, work: Callable[[sqlite3.Connection, TenantReader], None]) -> bool:
        try:
            await self.write(work)
        except ApiError:  # the file cannot be written, which is logged
            self.outcomes["failed"] += 1
            return False
        self.outcomes["stored"] += 1
        return True

    # --- for requests about them ------------------------------------------------------------------

    async def response(self, response_id: str) -> dict[str, Any]:
        """Return a response as JSON object. Raise ApiError."""
        return await self.read(lambda reader: _response(reader, response_id))

    async def events(self, response_id: str) -> bytes:
        """Return the stream of a response. Raise ApiError."""

        def work(reader: TenantReader) -> bytes:
            return zlib.decompress(reader.events(reader.find(ObjectKind.RESPONSE, response_id)))

        return await self.read(work)

    async def input_items(self, response_id: str) -> list[StoredItem]:
        """Return all items of which a response was made, in order. Raise ApiError."""

        def work(reader: TenantReader) -> list[StoredItem]:
            owner = reader.find(ObjectKind.RESPONSE, response_id)
            before = _items_up_to(reader, owner.previous) if owner.previous else []
            return before + reader.items(owner, is_output=False)

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

    async def write(self, work: Callable[[sqlite3.Connection, TenantReader], T]) -> T:
        """Change what the caller's tenant has, in one transaction. Raise ApiError."""
        tenant, written_at = current_caller().owner, now()

        def change(connection: sqlite3.Connection) -> T:
            reader = TenantReader(connection, tenant, written_at, self._bounds.max_age_s)
            result = work(connection, reader)
            self._bounds.enforce(connection, written_at)
            return result

        try:
            return await self._database.write(change)
        except StorageError as error:
            raise _unavailable(error) from None

    def _on_change(self, connection: sqlite3.Connection) -> None:
        give_back_pages(connection)
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
    known = {item.id for item in reader.items(owner, is_output=False)}
    new = [item for item in items if item["id"] not in known]
    tables.add_items(connection, owner, new, is_output=False)
    tables.touch(connection, [owner], reader.read_at)


def _without_output(response: ResponseObject) -> ResponseObject:
    return msgspec.structs.replace(response, output=[])


def _response(reader: TenantReader, response_id: str) -> dict[str, Any]:
    owner = reader.find(ObjectKind.RESPONSE, response_id)
    body: dict[str, Any] = tables.unpacked(reader.body(owner))
    body["output"] = _bodies(reader.items(owner, is_output=True))
    return body


def _items_up_to(reader: TenantReader, response_id: str) -> list[StoredItem]:
    """Return at least the first MAX_TURNS items of a chain; more are refused later."""
    items: list[StoredItem] = []
    for owner in reader.chain(response_id, MAX_TURNS):
        items += reader.items(owner, is_output=False) + reader.items(owner, is_output=True)
    return items


def _bodies(items: list[StoredItem]) -> Items:
    return continued_items([item.body for item in items])


def _unavailable(error: StorageError) -> ApiError:
    return ApiError(
        503,
        f"responses cannot be stored or read now: {error}",
        "server_error",
        code="no_storage",
        retry_after=RETRY_S,
    )
