"""OpenAI's messages as chat templates know them."""

import json
from typing import Any

import msgspec

from http_proc.errors import invalid
from http_proc.schema import ChatRequest, ContentPart, Message, ToolCall
from quadriga.completion import Chat
from quadriga.messages.public import ChatOptions


def chat_prompt(messages: list[Message]) -> Chat:
    """The messages with their content as one text each. ApiError for what is no text."""
    return [_turn(index, message) for index, message in enumerate(messages)]


def chat_options(call: ChatRequest) -> ChatOptions:
    """What the template is given beside the messages."""
    tools = call.tools if call.tool_choice != "none" else []
    arguments = dict(call.chat_template_kwargs)
    if call.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", call.reasoning_effort)
    return ChatOptions(msgspec.to_builtins(tools), arguments)


def _turn(index: int, message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": _text(index, message.content)}
    if message.name:
        turn["name"] = message.name
    if message.tool_calls:
        turn["tool_calls"] = [_call(index, call) for call in message.tool_calls]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _text(index: int, content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in ("text", "refusal"):
            raise invalid(
                f"messages[{index}].content has a part of type {part.type!r}: this server takes"
                " only text",
                "messages",
            )
    return "".join(part.text or part.refusal or "" for part in content)


def _call(index: int, call: ToolCall) -> dict[str, Any]:
    """Templates want the arguments as an object, clients send them as JSON text."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        raise invalid(
            f"messages[{index}].tool_calls: the arguments of {call.function.name} are no JSON",
            "messages",
        ) from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}
