"""The handler of POST /v1/chat/completions."""

from typing import Any

import msgspec
from aiohttp import web

from http_proc.endpoints.chat_stream import ChatStream
from http_proc.endpoints.request_body import convert, read_object
from http_proc.endpoints.usage import StreamUsage
from http_proc.gateway import GATEWAY, Gateway, ResponseHead
from http_proc.protocol.chat_messages import NAMES, chat_options, chat_prompt, check_counts
from http_proc.protocol.errors import invalid
from http_proc.protocol.logprobs import chat_logprobs, prompt_logprobs
from http_proc.protocol.sampling import CHAT, check_prompt_logprobs, take_sampling
from http_proc.protocol.schema import AnswerMessage, ChatBody, ChatChoice, ChatRequest, usage_body
from http_proc.protocol.structured import with_response_format, with_tool_calls
from http_proc.protocol.tool_calls import ToolFormat, split_calls
from http_proc.responses import collect, json_response, stream_events
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
    info = await gateway.static_info()
    _check_template(gateway, info)
    model_format = ToolFormat(info["tool_format"]) if info["tool_format"] else None
    sampling = with_response_format(sampling, call)
    sampling, tool_format = with_tool_calls(sampling, call, model_format)
    params = _params(sampling.params, call, model_format)
    prompt, chat = chat_prompt(call.messages), chat_options(call)
    options: RequestOptions = {"priority": call.priority, "chat": chat}
    head = gateway.head(request, "chatcmpl")
    names = {**NAMES, **sampling.names}
    with gateway.open_group(head.id, names) as group:
        group.submit(prompt, params, call.stream, options)
        if call.stream:
            usage = StreamUsage(call.stream_options, params.n)
            await usage.count_prompts(group)
            renderer = ChatStream(head, usage, tool_format, call.parallel_tool_calls)
            return await stream_events(request, group, renderer, names)
        completions = await collect(request, group)
    return json_response(_body(head, call, tool_format, completions))


def _check_supported(call: ChatRequest) -> None:
    check_prompt_logprobs(call)
    if call.top_logprobs and not call.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    if call.modalities not in (None, ["text"]):
        raise invalid("modalities must be ['text']", "modalities")


def _check_template(gateway: Gateway, info: dict[str, Any]) -> None:
    if not info["chat"]:
        raise invalid(
            f"{gateway.model} has no chat template, it is a base model: send a plain prompt to"
            " /v1/completions",
            "messages",
            "no_chat_template",
        )


def _params(
    params: SamplingParams, call: ChatRequest, model_format: ToolFormat | None
) -> SamplingParams:
    """Return the parameters with logprobs.

    Special tokens are kept in the text if they may mark tool calls.
    """
    changes: dict[str, Any] = {}
    if call.logprobs:
        changes["logprobs"] = call.top_logprobs
    if call.prompt_logprobs is not None:
        changes["prompt_logprobs"] = call.prompt_logprobs
    may_call = call.tools and call.tool_choice != "none"
    if may_call and model_format in (ToolFormat.MISTRAL, ToolFormat.LLAMA3):
        changes["skip_special_tokens"] = False
    return msgspec.structs.replace(params, **changes)


def _body(
    head: ResponseHead,
    call: ChatRequest,
    tool_format: ToolFormat | None,
    completions: list[Completion],
) -> ChatBody:
    choices = []
    for index, completion in enumerate(completions):
        text, calls = split_calls(completion.text, tool_format)
        if not call.parallel_tool_calls:
            calls = calls[:1]
        called = bool(calls) and completion.finish_reason == "stop"
        choices.append(
            ChatChoice(
                index,
                AnswerMessage(text if text or not calls else None, calls or msgspec.UNSET),
                "tool_calls" if called else completion.finish_reason,
                None if completion.logprobs is None else chat_logprobs(completion.logprobs),
                completion.matched_stop,
            )
        )
    usage = usage_body([completion.usage for completion in completions], len(completions))
    body = ChatBody(head.id, head.created, head.model, choices, usage)
    if (logprobs := completions[0].prompt_logprobs) is not None:
        body.prompt_logprobs = prompt_logprobs(logprobs)
    return body
