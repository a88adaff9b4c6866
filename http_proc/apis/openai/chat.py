"""The handler of POST /v1/chat/completions."""

from typing import Any

import msgspec
from aiohttp import web

from http_proc.apis.openai.answer_form import AnswerForm
from http_proc.apis.openai.chat_stream import ChatStream
from http_proc.apis.openai.tool_fields import tools_and_choice, with_tool_calls
from http_proc.apis.openai.usage import StreamUsage
from http_proc.chat.answers import ChatAnswer, collect_chat, stream_chat
from http_proc.chat.call import ChatCall, ReasoningOptions
from http_proc.chat.prepare import prepare_chat
from http_proc.endpoints.request_body import convert, read_object
from http_proc.gateway import GATEWAY, ResponseHead
from http_proc.protocol.chat_messages import chat_prompt, check_counts
from http_proc.protocol.errors import invalid
from http_proc.protocol.logprobs import chat_logprobs, prompt_logprobs
from http_proc.protocol.response_format import with_response_format
from http_proc.protocol.sampling import CHAT, Sampling, check_prompt_logprobs, take_sampling
from http_proc.protocol.schema import (
    ChatBody,
    ChatChoice,
    ChatRequest,
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
    fields = convert(body, ChatRequest, CHAT)
    gateway.check_model(fields.model)
    _check_supported(fields)
    call = _chat_call(fields, with_response_format(sampling, fields))
    prepared = await prepare_chat(gateway, call)
    head = gateway.head(request, "chatcmpl")
    with gateway.open_group(head.id, prepared.names) as group:
        group.submit(call.messages, prepared.params, call.stream, prepared.options)
        if call.stream:
            usage = StreamUsage(fields.stream_options, prepared.params.n)
            renderer = ChatStream(head, usage, AnswerForm.of(fields))
            return await stream_chat(request, group, prepared, renderer)
        answers = await collect_chat(request, group, prepared)
    return json_response(_body(head, answers, AnswerForm.of(fields)))


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
    tools, choice = tools_and_choice(fields)
    is_older = fields.functions is not None
    return ChatCall(
        messages=chat_prompt(with_tool_calls(fields.messages)),
        sampling=Sampling(params, sampling.names),
        tools=tools,
        tool_choice=choice,
        is_parallel=fields.parallel_tool_calls and not is_older,
        reasoning=_reasoning(fields),
        template_args=fields.chat_template_kwargs,
        continues_message=fields.continue_final_message,
        has_generation_prompt=_adds_generation_prompt(fields),
        names={"tools": "functions", "tool_choice": "function_call"} if is_older else {},
        priority=fields.priority,
        stream=fields.stream,
    )


def _reasoning(fields: ChatRequest) -> ReasoningOptions:
    return ReasoningOptions(effort=fields.reasoning_effort, is_parsed=fields.separate_reasoning)


def _adds_generation_prompt(fields: ChatRequest) -> bool:
    """Return whether the prompt ends with the beginning of a turn. Raise ApiError."""
    if fields.continue_final_message and fields.add_generation_prompt:
        raise invalid(
            "continue_final_message and add_generation_prompt are both true: the answer either"
            " continues the last message or begins a new one; leave one out",
            "add_generation_prompt",
        )
    return not fields.continue_final_message and fields.add_generation_prompt is not False


def _body(head: ResponseHead, answers: list[ChatAnswer], form: AnswerForm) -> ChatBody:
    choices = []
    for index, answer in enumerate(answers):
        completion = answer.completion
        choices.append(
            ChatChoice(
                index,
                form.message(answer.parsed),
                form.finish_reason(answer.finish_reason),
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
