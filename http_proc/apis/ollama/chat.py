"""The handler of POST /api/chat."""

from aiohttp import web

from http_proc.apis.ollama.lines import OllamaLines, chat_answer, loaded_answer, whole_answer
from http_proc.apis.ollama.messages import ollama_chat
from http_proc.apis.ollama.models import check_ollama_model
from http_proc.apis.ollama.requests import OllamaChatRequest, OllamaMessage
from http_proc.apis.ollama.sampling import (
    length_options,
    ollama_reasoning,
    ollama_sampling,
    with_known_options,
)
from http_proc.chat.answers import collect_chat, stream_chat
from http_proc.chat.call import ChatCall
from http_proc.chat.prepare import prepare_chat
from http_proc.endpoints.request_body import convert, read_object
from http_proc.gateway import GATEWAY
from http_proc.protocol.chat_messages import check_counts
from http_proc.responses import json_response


async def ollama_chat_answer(request: web.Request) -> web.StreamResponse:
    """Answer a chat, as a stream unless the request says otherwise."""
    gateway = request.app[GATEWAY]
    body = await read_object(request)
    check_counts(body)
    fields = convert(with_known_options(body), OllamaChatRequest)
    check_ollama_model(gateway, fields.model)
    if not fields.messages:
        return json_response(loaded_answer(fields.model, chat_answer))
    info = await gateway.ring_info.static()
    call = ChatCall(
        messages=ollama_chat(fields.messages),
        sampling=ollama_sampling(fields, info["context_length"]),
        tools=fields.tools,
        reasoning=ollama_reasoning(fields, info),
        continues_message=_is_begun(fields.messages[-1]),
        stream=fields.stream,
    )
    prepared = await prepare_chat(gateway, call)
    head = gateway.head(request, "ollama")
    options = prepared.options | length_options(fields)
    with gateway.open_group(head.id, prepared.names) as group:
        group.submit(call.messages, prepared.params, call.stream, options)
        if call.stream:
            lines = OllamaLines(fields.model, chat_answer)
            return await stream_chat(request, group, prepared, lines)
        (answer,) = await collect_chat(request, group, prepared)
    return json_response(whole_answer(fields.model, answer, chat_answer))


def _is_begun(last: OllamaMessage) -> bool:
    """Return whether the last message is the begin of the answer."""
    return last.role == "assistant" and not last.tool_calls
