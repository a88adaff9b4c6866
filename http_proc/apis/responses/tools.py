"""The tools of a request: functions, custom tools as functions of one string, and namespaces."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import msgspec

from http_proc.apis.responses.input import CUSTOM_ARGUMENT, converted, function_name
from http_proc.apis.responses.output import NamedTool
from http_proc.core.errors import ApiError, from_ring, invalid
from http_proc.generation.chat_call import ToolChoice, ToolMode
from http_proc.generation.schema import FunctionSchema, Tool
from quadriga.errors import InvalidRequest
from quadriga.wire.client import check_num_tools

TYPES = ("function", "custom")
# Beginnings of the types that a server would have to run. A client runs all others itself, such as
# tool_search, local_shell and apply_patch, and has functions for what the model needs of them.
SERVER_TYPES = ("web_search", "file_search", "mcp", "code_interpreter", "image_generation")
MAX_TYPE_CHARS = 64


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


class NamespaceBody(msgspec.Struct, kw_only=True):
    """Functions and custom tools under a name, such as those of an MCP server."""

    name: str
    description: str | None = None
    tools: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The tools of a request.

    Attributes:
        callable: the tools that may be called, as functions; a choice of allowed tools leaves out
            the others.
        named: all tools, by the names of these functions.
        choice: whether and which of them are called.
        echo: the tools as the response shows them.
    """

    callable: list[Tool]
    named: dict[str, NamedTool]
    choice: ToolChoice
    echo: list[dict[str, Any]]


def request_tools(
    given: list[dict[str, Any]],
    choice: str | dict[str, Any],
    found: Sequence[tuple[str, dict[str, Any]]] = (),
) -> RequestTools:
    """Return the tools and the choice of a request.

    Args:
        given: the tools of the request.
        choice: the request's `tool_choice`.
        found: the tools of items of the input, each with its name in errors. One that is among
            `given`, or was found before, is there once.

    Raises:
        ApiError: a tool, or the choice, is wrong.
    """
    tools = _Tools()
    for index, tool in enumerate(given):
        tools.add(f"tools[{index}]", tool)
    echo = list(tools.echo)
    for name, tool in found:
        tools.add(name, tool, is_found=True)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed, mode = _allowed(choice, tools.named)
        functions = [tool for tool in tools.functions if tool.function.name in allowed]
        return RequestTools(functions, tools.named, ToolChoice(mode), echo)
    return RequestTools(tools.functions, tools.named, _choice(choice, tools.named), echo)


class _Tools:
    """The tools of a request, while they are read."""

    def __init__(self) -> None:
        self.functions: list[Tool] = []
        self.named: dict[str, NamedTool] = {}
        self.echo: list[dict[str, Any]] = []

    def add(self, name: str, tool: dict[str, Any], is_found: bool = False) -> None:
        """Add a tool of the request, or one that was found. `name`: its name in errors."""
        kind = tool.get("type")
        if kind == "namespace":
            space = converted(tool, NamespaceBody, name)
            introduction = f"{space.name}: {space.description}" if space.description else ""
            for index, inner in enumerate(space.tools):
                path = f"{name}.tools[{index}]"
                if inner.get("type") not in TYPES:
                    raise invalid(f"{path}.type must be one of {', '.join(TYPES)}", f"{path}.type")
                self._add(path, inner, is_found, space.name, introduction)
                introduction = ""
            self.echo.append(tool)
        elif kind in TYPES:
            self._add(name, tool, is_found)
        elif not isinstance(kind, str) or kind.startswith(SERVER_TYPES):
            raise _unsupported(name, kind)
        else:
            _pass_over(kind[:MAX_TYPE_CHARS])
            self.echo.append(tool)

    def _add(
        self,
        path: str,
        tool: dict[str, Any],
        is_found: bool,
        space: str = "",
        introduction: str = "",
    ) -> None:
        if tool["type"] == "function":
            function = Tool(converted(tool, FunctionSchema, path))
            shown = {"type": "function", **msgspec.structs.asdict(function.function)}
        else:
            custom = converted(tool, CustomToolBody, path)
            function, shown = _as_function(custom, path), tool
        schema = function.function
        named = NamedTool(schema.name, space, tool["type"] == "custom")
        schema.name = function_name(schema.name, space)
        if introduction:
            schema.description = "\n\n".join(filter(None, (introduction, schema.description)))
        if is_found and schema.name in self.named:
            return
        try:
            check_num_tools(len(self.functions) + 1)
        except InvalidRequest as error:
            raise from_ring(error, {}) from None
        self.functions.append(function)
        self.named[schema.name] = named
        if not space:
            self.echo.append(shown)


@lru_cache(maxsize=256)
def _pass_over(kind: str) -> None:
    """Log, once for each type, that tools of this type are not offered to the model."""
    logging.info(
        "tools of the type %r, which a client runs itself, are not offered to the model", kind
    )


def _unsupported(name: str, kind: Any) -> ApiError:
    return invalid(
        f"{name}.type is {kind!r}: this server runs no tools of its own, it takes tools of the"
        " types 'function', 'custom' and 'namespace'; leave this one out",
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


def _choice(choice: str | dict[str, Any], named: dict[str, NamedTool]) -> ToolChoice:
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise _wrong_choice()
        return ToolChoice(ToolMode(choice))
    if choice.get("type") not in TYPES:
        raise _wrong_choice()
    return ToolChoice(ToolMode.REQUIRED, _named(choice, "tool_choice", named))


def _allowed(choice: dict[str, Any], named: dict[str, NamedTool]) -> tuple[set[str], ToolMode]:
    """Return the names of the allowed tools, and whether one of them must be called."""
    mode, tools = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise invalid(
            "tool_choice of type 'allowed_tools' needs 'mode' (auto or required) and 'tools', a"
            " list of the tools that may be called",
            "tool_choice",
        )
    allowed = {_named(tool, f"tool_choice.tools[{i}]", named) for i, tool in enumerate(tools)}
    return allowed, ToolMode(mode)


def _named(tool: Any, path: str, named: dict[str, NamedTool]) -> str:
    """Return the function of {"type", "name", "namespace"?}, which must be a tool of this type."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in TYPES:
        raise invalid(f"{path}.type is {kind!r}: it must be 'function' or 'custom'", path)
    wanted = NamedTool(tool.get("name"), tool.get("namespace") or "", kind == "custom")
    for name, known in named.items():
        if known == wanted:
            return name
    names = sorted(known.name for known in named.values() if known.is_custom == wanted.is_custom)
    raise invalid(
        f"{path} names {wanted.name!r}, which is no tool of type {kind!r} in tools: {names}", path
    )


def _wrong_choice() -> ApiError:
    return invalid(
        "tool_choice must be 'none', 'auto', 'required', {\"type\": \"function\", \"name\": …},"
        ' {"type": "custom", "name": …} or {"type": "allowed_tools", "mode": …, "tools": […]}',
        "tool_choice",
    )
