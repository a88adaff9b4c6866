"""The handler of POST /render: the prompt that a request would have."""

import msgspec
from aiohttp import web

from http_proc.apis.openai.chat_fields import chat_call
from http_proc.chat.prepare import prepare_chat
from http_proc.endpoints.request_body import convert, read_object
from http_proc.gateway import GATEWAY
from http_proc.protocol.chat_messages import check_counts
from http_proc.protocol.errors import from_ring, invalid
from http_proc.protocol.sampling import CHAT, take_sampling
from http_proc.protocol.schema import ChatRequest, Message
from http_proc.responses import json_response
from quadriga.client.types import RenderedPrompt
from quadriga.errors import QuadrigaError


class RenderRequest(ChatRequest):
    """POST /render. prompt: a text; or messages, and the other fields of a chat."""

    prompt: str | None = None
    messages: list[Message] = msgspec.field(default_factory=list)


class RenderAnswer(msgspec.Struct):
    """A prompt: its text, its token ids, and their number."""

    prompt: str
    tokens: list[int]
    count: int


async def render(request: web.Request) -> web.Response:
    """Return the text and the token ids that a text or a chat would have as a prompt."""
    gateway = request.app[GATEWAY]
    body = await read_object(request)
    check_counts(body)
    sampling = take_sampling(body, CHAT, {})
    fields = convert(body, RenderRequest, CHAT)
    gateway.check_model(fields.model)
    if (fields.prompt is None) == (not fields.messages):
        raise invalid("give either prompt or messages", "prompt")
    names = {"prompt": "prompt"}
    try:
        if fields.prompt is not None:
            rendered = await gateway.ring.render(fields.prompt)
        else:
            call = chat_call(fields, sampling)
            prepared = await prepare_chat(gateway, call)
            names = dict(prepared.names)
            rendered = await gateway.ring.render(call.messages, prepared.options["chat"])
    except QuadrigaError as error:
        raise from_ring(error, names) from None
    return json_response(_answer(rendered))


def _answer(rendered: RenderedPrompt) -> RenderAnswer:
    return RenderAnswer(rendered.text, rendered.token_ids, len(rendered.token_ids))
