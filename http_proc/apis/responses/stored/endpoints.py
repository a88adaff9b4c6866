"""The handlers and the table of stored responses."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web

from http_proc.apis.files.pages import page
from http_proc.apis.responses.background.service import BACKGROUND, send_events
from http_proc.apis.responses.schema import ResponseObject
from http_proc.apis.responses.store import RESPONSE_STORE
from http_proc.apis.responses.stored.response_store import StoredResponses
from http_proc.apis.responses.stored.tables import ItemKey, ObjectKind
from http_proc.endpoints.endpoint import Endpoint
from http_proc.protocol.errors import ApiError, invalid
from http_proc.responses import END_OF_EVENT, HEADERS, SERVER_SENT_EVENTS, json_response

DEFAULT_PAGE, LARGEST_PAGE = 20, 100


class ItemList(msgspec.Struct):
    """A page of items."""

    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class DeletedResponse(msgspec.Struct):
    """The response that was removed."""

    id: str
    deleted: bool = True
    object: str = "response"


def stored_responses(request: web.Request) -> StoredResponses:
    """Return the store. Raise a 404, after which clients do not try again, if there is none."""
    store = request.app.get(RESPONSE_STORE)
    if isinstance(store, StoredResponses):
        return store
    raise ApiError(
        404,
        "this server stores no responses: it was started with --no-store, or with"
        " --max-stored-responses 0",
        code="no_data_dir",
    )


async def item_page(request: web.Request, store: StoredResponses, keys: list[ItemKey]) -> ItemList:
    """Return the page of items that the query asks for, or the begin of it that has room.

    Args:
        request: has the query.
        store: has the items.
        keys: those of all items, in order.

    Raises:
        ApiError: the query is wrong, or the store cannot be read.
    """
    found, has_more = page(request, keys[::-1], DEFAULT_PAGE, LARGEST_PAGE)
    items = await store.page(found)
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return ItemList(items, has_more or len(items) < len(found), first, last)


async def get_response(request: web.Request) -> web.StreamResponse:
    """Return a response, or its stream again; both as far as they are."""
    store, response_id = stored_responses(request), request.match_info["id"]
    response = await store.response(response_id)
    run = request.app[BACKGROUND].find(response_id)
    if not _is_true(request, "stream"):
        return json_response(response if run is None else run.response)
    first = _starting_after(request) + 1
    if run is not None:
        return await send_events(request, run, first)
    headers = HEADERS | {"Content-Type": SERVER_SENT_EVENTS.content_type}
    answer = web.StreamResponse(headers=headers)
    async with aclosing(store.events(response_id)) as pieces:
        async for piece in _without_events(pieces, first):
            if not answer.prepared:
                await answer.prepare(request)
            await answer.write(piece)  # waits while the connection's buffer is full
    if not answer.prepared:
        await answer.prepare(request)
    await answer.write_eof()
    return answer


async def _without_events(pieces: AsyncIterator[bytes], count: int) -> AsyncIterator[bytes]:
    """Yield a stream without its first events."""
    data = b""
    async for piece in pieces:
        data += piece
        while count and (end := data.find(END_OF_EVENT)) >= 0:
            data = data[end + len(END_OF_EVENT) :]
            count -= 1
        if not count and data:
            yield data
            data = b""
        data = data[-1:]  # the begin of an event's end


async def delete_response(request: web.Request) -> web.Response:
    """Remove a response, which ends if it is being made."""
    store, response_id = stored_responses(request), request.match_info["id"]
    await store.response(response_id)
    if (run := request.app[BACKGROUND].find(response_id)) is not None:
        await run.cancel()
    await store.delete(ObjectKind.RESPONSE, response_id)
    return json_response(DeletedResponse(response_id))


async def input_items(request: web.Request) -> web.Response:
    """List the items of which a response was made."""
    store = stored_responses(request)
    keys = await store.input_items(request.match_info["id"])
    return json_response(await item_page(request, store, keys))


async def cancel_response(request: web.Request) -> web.Response:
    """End a response in the background, unless it has ended, and return it."""
    store, response_id = stored_responses(request), request.match_info["id"]
    response = await store.response(response_id)
    if not response["background"]:
        raise invalid(
            f"response {response_id!r} has no background: true, so that it ends when its client"
            " disconnects: only others are cancelled",
            "id",
        )
    if (run := request.app[BACKGROUND].find(response_id)) is None:
        return json_response(response)
    await run.cancel()
    return json_response(run.response)


def _is_true(request: web.Request, name: str) -> bool:
    value = request.query.get(name, "false").lower()
    if value not in ("true", "false"):
        raise invalid(f"{name} is {value[:100]!r}: it must be true or false", name)
    return value == "true"


def _starting_after(request: web.Request) -> int:
    text = request.query.get("starting_after")
    if text is None:
        return -1
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise invalid(
            f"starting_after is {text[:100]!r}: it must be the sequence_number of an event, from 0",
            "starting_after",
        )
    return int(text)


STORED_ENDPOINTS = [
    Endpoint("/v1/responses/{id}", get_response, "A stored response", ResponseObject, streams=True),
    Endpoint("/v1/responses/{id}", delete_response, "Remove a stored response", DeletedResponse,
             method="delete"),
    Endpoint("/v1/responses/{id}/input_items", input_items, "The items of which it was made",
             ItemList),
    Endpoint("/v1/responses/{id}/cancel", cancel_response, "End a response in the background",
             ResponseObject, method="post"),
]  # fmt: skip
