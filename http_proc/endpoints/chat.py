"""POST /v1/chat/completions."""

from typing import Any

import msgspec
from aiohttp import web

from http_proc.endpoints.chat_stream import ChatStream
from http_proc.endpoints.request_body import convert, read_object
from http_proc.endpoints.usage import UsageInStream
from http_proc.gateway import GATEWAY, Gateway, Head
from http_proc.protocol.chat_messages import NAMES, chat_options, chat_prompt, check_counts
from http_proc.protocol.errors import invalid
from http_proc.protocol.logprobs import chat_logprobs, prompt_logprobs
from http_proc.protocol.sampling import CHAT, check_prompt_logprobs, take_sampling
from http_proc.protocol.schema import (
    AnswerMessage,
    ChatBody,
    ChatChoice,
    ChatRequest,
    ToolCall,
    usage_body,
)
from http_proc.protocol.structured import take_calls, take_formats
from http_proc.protocol.tool_calls import make_parser
from http_proc.streaming.streams import stream, whole
from quadriga.client.async_client import RequestOptions
from quadriga.client.types import Completion
from quadriga.sampling.params import SamplingParams


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat n times."""
    gateway = request.app[GATEWAY]
    body = await read_object(request)
    check_counts(body)
    sampling = take_sampling(body, CHAT, {})
    call = convert(body, ChatRequest)
    gateway.check_model(call.model)
    _check_supported(call)
    facts = await gateway.facts()
    _check_template(gateway, facts)
    sampling = take_formats(sampling, call)
    sampling, tool_format = take_calls(sampling, call, facts["tool_format"])
    params, fill = _params(sampling.params, call, facts)
    prompt, chat = chat_prompt(call.messages), chat_options(call)
    options: RequestOptions = {
        "priority": call.priority,
        "chat": chat,
        "clamp_max_new_tokens": fill,
    }
    head = gateway.head(request, "chatcmpl")
    names = {**NAMES, **sampling.names}
    with gateway.batch(head.id, names) as batch:
        batch.submit(prompt, params, call.stream, options)
        if call.stream:
            usage = UsageInStream(call.stream_options, params.n)
            await usage.count_prompts(gateway.ring, [prompt], chat)
            renderer = ChatStream(head, usage, tool_format, call.parallel_tool_calls)
            return await stream(request, batch, renderer, names)
        answers = await whole(request, batch)
    found = _body(head, call, tool_format, answers)
    return web.Response(body=msgspec.json.encode(found), content_type="application/json")


def _check_supported(call: ChatRequest) -> None:
    check_prompt_logprobs(call)
    if call.top_logprobs and not call.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    if call.modalities not in (None, ["text"]):
        raise invalid("modalities must be ['text']", "modalities")


def _check_template(gateway: Gateway, facts: dict[str, Any]) -> None:
    if not facts["chat"]:
        raise invalid(
            f"{gateway.model} has no chat template, it is a base model: send a plain prompt to"
            " /v1/completions",
            "messages",
            "no_chat_template",
        )


def _params(
    params: SamplingParams, call: ChatRequest, facts: dict[str, Any]
) -> tuple[SamplingParams, bool]:
    """The parameters, and whether they may be cut to what the context leaves.

    An answer without a limit may fill the context. Where special tokens mark tool calls, they must
    be seen.
    """
    fill = params.max_new_tokens is None
    if call.logprobs:
        params = msgspec.structs.replace(params, logprobs=call.top_logprobs)
    if call.prompt_logprobs is not None:
        params = msgspec.structs.replace(params, prompt_logprobs=call.prompt_logprobs)
    if fill:
        params = msgspec.structs.replace(params, max_new_tokens=facts["context_length"])
    may_call = call.tools and call.tool_choice != "none"
    if may_call and facts["tool_format"] in ("mistral", "llama3"):
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    return params, fill


def _body(head: Head, call: ChatRequest, tool_format: str, answers: list[Completion]) -> ChatBody:
    choices = []
    for index, answer in enumerate(answers):
        text, calls = _split(answer.text, tool_format)
        if not call.parallel_tool_calls:
            calls = calls[:1]
        called = bool(calls) and answer.finish_reason == "stop"
        choices.append(
            ChatChoice(
                index,
                AnswerMessage(text if text or not calls else None, calls or msgspec.UNSET),
                "tool_calls" if called else answer.finish_reason,
                None if answer.logprobs is None else chat_logprobs(answer.logprobs),
                answer.matched_stop,
            )
        )
    usage = usage_body([answer.usage for answer in answers], len(answers))
    body = ChatBody(head.id, head.created, head.model, choices, usage)
    if (of_prompt := answers[0].prompt_logprobs) is not None:
        body.prompt_logprobs = prompt_logprobs(of_prompt)
    return body


def _split(text: str, tool_format: str) -> tuple[str, list[ToolCall]]:
    """The text and the tool calls of an answer."""
    if not tool_format:
        return text, []
    parser = make_parser(tool_format)
    found = [parser.push(text), parser.finish()]
    return "".join(part.text for part in found), [c for part in found for c in part.calls]
