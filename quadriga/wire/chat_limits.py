"""Checks of a chat's size, by the web gateway and the frontend.

Each turn costs work, so that the number of turns is bounded, not only the number of bytes.
"""

from collections.abc import Sequence
from typing import Protocol

from quadriga.errors import InvalidRequest
from quadriga.wire.messages.from_client import (
    MAX_NAME_CHARS,
    MAX_ROLE_CHARS,
    MAX_TEMPLATE_ARGS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    MAX_TURNS,
    ChatOptions,
)


class Turn(Protocol):
    """The checked fields of ChatMessage and of the web gateway's Message."""

    @property
    def role(self) -> str: ...
    @property
    def name(self) -> str | None: ...
    @property
    def tool_calls(self) -> Sequence[object] | None: ...
    @property
    def tool_call_id(self) -> str | None: ...


def check_chat(messages: Sequence[Turn]) -> None:
    """Raise InvalidRequest for a chat without turns or over one of the bounds."""
    if not messages:
        raise _refused("has no turns: a chat needs at least one")
    check_num_turns(len(messages))
    num_tool_calls = 0
    for index, turn in enumerate(messages):
        _check_chars(index, "role", turn.role, MAX_ROLE_CHARS)
        _check_chars(index, "name", turn.name or "", MAX_NAME_CHARS)
        _check_chars(index, "tool_call_id", turn.tool_call_id or "", MAX_NAME_CHARS)
        num_tool_calls += len(turn.tool_calls or ())
    _check_count(num_tool_calls, "tool calls", MAX_TOOL_CALLS, "prompt")


def check_num_turns(num_turns: int) -> None:
    """Raise InvalidRequest for too many turns, before each of them is checked."""
    _check_count(num_turns, "turns", MAX_TURNS, "prompt")


def check_num_tools(num_tools: int) -> None:
    """Raise InvalidRequest for too many tools."""
    _check_count(num_tools, "functions", MAX_TOOLS, "tools")


def check_chat_options(options: ChatOptions) -> None:
    """Raise InvalidRequest for too many tools or template variables."""
    check_num_tools(len(options.tools))
    _check_count(len(options.template_args), "variables", MAX_TEMPLATE_ARGS, "template_args")
    longest = max(map(len, options.template_args), default=0)
    if longest > MAX_NAME_CHARS:
        raise InvalidRequest(
            f"template_args has a name of {longest} characters: at most {MAX_NAME_CHARS} are"
            " allowed; shorten it",
            "template_args",
        )


def _check_chars(index: int, what: str, text: str, most: int) -> None:
    if len(text) > most:
        raise _refused(
            f"has a {what} of {len(text)} characters in turn {index}: at most {most} are allowed;"
            " shorten it"
        )


def _check_count(count: int, what: str, most: int, field: str) -> None:
    if count > most:
        raise InvalidRequest(
            f"{field} has {count} {what}: at most {most} are allowed; leave some out", field
        )


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"prompt {reason}", "prompt")
