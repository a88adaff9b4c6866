"""The handlers of POST /v1/messages and POST /v1/messages/count_tokens."""

from typing import Any

from aiohttp import web

from http_proc.apis.anthropic.answer import MessageBody, MessageUsage, TokenCount, end_of
from http_proc.apis.anthropic.blocks import BlockWriter, whole_blocks
from http_proc.apis.anthropic.chat_call import chat_call, display_of, with_max_tokens
from http_proc.apis.anthropic.request_types import SAMPLING, CountTokensRequest, MessagesRequest
from http_proc.apis.anthropic.stream import MessageStream
from http_proc.caller import current_caller
from http_proc.chat.answers import ChatAnswer, collect_chat, stream_chat
from http_proc.chat.prepare import prepare_chat
from http_proc.endpoints.request_body import convert, read_object
from http_proc.gateway import GATEWAY, ResponseHead
from http_proc.protocol.chat_messages import check_counts
from http_proc.protocol.errors import from_ring
from http_proc.protocol.sampling import Sampling, take_sampling
from http_proc.protocol.timings import timings_body
from http_proc.responses import json_response
from quadriga.client.async_client import RequestOptions
from quadriga.errors import QuadrigaError
from quadriga.sampling.params import SamplingParams


async def messages(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    gateway = request.app[GATEWAY]
    body = await read_object(request)
    check_counts(body)
    sampling = take_sampling(body, SAMPLING, {})
    fields = convert(body, MessagesRequest)
    current_caller().set_user((fields.metadata or {}).get("user_id"))
    gateway.check_model(fields.model)
    call = chat_call(fields, with_max_tokens(sampling, fields.max_tokens))
    prepared = await prepare_chat(gateway, call)
    # Clients such as Claude Code ask for more tokens than the context of many models has.
    options: RequestOptions = {**prepared.options, "clamp_max_new_tokens": True}
    head = gateway.head(request, "msg", "_")
    writer = BlockWriter(display_of(fields.thinking))
    with gateway.open_group(head.id, prepared.names) as group:
        in_chunks = call.stream or prepared.reader.ends_at_repeat
        group.submit(call.messages, prepared.params, in_chunks, options)
        if call.stream:
            stream = MessageStream(head, writer, fields.max_tokens)
            return await stream_chat(request, group, prepared, stream)
        (answer,) = await collect_chat(request, group, prepared)
    return json_response(_body(head, answer, writer, fields.max_tokens))


async def count_tokens(request: web.Request) -> web.Response:
    """Return the number of tokens of the prompt that a conversation would have."""
    gateway = request.app[GATEWAY]
    body = await read_object(request)
    check_counts(body)
    fields = convert(body, CountTokensRequest)
    gateway.check_model(fields.model)
    call = chat_call(fields, Sampling(SamplingParams(), {}))
    prepared = await prepare_chat(gateway, call)
    prompt: Any = call.messages
    try:
        tokens = await gateway.ring.tokenize(prompt, prepared.options["chat"])
    except QuadrigaError as error:
        raise from_ring(error, prepared.names) from None
    return json_response(TokenCount(len(tokens)))


def _body(
    head: ResponseHead, answer: ChatAnswer, writer: BlockWriter, max_tokens: int
) -> MessageBody:
    completion = answer.completion
    steps = writer.push(answer.events) + writer.finish()
    end = end_of(completion, writer.num_calls, max_tokens)
    return MessageBody(
        id=head.id,
        model=head.model,
        content=whole_blocks(steps),
        stop_reason=end.stop_reason,
        stop_sequence=end.stop_sequence,
        usage=MessageUsage.of(completion.usage),
        timings=timings_body([completion]),
    )
