"""The tools of a request: functions, and custom tools as functions of one string."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from http_proc.apis.responses.items import converted
from http_proc.apis.responses.turns import CUSTOM_ARGUMENT
from http_proc.chat.call import ToolChoice, ToolMode
from http_proc.protocol.errors import ApiError, from_ring, invalid
from http_proc.protocol.schema import FunctionSchema, Tool
from quadriga.errors import InvalidRequest
from quadriga.wire.chat_limits import check_num_tools

TYPES = ("function", "custom")


class FunctionToolBody(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormat(msgspec.Struct, kw_only=True):
    """What the input of a custom tool must be: any text, or a text of a grammar."""

    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomToolBody(msgspec.Struct, kw_only=True):
    """A tool whose input is a text."""

    name: str
    description: str | None = None
    format: CustomFormat = msgspec.field(default_factory=CustomFormat)


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The tools of a request.

    Attributes:
        callable: the tools that may be called, as functions; a choice of allowed tools leaves out
            the others.
        custom: names of the custom tools.
        choice: whether and which of them are called.
        echo: the tools as the response shows them.
    """

    callable: list[Tool]
    custom: frozenset[str]
    choice: ToolChoice
    echo: list[dict[str, Any]]


def request_tools(given: list[dict[str, Any]], choice: str | dict[str, Any]) -> RequestTools:
    """Return the tools and the choice of a request. Raise ApiError."""
    try:
        check_num_tools(len(given))
    except InvalidRequest as error:
        raise from_ring(error, {}) from None
    tools, custom, echo = [], set(), []
    for index, tool in enumerate(given):
        name = f"tools[{index}]"
        kind = tool.get("type")
        if kind == "function":
            function = converted(tool, FunctionToolBody, name)
            tools.append(Tool(FunctionSchema(**msgspec.structs.asdict(function))))
            echo.append({"type": kind, **msgspec.structs.asdict(function)})
        elif kind == "custom":
            body = converted(tool, CustomToolBody, name)
            tools.append(_as_function(body, name))
            custom.add(body.name)
            echo.append(tool)
        else:
            raise _unsupported(name, kind)
    names = {kind: {tool["name"] for tool in echo if tool["type"] == kind} for kind in TYPES}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed, mode = _allowed(choice, names)
        tools = [tool for tool in tools if tool.function.name in allowed]
        return RequestTools(tools, frozenset(custom), ToolChoice(mode), echo)
    return RequestTools(tools, frozenset(custom), _choice(choice, names), echo)


def _unsupported(name: str, kind: Any) -> ApiError:
    return invalid(
        f"{name}.type is {kind!r}: this server runs no tools of its own, it takes tools of the"
        " types 'function' and 'custom'; leave this one out",
        f"{name}.type",
    )


def _as_function(tool: CustomToolBody, name: str) -> Tool:
    """Return a function of one string. The model reads its grammar in the description."""
    value: dict[str, Any] = {"type": "string"}
    lines = [tool.description] if tool.description else []
    if tool.format.type == "grammar":
        syntax, definition = tool.format.syntax, tool.format.definition
        if syntax is None or definition is None:
            raise invalid(
                f"{name}.format needs 'syntax' (lark or regex) and 'definition'", f"{name}.format"
            )
        lines.append(f"The input must match this {syntax} grammar:\n{definition}")
        if syntax == "regex":
            value["pattern"] = f"^(?:{definition})$"
    parameters = {
        "type": "object",
        "properties": {CUSTOM_ARGUMENT: value},
        "required": [CUSTOM_ARGUMENT],
        "additionalProperties": False,
    }
    return Tool(FunctionSchema(tool.name, "\n\n".join(lines) or None, parameters))


def _choice(choice: str | dict[str, Any], names: dict[str, set[str]]) -> ToolChoice:
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise _wrong_choice()
        return ToolChoice(ToolMode(choice))
    if choice.get("type") not in TYPES:
        raise _wrong_choice()
    return ToolChoice(ToolMode.REQUIRED, _named(choice, "tool_choice", names))


def _allowed(choice: dict[str, Any], names: dict[str, set[str]]) -> tuple[set[str], ToolMode]:
    """Return the names of the allowed tools, and whether one of them must be called."""
    mode, tools = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise invalid(
            "tool_choice of type 'allowed_tools' needs 'mode' (auto or required) and 'tools', a"
            " list of the tools that may be called",
            "tool_choice",
        )
    allowed = {_named(tool, f"tool_choice.tools[{i}]", names) for i, tool in enumerate(tools)}
    return allowed, ToolMode(mode)


def _named(tool: Any, name: str, names: dict[str, set[str]]) -> str:
    """Return the name in {"type", "name"}, which must be a tool of this type."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in TYPES:
        raise invalid(f"{name}.type is {kind!r}: it must be 'function' or 'custom'", name)
    wanted = tool.get("name")
    if not isinstance(wanted, str) or wanted not in names[kind]:
        raise invalid(
            f"{name} names {wanted!r}, which is no tool of type {kind!r} in tools:"
            f" {sorted(names[kind])}",
            name,
        )
    return wanted


def _wrong_choice() -> ApiError:
    return invalid(
        "tool_choice must be 'none', 'auto', 'required', {\"type\": \"function\", \"name\": …},"
        ' {"type": "custom", "name": …} or {"type": "allowed_tools", "mode": …, "tools": […]}',
        "tool_choice",
    )
