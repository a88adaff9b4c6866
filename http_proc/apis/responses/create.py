"""The handler of POST /v1/responses."""

import functools

from aiohttp import web

from http_proc.apis.responses.background.service import background_of
from http_proc.apis.responses.plan import ResponsePlan, make_plan
from http_proc.apis.responses.saving import Saving
from http_proc.apis.responses.store import ResponseStore, store_of
from http_proc.apis.responses.stream import ResponseStream
from http_proc.chat.answers import read_chat, stream_chat
from http_proc.endpoints.request_body import read_object
from http_proc.gateway import GATEWAY, ResponseHead
from http_proc.observe.request_log import RECORD
from http_proc.responses import json_response, record
from http_proc.resumption import current_resumption


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer the items of a conversation with output items."""
    gateway, store = request.app[GATEWAY], store_of(request)
    body = await read_object(request)
    plan = await make_plan(gateway, store, body)
    if plan.fields.background:
        background = background_of(request)
        return await background.create(request, plan, body, await _head(request, store))
    is_kept = plan.fields.store and store.keeps_responses
    head = await _head(request, store) if is_kept else gateway.head(request, "resp", "_")
    return await _answer(request, store, plan, head, is_kept)


async def _head(request: web.Request, store: ResponseStore) -> ResponseHead:
    """Return the head of a response that is kept: its id is new."""
    head = request.app[GATEWAY].head(request, "resp", "_")
    if "X-Request-Id" in request.headers or current_resumption() is not None:
        head = head._replace(id=await store.unused_id(head.id))
        request[RECORD].id = head.id
    return head


async def _answer(
    request: web.Request,
    store: ResponseStore,
    plan: ResponsePlan,
    head: ResponseHead,
    is_kept: bool,
) -> web.StreamResponse:
    answer = plan.answer(head)
    answer.response.store = is_kept
    saving = Saving(store, answer.response, plan.given, is_kept)
    renderer = ResponseStream(answer, saving.begin if saving.is_needed else None)
    with request.app[GATEWAY].open_group(head.id, plan.prepared.names) as group:
        plan.submit(group)
        if plan.call.stream:
            stream = await stream_chat(request, group, plan.prepared, renderer)
        else:
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
    return stream if plan.call.stream else json_response(answer.response)
