"""A chat request in the gateway's own terms, which every API makes of its body."""

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from http_proc.core.errors import invalid
from http_proc.generation.sampling import Sampling
from http_proc.generation.schema import Tool
from quadriga.client.types import Chat

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
        messages: the turns in the ring's form.
        sampling: parameters, and the request's name of each of them.
        tools: functions that may be called; names are unique.
        is_parallel: the answer may have several calls.
        template_args: further variables of the chat template.
        continues_message: the answer continues the last turn, which is the assistant's.
        has_generation_prompt: the prompt ends with the beginning of the assistant's turn.
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
