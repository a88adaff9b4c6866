"""The handlers and the table of stored responses."""

from typing import Any

import msgspec
from aiohttp import web

from http_proc.apis.files.pages import page
from http_proc.apis.responses.background.service import BACKGROUND, send_events
from http_proc.apis.responses.schema import ResponseObject
from http_proc.apis.responses.store import RESPONSE_STORE
from http_proc.apis.responses.stored.response_store import StoredResponses
from http_proc.apis.responses.stored.tables import ObjectKind, StoredItem
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


def item_page(request: web.Request, items: list[StoredItem]) -> ItemList:
    """Return the page that the query asks for of items in order. Raise ApiError."""
    found, has_more = page(request, items[::-1], DEFAULT_PAGE, LARGEST_PAGE)
    first, last = (found[0].id, found[-1].id) if found else (None, None)
    return ItemList([item.body for item in found], has_more, first, last)


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
    events = (await store.events(response_id)).split(END_OF_EVENT)[first:]
    headers = HEADERS | {"Content-Type": SERVER_SENT_EVENTS.content_type}
    return web.Response(body=END_OF_EVENT.join(events), headers=headers)


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
    items = await stored_responses(request).input_items(request.match_info["id"])
    return json_response(item_page(request, items))


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
