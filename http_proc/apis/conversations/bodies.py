"""Bodies of /v1/conversations, and the checks of what they hold."""

from typing import Any

import msgspec

from http_proc.apis.responses.items import (
    MessageItem,
    OutputItem,
    check_num_items,
    parse_item,
    text_of,
    with_type,
)
from http_proc.apis.responses.store import Items
from http_proc.protocol.schema import RequestBody


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
