"""POST /v1/chat/completions."""

from typing import Any

import msgspec
from aiohttp import web

from http_proc.bodies import convert, read_object
from http_proc.chat_messages import chat_options, chat_prompt
from http_proc.chat_stream import ChatStream
from http_proc.errors import invalid
from http_proc.gateway import GATEWAY, Gateway, Head
from http_proc.logprobs import chat_logprobs
from http_proc.sampling import CHAT, Sampling, take_sampling
from http_proc.schema import AnswerMessage, ChatBody, ChatChoice, ChatRequest, ToolCall, usage_body
from http_proc.streams import stream, whole
from http_proc.structured import FORCED_FORMAT, answer_schema, forced_call_schema
from http_proc.tool_calls import make_parser
from http_proc.usage import UsageInStream
from quadriga.async_client import RequestOptions
from quadriga.completion import Completion
from quadriga.sampling import SamplingParams

NAMES = {"prompt": "messages"}
"""What the ring's fields are called here, beside the sampling fields."""


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat n times."""
    gateway = request.app[GATEWAY]
    body = await read_object(request)
    sampling = take_sampling(body, CHAT, {})
    call = convert(body, ChatRequest)
    gateway.check_model(call.model)
    _check_supported(call)
    sampling, forced = _take_schema(sampling, call)
    facts = await gateway.facts()
    _check_template(gateway, facts)
    tool_format = str(facts["tool_format"]) if _may_call(call) else ""
    params, fill = _params(sampling.params, call, facts, tool_format)
    if forced is not None:
        tool_format = FORCED_FORMAT
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


def _take_schema(sampling: Sampling, call: ChatRequest) -> tuple[Sampling, dict[str, Any] | None]:
    """With what response_format or a forced call asks of the text, and the latter by itself."""
    schema, forced = answer_schema(call), forced_call_schema(call)
    if schema is not None and forced is not None:
        raise invalid(
            "response_format asks for text where tool_choice forces a call", "tool_choice"
        )
    name = "response_format" if forced is None else "tools"
    schema = forced if schema is None else schema
    if schema is None:
        return sampling, None
    if sampling.params.json_schema is not None:
        raise invalid(f"json_schema and {name} are both given: leave one of them out", name)
    params = msgspec.structs.replace(sampling.params, json_schema=schema)
    return Sampling(params, {**sampling.names, "json_schema": name}), forced


def _check_supported(call: ChatRequest) -> None:
    if call.top_logprobs and not call.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    if call.tool_choice == "auto" and any(tool.function.strict for tool in call.tools):
        raise invalid(
            "strict is supported with tool_choice 'required' or a function's name only; leave it"
            " out",
            "tools",
        )
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


def _may_call(call: ChatRequest) -> bool:
    return bool(call.tools) and call.tool_choice != "none"


def _params(
    params: SamplingParams, call: ChatRequest, facts: dict[str, Any], tool_format: str
) -> tuple[SamplingParams, bool]:
    """The parameters, and whether they may be cut to what the context leaves.

    An answer without a limit may fill the context. Where special tokens mark tool calls, they must
    be seen.
    """
    fill = params.max_new_tokens is None
    if call.logprobs:
        params = msgspec.structs.replace(params, logprobs=call.top_logprobs)
    if fill:
        params = msgspec.structs.replace(params, max_new_tokens=facts["context_length"])
    if tool_format in ("mistral", "llama3"):
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
    return ChatBody(head.id, head.created, head.model, choices, usage)


def _split(text: str, tool_format: str) -> tuple[str, list[ToolCall]]:
    """The text and the tool calls of an answer."""
    if not tool_format:
        return text, []
    parser = make_parser(tool_format)
    found = [parser.push(text), parser.finish()]
    return "".join(part.text for part in found), [c for part in found for c in part.calls]
