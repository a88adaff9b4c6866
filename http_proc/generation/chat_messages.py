"""Convert OpenAI's messages and tools to the input of a chat template."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from http_proc.core.errors import from_ring, invalid
from http_proc.generation.schema import ContentPart, Message, Tool, ToolCall
from quadriga.client.types import Chat
from quadriga.errors import InvalidRequest
from quadriga.wire.client import (
    ChatOptions,
    check_chat,
    check_chat_options,
    check_num_tools,
    check_num_turns,
)

# The request's name of each field of the ring.
NAMES = {"prompt": "messages", "template_args": "chat_template_kwargs"}
MAX_CONTENT_PARTS = 16_384  # of all messages of a chat


@contextmanager
def _api_errors() -> Iterator[None]:
    """Convert the ring's errors to ApiErrors that use the request's field names."""
    try:
        yield
    except InvalidRequest as error:
        raise from_ring(error, NAMES) from None


@_api_errors()
def check_counts(body: dict[str, Any]) -> None:
    """Raise ApiError for too many messages or tools, before any of them is processed."""
    for name, check in (("messages", check_num_turns), ("tools", check_num_tools)):
        if isinstance(items := body.get(name), list):
            check(len(items))


@_api_errors()
def chat_prompt(messages: list[Message]) -> Chat:
    """Return the messages with one text each. Raises ApiError over a limit or if not text."""
    check_chat(messages)
    contents = [message.content for message in messages]
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    if num_parts > MAX_CONTENT_PARTS:
        raise invalid(
            f"the messages have {num_parts} content parts: at most {MAX_CONTENT_PARTS} are allowed;"
            " join some",
            "messages",
        )
    _check_answers(messages)
    return [_turn(index, message) for index, message in enumerate(messages)]


def _check_answers(messages: list[Message]) -> None:
    """Raise ApiError for the answer of a tool that no earlier message has called."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        called.update(call.id for call in message.tool_calls or ())
        if message.role == "tool" and message.tool_call_id and message.tool_call_id not in called:
            field = f"messages[{index}].tool_call_id"
            raise invalid(
                f"{field} is {message.tool_call_id!r}, and no assistant message before it has a"
                " tool call of this id; send the message with the call, too",
                field,
            )


@_api_errors()
def template_options(tools: list[Tool], arguments: dict[str, Any]) -> ChatOptions:
    """Return tools and variables in the ring's format. Raises ApiError over a limit."""
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
    if reasoning := message.reasoning_content or message.reasoning:
        turn["reasoning_content"] = reasoning
    return turn


def _text(index: int, content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for number, part in enumerate(content):
        if part.type not in ("text", "refusal"):
            field = f"messages[{index}].content[{number}]"
            raise invalid(
                f"{field} is of type {part.type!r}: this server takes only text; leave the part"
                " out, or describe it in text",
                field,
            )
    return "".join(part.text or part.refusal or "" for part in content)


def _call(index: int, call: ToolCall) -> dict[str, Any]:
    """Return a tool call with decoded arguments: clients send JSON, templates take an object."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        field = f"messages[{index}].tool_calls"
        raise invalid(
            f"{field}: the arguments of {call.function.name} are not JSON", field
        ) from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}
