"""Convert the body of a chat in OpenAI's format to the gateway's own terms."""

from typing import Any

import msgspec

from http_proc.apis.openai.tool_fields import tools_and_choice, with_tool_calls
from http_proc.chat.call import ChatCall, ReasoningOptions
from http_proc.protocol.chat_messages import chat_prompt
from http_proc.protocol.errors import invalid
from http_proc.protocol.response_format import with_response_format
from http_proc.protocol.sampling import Sampling, check_prompt_logprobs
from http_proc.protocol.schema import ChatRequest


def chat_call(fields: ChatRequest, sampling: Sampling) -> ChatCall:
    """Return the chat for which a request asks. Raise ApiError for a field that is wrong.

    `sampling`: the sampling fields of the request.
    """
    _check_supported(fields)
    sampling = with_response_format(sampling, fields)
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


def _check_supported(fields: ChatRequest) -> None:
    check_prompt_logprobs(fields)
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    if fields.modalities not in (None, ["text"]):
        raise invalid("modalities must be ['text']", "modalities")
