"""The handlers and the table of /v1/conversations."""

from typing import Any

from aiohttp import web

from http_proc.apis.conversations.bodies import (
    AddItemsRequest,
    ConversationObject,
    CreateConversationRequest,
    DeletedConversation,
    UpdateConversationRequest,
    checked_items,
)
from http_proc.apis.conversations.conversations import Conversations
from http_proc.apis.responses.stored.endpoints import ItemList, item_page, stored_responses
from http_proc.apis.responses.stored.tables import ObjectKind
from http_proc.endpoints.endpoint import Endpoint, post
from http_proc.endpoints.request_body import convert, read_object
from http_proc.protocol.errors import invalid
from http_proc.protocol.metadata import check_metadata
from http_proc.responses import json_response


async def create_conversation(request: web.Request) -> web.Response:
    """Make a conversation."""
    conversations = _conversations(request)
    call = convert(await read_object(request), CreateConversationRequest)
    check_metadata(call.metadata)
    return json_response(await conversations.create(checked_items(call.items), call.metadata))


async def get_conversation(request: web.Request) -> web.Response:
    """Return a conversation."""
    return json_response(await _conversations(request).get(request.match_info["id"]))


async def update_conversation(request: web.Request) -> web.Response:
    """Replace the metadata of a conversation."""
    conversations = _conversations(request)
    call = convert(await read_object(request), UpdateConversationRequest)
    check_metadata(call.metadata)
    return json_response(await conversations.update(request.match_info["id"], call.metadata))


async def delete_conversation(request: web.Request) -> web.Response:
    """Remove a conversation with its items."""
    conversation_id = request.match_info["id"]
    await stored_responses(request).delete(ObjectKind.CONVERSATION, conversation_id)
    return json_response(DeletedConversation(conversation_id))


async def list_items(request: web.Request) -> web.Response:
    """List the items of a conversation."""
    keys = await _conversations(request).item_keys(request.match_info["id"])
    return json_response(await item_page(request, stored_responses(request), keys))


async def add_items(request: web.Request) -> web.Response:
    """Add items to a conversation."""
    conversations = _conversations(request)
    call = convert(await read_object(request), AddItemsRequest)
    if not call.items:
        raise invalid("items has no items: send at least one", "items")
    added = await conversations.add_items(request.match_info["id"], checked_items(call.items))
    return json_response(ItemList(added, False, added[0]["id"], added[-1]["id"]))


async def get_item(request: web.Request) -> web.Response:
    """Return an item of a conversation."""
    names = request.match_info
    return json_response((await _conversations(request).item(names["id"], names["item_id"])).body)


async def delete_item(request: web.Request) -> web.Response:
    """Remove an item from a conversation."""
    names = request.match_info
    return json_response(await _conversations(request).remove_item(names["id"], names["item_id"]))


def _conversations(request: web.Request) -> Conversations:
    return Conversations(stored_responses(request))


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
