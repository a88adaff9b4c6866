"""The handlers of /v1/responses and their table: create, read, cancel and remove a response.

A response is saved before its client sees the end.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from http_proc.apis.responses.answer import ResponseStream
from http_proc.apis.responses.background import BACKGROUND, background_of, send_events
from http_proc.apis.responses.plan import ResponsePlan, make_plan
from http_proc.apis.responses.schema import RESPONSES, ResponseObject, ResponsesRequest
from http_proc.apis.responses.store import (
    RESPONSE_STORE,
    EndedResponse,
    Items,
    ResponseStore,
    store_of,
)
from http_proc.apis.responses.stored_responses import StoredResponses
from http_proc.apis.responses.tables import ItemKey, ObjectKind
from http_proc.core.call import Call
from http_proc.core.caller import current_caller
from http_proc.core.errors import ApiError, invalid
from http_proc.core.gateway import Gateway
from http_proc.core.resumption import current_resumption, decided
from http_proc.core.streaming import END_OF_EVENT, SERVER_SENT_EVENTS, EventSink, Opening
from http_proc.generation.chat_answers import read_chat, stream_chat
from http_proc.web.endpoint import Endpoint, generating, page
from http_proc.web.exchange import (
    GATEWAY,
    ConnectionSink,
    headers_of,
    json_response,
)
from http_proc.web.resumable import EARLIER_STREAMS
from http_proc.web.stream_rows import StreamName


class Saving:
    """The saving of one response.

    Args:
        store: where the response is kept.
        response: it is in its last state when `begin` is called.
        input_items: the items of its own request.
        is_kept: whether it is kept under its id.
    """

    def __init__(
        self, store: ResponseStore, response: ResponseObject, input_items: Items, is_kept: bool
    ) -> None:
        self._store = store
        self._response = response
        self._input_items = input_items
        self._is_kept = is_kept
        self._task: asyncio.Task[bool] | None = None

    @property
    def is_needed(self) -> bool:
        """Whether anything of the response is kept."""
        return self._is_kept or self._response.conversation is not None

    def begin(self, events: bytes) -> None:
        """Hand the response to the store, before requests that its client sends afterwards.

        Args:
            events: its whole stream.
        """
        self._task = asyncio.create_task(self._save(events))

    async def _save(self, events: bytes) -> bool:
        conversation, resumption = self._response.conversation, current_resumption()
        ended = EndedResponse(
            self._response,
            self._input_items,
            self._is_kept,
            None if conversation is None else conversation.id,
            events,
            is_repeat=resumption is not None and resumption.is_resent,
        )
        is_saved: bool = await decided("is_saved", lambda: self._store.save(ended))
        return is_saved

    async def done(self) -> None:
        """Wait until the response is kept, or cannot be: then its field `store` is false.

        The saving goes on if the caller is cancelled.
        """
        if self._task is not None and not await asyncio.shield(self._task):
            self._response.store = False

    async def last_event(self, stream: ResponseStream) -> bytes:
        """Return the last event of a stream, which says whether the response is kept."""
        await self.done()
        return stream.last()


_BEGIN = "response"


class _Begin(msgspec.Struct):
    """What a request decides about its response before it is sent to the server.

    Attributes:
        id: of the response.
        is_kept: the response is kept under its id.
        given: the items of its input; None: they are those of the body.
        history: the items before them.
    """

    id: str
    is_kept: bool
    given: Items | None
    history: Items


async def create_response(gateway: Gateway, call: Call, sink: EventSink) -> ResponseObject | None:
    """Answer the items of a conversation with output items."""
    store = store_of(gateway, call)
    body = await call.parse()
    resumption = call.resumption
    if resumption is not None and _BEGIN in resumption.decisions:
        begin = msgspec.convert(resumption.decisions[_BEGIN], _Begin)
        body = body if begin.given is None else {**body, "input": begin.given}
        plan = await make_plan(gateway, store, body, call.record, begin.history)
        return await _answer(gateway, call, sink, store, plan, begin)
    plan = await make_plan(gateway, store, body, call.record)
    is_kept = plan.fields.store and store.keeps_responses
    if is_kept:
        store.check_size(plan.given)
    head = plan.model.head(call, "resp", "_")
    if is_kept or plan.fields.conversation is not None:
        head = head._replace(id=await _new_id(gateway, call, store, head.id))
    if plan.fields.background:
        with store.ids.taking(head.id):
            response = plan.answer(head).response
            response.store = True
            run = await background_of(gateway, call).create(plan, body, head, response)
            if not plan.call.stream:
                return response
            await send_events(sink, run, 0)
            return None
    begin = _Begin(head.id, is_kept, plan.given if plan.refers_to_store else None, plan.history)
    if resumption is not None:
        resumption.decide(_BEGIN, msgspec.to_builtins(begin))
    return await _answer(gateway, call, sink, store, plan, begin)


def with_stored_items(body: dict[str, Any], decisions: dict[str, Any]) -> dict[str, Any]:
    """Return a body in whose input are the items to which it refers, as the request has found them.

    Args:
        body: of the request; of another API without such references it stays as it is.
        decisions: of the request's stream.
    """
    if _BEGIN not in decisions:
        return body
    begin = msgspec.convert(decisions[_BEGIN], _Begin)
    given = body["input"] if begin.given is None else begin.given
    if isinstance(given, str):
        given = [{"role": "user", "content": given}] if begin.history else given
    references = ("previous_response_id", "conversation")
    rest = {name: value for name, value in body.items() if name not in references}
    return rest | {"input": given if isinstance(given, str) else [*begin.history, *given]}


async def _new_id(gateway: Gateway, call: Call, store: ResponseStore, response_id: str) -> str:
    """Return the id of a response of which anything is kept: no other response has it."""
    if call.resumption is not None:
        return await store.unused_id(response_id)
    if not call.is_named:
        return response_id
    name, earlier = StreamName(current_caller().owner, call.request_id), gateway[EARLIER_STREAMS]
    return await store.unused_id(response_id, earlier.has(name, call.path))


async def _answer(
    gateway: Gateway,
    call: Call,
    sink: EventSink,
    store: ResponseStore,
    plan: ResponsePlan,
    begin: _Begin,
) -> ResponseObject | None:
    head = plan.model.head(call, "resp", "_")._replace(id=begin.id)
    call.record.id = head.id
    answer = plan.answer(head)
    answer.response.store = begin.is_kept
    saving = Saving(store, answer.response, plan.given, begin.is_kept)
    renderer = ResponseStream(answer, saving.begin if saving.is_needed else None)
    with (
        store.ids.taking(head.id),
        gateway.open_group(plan.model, head.id, plan.prepared.names, call.record) as group,
    ):
        plan.submit(group)
        if plan.call.stream:
            last = partial(saving.last_event, renderer) if saving.is_needed else None
            await stream_chat(sink, group, plan.prepared, renderer, last)
            return None
        is_rendered = saving.is_needed
        if is_rendered:
            renderer.start(0)
        async for events, chunk in read_chat(group, plan.prepared):
            if is_rendered:
                renderer.render(0, events, chunk)
            else:
                answer.push(events, chunk)
        if is_rendered:
            renderer.finish()
        await saving.done()
    return answer.response


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
    store = request.app[GATEWAY].get(RESPONSE_STORE)
    if isinstance(store, StoredResponses):
        return store
    raise ApiError(
        404,
        "this server stores no responses: it was started with --no-store",
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
    run = request.app[GATEWAY][BACKGROUND].find(response_id)
    if not _asks_for_stream(request):
        return json_response(response if run is None else run.response)
    first = _starting_after(request) + 1
    if run is not None:
        sink = ConnectionSink(request)
        await send_events(sink, run, first)
        return sink.response
    answer = web.StreamResponse(headers=headers_of(Opening(SERVER_SENT_EVENTS)))
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
    if (run := request.app[GATEWAY][BACKGROUND].find(response_id)) is not None:
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
    if (run := request.app[GATEWAY][BACKGROUND].find(response_id)) is None:
        return json_response(response)
    await run.cancel()
    return json_response(run.response)


def _asks_for_stream(request: web.Request) -> bool:
    value = request.query.get("stream", "false").lower()
    if value not in ("true", "false"):
        raise invalid(f"stream is {value[:100]!r}: it must be true or false", "stream")
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


RESPONSES_ENDPOINTS = [
    generating("/v1/responses", create_response, "Answer a conversation with output items",
               ResponsesRequest, ResponseObject, sampling=RESPONSES, is_resumable=True),
    *STORED_ENDPOINTS,
]  # fmt: skip
