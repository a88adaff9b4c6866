"""A chat request in the gateway's own terms, which every API makes of its body.

At the end OpenAI's messages and tools are converted to the input of a chat template.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from http_proc.core.errors import from_server, invalid
from http_proc.generation.sampling import Sampling
from http_proc.generation.schema import ContentPart, Message, Tool, ToolCall
from quadriga.client.types import Chat
from quadriga.errors import InvalidRequest
from quadriga.wire.cache import CacheHint
from quadriga.wire.client import (
    ChatOptions,
    check_chat,
    check_chat_options,
    check_num_tools,
    check_num_turns,
)

_NAME = re.compile(r"[a-zA-Z0-9_-]+")
# Anthropic's limit; names of MCP servers' tools need it in every API.
MAX_TOOL_NAME_CHARS = 128


class ToolMode(Enum):
    """Whether the answer calls tools.

    Attributes:
        NONE: it must not; the model does not see the tools.
        AUTO: it may.
        REQUIRED: it must.
    """

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether and which tools are called. name: the tool that must be called; "" for any."""

    mode: ToolMode = ToolMode.AUTO
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningOptions:
    """How much the model reasons, and whether the answer has it.

    Attributes:
        is_enabled: turns the reasoning on or off; None: the model's default.
        effort: value of the template's variable reasoning_effort; None: the template's default.
        budget: number of tokens after which the reasoning is closed; None: no limit.
        is_parsed: the answer's reasoning is separated from its text.
    """

    is_enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None
    is_parsed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A chat request.

    Attributes:
        messages: the turns in the server's form.
        sampling: parameters, and the request's name of each of them.
        tools: functions that may be called; names are unique.
        is_parallel: the answer may have several calls.
        template_args: further variables of the chat template.
        continues_message: the answer continues the last turn, which is the assistant's.
        has_generation_prompt: the prompt ends with the beginning of the assistant's turn.
        cache_salt: what is cached of the prompt is shared with no chat of another salt.
        cache: how what is computed is kept in the prefix cache; None: as long as there is room.
        names: the request's names of `messages`, `tools` and `tool_choice`, for error messages.
    """

    messages: Chat
    sampling: Sampling
    tools: list[Tool] = field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice()
    is_parallel: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    template_args: dict[str, Any] = field(default_factory=dict)
    continues_message: bool = False
    has_generation_prompt: bool = True
    priority: int = 0
    cache_salt: str = ""
    cache: CacheHint | None = None
    stream: bool = False
    names: dict[str, str] = field(default_factory=dict)

    def name(self, what: str) -> str:
        """Return the request's name of a field of this class."""
        return self.names.get(what, what)

    @property
    def visible_tools(self) -> list[Tool]:
        """Tools that the model sees."""
        return [] if self.tool_choice.mode is ToolMode.NONE else self.tools

    def check_tools(self) -> None:
        """Raise ApiError for wrong names of tools, and for a choice that the tools do not allow."""
        names = [tool.function.name for tool in self.tools]
        for index, name in enumerate(names):
            if not _NAME.fullmatch(name) or len(name) > MAX_TOOL_NAME_CHARS:
                raise invalid(
                    f"{self.name('tools')}[{index}] has the name {name!r}: a name has 1 to"
                    f" {MAX_TOOL_NAME_CHARS} letters, digits, _ and -",
                    f"{self.name('tools')}[{index}]",
                )
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise invalid(
                f"{self.name('tools')} has {twice!r} twice: the name of a tool must be unique",
                self.name("tools"),
            )
        choice, field_name = self.tool_choice, self.name("tool_choice")
        if choice.mode is ToolMode.REQUIRED and not names:
            raise invalid(f"{field_name} requires a call: give {self.name('tools')}", field_name)
        if choice.name and choice.name not in names:
            raise invalid(
                f"{field_name} names {choice.name!r}, which is not among the tools: {names}",
                field_name,
            )


# The request's name of each field of the server.
NAMES = {"prompt": "messages", "template_args": "chat_template_kwargs"}
MAX_CONTENT_PARTS = 16_384  # of all messages of a chat


@contextmanager
def _api_errors() -> Iterator[None]:
    """Convert the server's errors to ApiErrors that use the request's field names."""
    try:
        yield
    except InvalidRequest as error:
        raise from_server(error, NAMES) from None


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
    """Return tools and variables in the server's format. Raises ApiError over a limit."""
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
