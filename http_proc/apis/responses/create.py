"""The handler of POST /v1/responses."""

import msgspec
from aiohttp import web

from http_proc.apis.responses.answer import ResponseAnswer, new_response
from http_proc.apis.responses.items import list_items, parse_items
from http_proc.apis.responses.output import ResponseOutput
from http_proc.apis.responses.saving import Saving
from http_proc.apis.responses.schema import (
    LOGPROBS,
    RESPONSES,
    ResponsesRequest,
    conversation_id,
)
from http_proc.apis.responses.store import Items, ResponseStore, store_of
from http_proc.apis.responses.stream import ResponseStream
from http_proc.apis.responses.tools import RequestTools, request_tools
from http_proc.apis.responses.turns import chat_turns
from http_proc.chat.answers import read_chat, stream_chat
from http_proc.chat.call import ChatCall, ReasoningOptions, ToolMode
from http_proc.chat.prepare import PreparedChat, prepare_chat
from http_proc.endpoints.request_body import convert, read_object
from http_proc.gateway import GATEWAY
from http_proc.observe.request_log import RECORD
from http_proc.protocol.errors import invalid
from http_proc.protocol.response_format import ANY_OBJECT, with_grammar
from http_proc.protocol.sampling import Sampling, take_sampling
from http_proc.request_group import RequestGroup
from http_proc.responses import json_response
from quadriga.client.types import Chat
from quadriga.sampling.params import SamplingParams

# The request's name of each field of the ring.
NAMES = {"prompt": "input", "messages": "input"}


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer the items of a conversation with output items."""
    gateway = request.app[GATEWAY]
    body = await read_object(request)
    sampling = take_sampling(body, RESPONSES, {})
    fields = convert(body, ResponsesRequest, RESPONSES)
    gateway.check_model(fields.model)
    _check_supported(fields, sampling.params)
    store = store_of(request)
    history, given = await _stored_items(fields, store), await list_items(fields.input, store)
    tools = request_tools(fields.tools, fields.tool_choice)
    turns = chat_turns(
        fields.instructions, parse_items(history + given, len(history)), len(history)
    )
    call = _chat_call(fields, turns, tools, _sampling(sampling, fields, tools))
    prepared = await prepare_chat(gateway, call)
    is_kept = fields.store and store.keeps_responses
    head = gateway.head(request, "resp", "_")
    if is_kept and "X-Request-Id" in request.headers:
        head = head._replace(id=await store.unused_id(head.id))
        request[RECORD].id = head.id
    response = new_response(head, fields, sampling.params, tools)
    response.store = is_kept
    answer = ResponseAnswer(response, ResponseOutput(head.id, tools.custom))
    saving = Saving(store, response, given, is_kept)
    with gateway.open_group(head.id, prepared.names) as group:
        _submit(group, call, prepared, fields)
        renderer = ResponseStream(answer, saving.begin if saving.is_needed else None)
        if call.stream:
            stream = await stream_chat(request, group, prepared, renderer)
        elif saving.is_needed:
            renderer.start(0)
            async for events, chunk in read_chat(request, group, prepared):
                renderer.render(0, events, chunk)
            renderer.finish()
        else:
            async for events, chunk in read_chat(request, group, prepared):
                answer.push(events, chunk)
    await saving.done()
    return stream if call.stream else json_response(response)


def _check_supported(fields: ResponsesRequest, params: SamplingParams) -> None:
    if params.max_new_tokens == 0:
        raise invalid("max_output_tokens is 0: it must be at least 1", "max_output_tokens")
    if fields.background:
        raise invalid(
            "background is true, and this server keeps no response whose client has left: leave it"
            " out, and read the answer with stream: true",
            "background",
        )
    if fields.conversation is not None and fields.previous_response_id is not None:
        raise invalid(
            "conversation and previous_response_id are given: a response continues one of them",
            "conversation",
        )
    if fields.prompt is not None:
        raise invalid(
            "prompt refers to a stored template, and this server stores none: send its text in"
            " instructions or input",
            "prompt",
        )


async def _stored_items(fields: ResponsesRequest, store: ResponseStore) -> Items:
    """Return the items that come before the request's input. Raise ApiError."""
    if fields.previous_response_id is not None:
        return await store.items_of_response(fields.previous_response_id)
    if fields.conversation is not None:
        return await store.items_of_conversation(conversation_id(fields.conversation))
    return []


def _sampling(sampling: Sampling, fields: ResponsesRequest, tools: RequestTools) -> Sampling:
    """Add the logprobs, and the grammar of the text; an answer that must be a call has no text."""
    if LOGPROBS in fields.include or fields.top_logprobs:
        params = msgspec.structs.replace(sampling.params, logprobs=fields.top_logprobs)
        sampling = Sampling(params, {**sampling.names, "logprobs": "top_logprobs"})
    wanted = fields.text.format
    if wanted is None or wanted.type == "text" or tools.choice.mode is ToolMode.REQUIRED:
        return sampling
    schema = ANY_OBJECT if wanted.type == "json_object" else wanted.schema
    if schema is None:
        raise invalid("text.format.schema is missing: it must be a JSON schema", "text.format")
    return with_grammar(sampling, "text", {"json_schema": schema})


def _chat_call(
    fields: ResponsesRequest, turns: Chat, tools: RequestTools, sampling: Sampling
) -> ChatCall:
    return ChatCall(
        messages=turns,
        sampling=sampling,
        tools=tools.callable,
        tool_choice=tools.choice,
        is_parallel=fields.parallel_tool_calls,
        reasoning=ReasoningOptions(effort=fields.reasoning.effort),
        template_args=fields.chat_template_kwargs,
        priority=fields.priority,
        stream=fields.stream,
        names=NAMES,
    )


def _submit(
    group: RequestGroup, call: ChatCall, prepared: PreparedChat, fields: ResponsesRequest
) -> None:
    """Send the chat to the ring.

    Chunks say which tokens are reasoning and to which text logprobs belong, so that a whole answer
    is read in chunks, too, if it may have either.
    """
    options = prepared.options
    if fields.truncation is not None:
        options = {**options, "truncate_prompt": fields.truncation == "auto"}
    params = prepared.params
    has_logprobs = params.logprobs is not None or bool(params.logprob_token_ids)
    in_chunks = call.stream or has_logprobs or prepared.reader.separates_reasoning
    group.submit(call.messages, params, in_chunks, options)
