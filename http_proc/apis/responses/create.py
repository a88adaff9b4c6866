"""The handler of POST /v1/responses."""

import functools

import msgspec
from aiohttp import web

from http_proc.apis.responses.background.service import background_of
from http_proc.apis.responses.plan import ResponsePlan, make_plan
from http_proc.apis.responses.saving import Saving, SavingSink
from http_proc.apis.responses.store import Items, ResponseStore, store_of
from http_proc.apis.responses.stream import ResponseStream
from http_proc.caller import current_caller
from http_proc.chat.answers import read_chat, stream_chat
from http_proc.endpoints.request_body import read_object
from http_proc.event_sink import SINK, sink_of
from http_proc.gateway import GATEWAY, REQUEST_ID
from http_proc.observe.request_log import RECORD
from http_proc.responses import json_response, record
from http_proc.resumption import current_resumption
from http_proc.streams.earlier_streams import EARLIER_STREAMS
from http_proc.streams.stream_rows import StreamName

_BEGIN = "response"


class _Begin(msgspec.Struct):
    """What a request decides about its response before it is sent to the ring.

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


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer the items of a conversation with output items."""
    gateway, store = request.app[GATEWAY], store_of(request)
    body = await read_object(request)
    resumption = current_resumption()
    if resumption is not None and _BEGIN in resumption.decisions:
        begin = msgspec.convert(resumption.decisions[_BEGIN], _Begin)
        body = body if begin.given is None else {**body, "input": begin.given}
        plan = await make_plan(gateway, store, body, begin.history)
        return await _answer(request, store, plan, begin)
    plan = await make_plan(gateway, store, body)
    is_kept = plan.fields.store and store.keeps_responses
    if is_kept:
        store.check_size(plan.given)
    head = gateway.head(request, "resp", "_")
    if is_kept or plan.fields.conversation is not None:
        head = head._replace(id=await _new_id(request, store, head.id))
    if plan.fields.background:
        with store.ids.taking(head.id):
            return await background_of(request).create(request, plan, body, head)
    begin = _Begin(head.id, is_kept, plan.given if plan.refers_to_store else None, plan.history)
    if resumption is not None:
        resumption.decide(_BEGIN, msgspec.to_builtins(begin))
    return await _answer(request, store, plan, begin)


async def _new_id(request: web.Request, store: ResponseStore, response_id: str) -> str:
    """Return the id of a response of which anything is kept: no other response has it."""
    if "X-Request-Id" not in request.headers and current_resumption() is None:
        return response_id
    earlier = request.app.get(EARLIER_STREAMS) if current_resumption() is None else None
    name = StreamName(current_caller().owner, request[REQUEST_ID])
    is_taken = earlier is not None and earlier.has(name, request.path)
    return await store.unused_id(response_id, is_taken)


async def _answer(
    request: web.Request, store: ResponseStore, plan: ResponsePlan, begin: _Begin
) -> web.StreamResponse:
    head = request.app[GATEWAY].head(request, "resp", "_")._replace(id=begin.id)
    request[RECORD].id = head.id
    answer = plan.answer(head)
    answer.response.store = begin.is_kept
    saving = Saving(store, answer.response, plan.given, begin.is_kept)
    renderer = ResponseStream(answer, saving.begin if saving.is_needed else None)
    with (
        store.ids.taking(head.id),
        request.app[GATEWAY].open_group(head.id, plan.prepared.names) as group,
    ):
        plan.submit(group)
        if plan.call.stream:
            if saving.is_needed:
                request[SINK] = SavingSink(sink_of(request), saving, renderer)
            return await stream_chat(request, group, plan.prepared, renderer)
        is_rendered = saving.is_needed
        if is_rendered:
            renderer.start(0)
        on_completion = functools.partial(record, request, group)
        async for events, chunk in read_chat(group, plan.prepared, on_completion):
            if is_rendered:
                renderer.render(0, events, chunk)
            else:
                answer.push(events, chunk)
        if is_rendered:
            renderer.finish()
        await saving.done()
    return json_response(answer.response)
