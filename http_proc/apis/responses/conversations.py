"""/v1/conversations: its bodies, how conversations are read and changed, and its handlers."""

import sqlite3
import uuid
from typing import Any

import msgspec
from aiohttp import web

from http_proc.apis.responses import tables
from http_proc.apis.responses.endpoints import ItemList, item_page, stored_responses
from http_proc.apis.responses.input import (
    MessageItem,
    OutputItem,
    check_num_items,
    parse_item,
    text_of,
    with_type,
)
from http_proc.apis.responses.store import Items
from http_proc.apis.responses.tables import (
    ObjectKind,
    StoredObject,
    TenantReader,
    stored_items,
)
from http_proc.core.errors import ApiError, invalid
from http_proc.generation.sampling import convert
from http_proc.generation.schema import RequestBody, check_metadata
from http_proc.web.endpoint import Endpoint, post
from http_proc.web.exchange import json_response, read_object
from quadriga.clock import now


class CreateConversationRequest(RequestBody, kw_only=True):
    """POST /v1/conversations. items: as in the input of /v1/responses, without references."""

    items: list[dict[str, Any]] = msgspec.field(default_factory=list)
    metadata: dict[str, str] = msgspec.field(default_factory=dict)


class UpdateConversationRequest(RequestBody, kw_only=True):
    """POST /v1/conversations/{id}. metadata: replaces what the conversation has."""

    metadata: dict[str, str]


class AddItemsRequest(RequestBody, kw_only=True):
    """POST /v1/conversations/{id}/items."""

    items: list[dict[str, Any]]


class ConversationObject(msgspec.Struct, kw_only=True):
    """A conversation. created_at: in Unix seconds."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: str = "conversation"


class DeletedConversation(msgspec.Struct):
    """The conversation that was removed."""

    id: str
    deleted: bool = True
    object: str = "conversation.deleted"


def checked_items(given: Items) -> Items:
    """Return the items of a request with their types. Raise an ApiError that names the first wrong.

    Calls and outputs may come with later requests, so that their order is not checked here.
    """
    check_num_items(len(given), "items")
    items = [with_type(item) for item in given]
    for index, item in enumerate(items):
        name = f"items[{index}]"
        parsed = parse_item(name, item)
        if isinstance(parsed, MessageItem):
            text_of(parsed.content, f"{name}.content")
        elif isinstance(parsed, OutputItem):
            text_of(parsed.output, f"{name}.output")
    return items


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


async def create_conversation(request: web.Request) -> web.Response:
    """Make a conversation."""
    store = stored_responses(request)
    call = convert(await read_object(request), CreateConversationRequest)
    check_metadata(call.metadata)
    items = checked_items(call.items)
    made = ConversationObject(
        id=f"conv_{uuid.uuid4().hex}", created_at=int(now()), metadata=call.metadata
    )

    def work(connection: sqlite3.Connection, reader: TenantReader) -> None:
        owner = tables.add_object(
            connection, ObjectKind.CONVERSATION, made.id, reader.tenant, reader.read_at, made
        )
        tables.add_items(connection, owner, _with_ids(items), is_output=False)

    await store.write(work)
    return json_response(made)


async def get_conversation(request: web.Request) -> web.Response:
    """Return a conversation."""
    name = request.match_info["id"]
    found = await stored_responses(request).read(
        lambda reader: _conversation(reader, _find(reader, name))
    )
    return json_response(found)


async def update_conversation(request: web.Request) -> web.Response:
    """Replace the metadata of a conversation."""
    store, name = stored_responses(request), request.match_info["id"]
    call = convert(await read_object(request), UpdateConversationRequest)
    check_metadata(call.metadata)

    def work(connection: sqlite3.Connection, reader: TenantReader) -> ConversationObject:
        owner = _find(reader, name)
        conversation = _conversation(reader, owner)
        conversation.metadata = call.metadata
        tables.set_body(connection, owner, conversation)
        tables.touch(connection, [owner], reader.read_at)
        return conversation

    return json_response(await store.write(work))


async def delete_conversation(request: web.Request) -> web.Response:
    """Remove a conversation with its items."""
    conversation_id = request.match_info["id"]
    await stored_responses(request).delete(ObjectKind.CONVERSATION, conversation_id)
    return json_response(DeletedConversation(conversation_id))


async def list_items(request: web.Request) -> web.Response:
    """List the items of a conversation."""
    store, name = stored_responses(request), request.match_info["id"]
    keys = await store.read(lambda reader: reader.item_keys(_find(reader, name), is_output=False))
    return json_response(await item_page(request, store, keys))


async def add_items(request: web.Request) -> web.Response:
    """Add items to a conversation."""
    store, name = stored_responses(request), request.match_info["id"]
    call = convert(await read_object(request), AddItemsRequest)
    if not call.items:
        raise invalid("items has no items: send at least one", "items")
    items = checked_items(call.items)

    def work(connection: sqlite3.Connection, reader: TenantReader) -> Items:
        owner, new = _find(reader, name), _with_ids(items)
        known = reader.item_keys(owner, is_output=False)
        check_num_items(len(known) + len(new), "items with those of the conversation")
        _check_new({item.id for item in known}, new)
        tables.add_items(connection, owner, new, is_output=False)
        tables.touch(connection, [owner], reader.read_at)
        return new

    added = await store.write(work)
    return json_response(ItemList(added, False, added[0]["id"], added[-1]["id"]))


async def get_item(request: web.Request) -> web.Response:
    """Return an item of a conversation."""
    name, item_id = request.match_info["id"], request.match_info["item_id"]
    item = await stored_responses(request).read(
        lambda reader: reader.item_of(_find(reader, name), item_id)
    )
    if item is None:
        raise _no_item(name, item_id)
    return json_response(item.body)


async def delete_item(request: web.Request) -> web.Response:
    """Remove an item from a conversation."""
    name, item_id = request.match_info["id"], request.match_info["item_id"]

    def work(connection: sqlite3.Connection, reader: TenantReader) -> ConversationObject:
        owner = _find(reader, name)
        if not tables.remove_item(connection, owner, item_id):
            raise _no_item(name, item_id)
        return _conversation(reader, owner)

    return json_response(await stored_responses(request).write(work))


PATH = "/v1/conversations"
CONVERSATION_ENDPOINTS = [
    post(PATH, create_conversation, "Make a conversation",
         CreateConversationRequest, ConversationObject),
    Endpoint(f"{PATH}/{{id}}", get_conversation, "A conversation", ConversationObject),
    post(f"{PATH}/{{id}}", update_conversation, "Replace the metadata of a conversation",
         UpdateConversationRequest, ConversationObject),
    Endpoint(f"{PATH}/{{id}}", delete_conversation, "Remove a conversation", DeletedConversation,
             method="delete"),
    Endpoint(f"{PATH}/{{id}}/items", list_items, "The items of a conversation", ItemList),
    post(f"{PATH}/{{id}}/items", add_items, "Add items to a conversation",
         AddItemsRequest, ItemList),
    Endpoint(f"{PATH}/{{id}}/items/{{item_id}}", get_item, "An item of a conversation",
             dict[str, Any]),
    Endpoint(f"{PATH}/{{id}}/items/{{item_id}}", delete_item, "Remove an item of a conversation",
             ConversationObject, method="delete"),
]  # fmt: skip
