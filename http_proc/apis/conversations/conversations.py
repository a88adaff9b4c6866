"""Read and change the conversations of a store."""

import sqlite3
import uuid

from http_proc.apis.conversations.bodies import ConversationObject
from http_proc.apis.responses.items import check_num_items
from http_proc.apis.responses.store import Items
from http_proc.apis.responses.stored import tables
from http_proc.apis.responses.stored.item_forms import stored_items
from http_proc.apis.responses.stored.response_store import StoredResponses
from http_proc.apis.responses.stored.tables import ItemKey, ObjectKind, StoredItem, StoredObject
from http_proc.apis.responses.stored.tenant_reader import TenantReader
from http_proc.protocol.errors import ApiError
from quadriga.clock import now


class Conversations:
    """The conversations of the caller's tenant. Every call may raise ApiError."""

    def __init__(self, store: StoredResponses) -> None:
        self._store = store

    async def create(self, items: Items, metadata: dict[str, str]) -> ConversationObject:
        """Make a conversation of checked items."""
        conversation = ConversationObject(
            id=f"conv_{uuid.uuid4().hex}", created_at=int(now()), metadata=metadata
        )

        def work(connection: sqlite3.Connection, reader: TenantReader) -> None:
            owner = tables.add_object(
                connection, ObjectKind.CONVERSATION, conversation.id, reader.tenant, reader.read_at,
                conversation,
            )  # fmt: skip
            tables.add_items(connection, owner, _with_ids(items), is_output=False)

        await self._store.write(work)
        return conversation

    async def get(self, conversation_id: str) -> ConversationObject:
        """Return a conversation."""
        return await self._store.read(
            lambda reader: _conversation(reader, _find(reader, conversation_id))
        )

    async def update(self, conversation_id: str, metadata: dict[str, str]) -> ConversationObject:
        """Replace the metadata of a conversation, and return it."""

        def work(connection: sqlite3.Connection, reader: TenantReader) -> ConversationObject:
            owner = _find(reader, conversation_id)
            conversation = _conversation(reader, owner)
            conversation.metadata = metadata
            tables.set_body(connection, owner, conversation)
            tables.touch(connection, [owner], reader.read_at)
            return conversation

        return await self._store.write(work)

    async def item_keys(self, conversation_id: str) -> list[ItemKey]:
        """Return the keys of the items of a conversation, in order."""
        return await self._store.read(
            lambda reader: reader.item_keys(_find(reader, conversation_id), is_output=False)
        )

    async def item(self, conversation_id: str, item_id: str) -> StoredItem:
        """Return an item of a conversation."""
        item = await self._store.read(
            lambda reader: reader.item_of(_find(reader, conversation_id), item_id)
        )
        if item is None:
            raise _no_item(conversation_id, item_id)
        return item

    async def add_items(self, conversation_id: str, items: Items) -> Items:
        """Add checked items to a conversation, and return them as they are stored."""

        def work(connection: sqlite3.Connection, reader: TenantReader) -> Items:
            owner, new = _find(reader, conversation_id), _with_ids(items)
            known = reader.item_keys(owner, is_output=False)
            check_num_items(len(known) + len(new), "items with those of the conversation")
            _check_new({item.id for item in known}, new)
            tables.add_items(connection, owner, new, is_output=False)
            tables.touch(connection, [owner], reader.read_at)
            return new

        return await self._store.write(work)

    async def remove_item(self, conversation_id: str, item_id: str) -> ConversationObject:
        """Remove an item from a conversation, and return the conversation."""

        def work(connection: sqlite3.Connection, reader: TenantReader) -> ConversationObject:
            owner = _find(reader, conversation_id)
            if not tables.remove_item(connection, owner, item_id):
                raise _no_item(conversation_id, item_id)
            return _conversation(reader, owner)

        return await self._store.write(work)


def _find(reader: TenantReader, conversation_id: str) -> StoredObject:
    return reader.find(ObjectKind.CONVERSATION, conversation_id)


def _conversation(reader: TenantReader, owner: StoredObject) -> ConversationObject:
    return ConversationObject(**tables.unpacked(reader.body(owner)))


def _with_ids(items: Items) -> Items:
    return stored_items(items, uuid.uuid4().hex)


def _check_new(known: set[str], items: Items) -> None:
    for index, item in enumerate(items):
        if item["id"] in known:
            raise ApiError(
                400,
                f"items[{index}].id is {item['id']!r}, which the conversation has already: leave it"
                " out, or send the item without an id",
                param=f"items[{index}].id",
            )
        known.add(item["id"])


def _no_item(conversation_id: str, item_id: str) -> ApiError:
    return ApiError(
        404,
        f"conversation {conversation_id!r} has no item {item_id[:100]!r}",
        param="item_id",
        code="item_not_found",
    )
