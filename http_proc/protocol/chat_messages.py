"""OpenAI's messages as chat templates know them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from http_proc.protocol.errors import from_ring, invalid
from http_proc.protocol.schema import ChatRequest, ContentPart, Message, Tool, ToolCall
from quadriga.client.types import Chat
from quadriga.errors import InvalidRequest
from quadriga.wire.chat_limits import (
    check_chat,
    check_chat_options,
    check_num_tools,
    check_num_turns,
)
from quadriga.wire.messages.public import ChatOptions

NAMES = {"prompt": "messages", "template_args": "chat_template_kwargs"}
"""What the ring's fields are called here."""
MAX_CONTENT_PARTS = 16_384
"""Of all messages of a chat."""


@contextmanager
def _by_names() -> Iterator[None]:
    """Raise the ring's errors of a chat as ApiErrors with the names of the web's fields."""
    try:
        yield
    except InvalidRequest as error:
        raise from_ring(error, NAMES) from None


@_by_names()
def check_counts(body: dict[str, Any]) -> None:
    """Raise ApiError for more messages or tools than a chat may have, before anything is done
    for each of them."""
    for name, check in (("messages", check_num_turns), ("tools", check_num_tools)):
        if isinstance(given := body.get(name), list):
            check(len(given))


@_by_names()
def chat_prompt(messages: list[Message]) -> Chat:
    """Return the messages with their content as one text each. Raises ApiError for what is no
    text, and for a chat over a bound."""
    check_chat(messages)
    num_parts = sum(len(m.content) for m in messages if isinstance(m.content, list))
    if num_parts > MAX_CONTENT_PARTS:
        raise invalid(
            f"the messages have {num_parts} content parts: at most {MAX_CONTENT_PARTS} are allowed;"
            " join some",
            "messages",
        )
    return [_turn(index, message) for index, message in enumerate(messages)]


def chat_options(call: ChatRequest) -> ChatOptions:
    """Return what the template is given beside the messages. Raises ApiError over a bound."""
    tools = call.tools if call.tool_choice != "none" else []
    arguments = dict(call.chat_template_kwargs)
    if call.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", call.reasoning_effort)
    return template_options(tools, arguments)


@_by_names()
def template_options(tools: list[Tool], arguments: dict[str, Any]) -> ChatOptions:
    """Return them as the ring has them. Raises ApiError over a bound."""
    options = ChatOptions(msgspec.to_builtins(tools), arguments)
    check_chat_options(options)
    return options


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
