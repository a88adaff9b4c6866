"""The handler of POST /v1/chat/completions."""

from typing import Any

import msgspec
from aiohttp import web

from http_proc.apis.openai.chat_stream import ChatStream
from http_proc.apis.openai.usage import StreamUsage
from http_proc.chat.answers import ChatAnswer, collect_chat, stream_chat
from http_proc.chat.call import ChatCall, ReasoningOptions, ToolChoice, ToolMode
from http_proc.chat.prepare import prepare_chat
from http_proc.endpoints.request_body import convert, read_object
from http_proc.gateway import GATEWAY, ResponseHead
from http_proc.protocol.chat_messages import chat_prompt, check_counts
from http_proc.protocol.errors import invalid
from http_proc.protocol.logprobs import chat_logprobs, prompt_logprobs
from http_proc.protocol.response_format import with_response_format
from http_proc.protocol.sampling import CHAT, Sampling, check_prompt_logprobs, take_sampling
from http_proc.protocol.schema import (
    AnswerMessage,
    ChatBody,
    ChatChoice,
    ChatRequest,
    FunctionCall,
    ToolCall,
    usage_body,
)
from http_proc.protocol.timings import timings_body
from http_proc.responses import json_response


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat n times."""
    gateway = request.app[GATEWAY]
    body = await read_object(request)
    check_counts(body)
    sampling = take_sampling(body, CHAT, {})
    fields = convert(body, ChatRequest)
    gateway.check_model(fields.model)
    _check_supported(fields)
    call = _chat_call(fields, with_response_format(sampling, fields))
    prepared = await prepare_chat(gateway, call)
    head = gateway.head(request, "chatcmpl")
    with gateway.open_group(head.id, prepared.names) as group:
        group.submit(call.messages, prepared.params, call.stream, prepared.options)
        if call.stream:
            usage = StreamUsage(fields.stream_options, prepared.params.n)
            return await stream_chat(request, group, prepared, ChatStream(head, usage))
        answers = await collect_chat(request, group, prepared)
    return json_response(_body(head, answers))


def _check_supported(fields: ChatRequest) -> None:
    check_prompt_logprobs(fields)
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    if fields.modalities not in (None, ["text"]):
        raise invalid("modalities must be ['text']", "modalities")


def _chat_call(fields: ChatRequest, sampling: Sampling) -> ChatCall:
    logprobs: dict[str, Any] = {}
    if fields.logprobs:
        logprobs["logprobs"] = fields.top_logprobs
    if fields.prompt_logprobs is not None:
        logprobs["prompt_logprobs"] = fields.prompt_logprobs
    params = msgspec.structs.replace(sampling.params, **logprobs)
    return ChatCall(
        messages=chat_prompt(fields.messages),
        sampling=Sampling(params, sampling.names),
        tools=fields.tools,
        tool_choice=_tool_choice(fields.tool_choice),
        is_parallel=fields.parallel_tool_calls,
        reasoning=ReasoningOptions(effort=fields.reasoning_effort),
        template_args=fields.chat_template_kwargs,
        priority=fields.priority,
        stream=fields.stream,
    )


def _tool_choice(choice: str | dict[str, Any]) -> ToolChoice:
    """Return the choice: a mode, or a function by name. Raise ApiError."""
    if choice in ("none", "auto", "required"):
        return ToolChoice(ToolMode(choice))
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid(
            "tool_choice must be 'none', 'auto', 'required' or"
            ' {"type": "function", "function": {"name": …}}',
            "tool_choice",
        )
    return ToolChoice(ToolMode.REQUIRED, name)


def _body(head: ResponseHead, answers: list[ChatAnswer]) -> ChatBody:
    choices = []
    for index, answer in enumerate(answers):
        parsed, completion = answer.parsed, answer.completion
        calls = [
            ToolCall(call.id, FunctionCall(call.name, call.arguments)) for call in parsed.calls
        ]
        choices.append(
            ChatChoice(
                index,
                AnswerMessage(parsed.text or (None if calls else ""), calls or msgspec.UNSET),
                answer.finish_reason,
                None if completion.logprobs is None else chat_logprobs(completion.logprobs),
                completion.matched_stop,
            )
        )
    usage = usage_body([answer.completion.usage for answer in answers], len(answers))
    timings = timings_body([answer.completion for answer in answers])
    body = ChatBody(head.id, head.created, head.model, choices, usage, timings)
    if (logprobs := answers[0].completion.prompt_logprobs) is not None:
        body.prompt_logprobs = prompt_logprobs(logprobs)
    return body
