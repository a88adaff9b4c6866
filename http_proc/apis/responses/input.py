"""The input of a request: its items, typed and checked, the turns that they become, and its tools.

Tools are functions, custom tools as functions of one string, and namespaces of both.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeGuard, TypeVar

import msgspec

from http_proc.apis.responses.store import Items, ResponseStore
from http_proc.core.errors import ApiError, from_server, invalid, shortened
from http_proc.generation.chat_call import ToolChoice, ToolMode
from http_proc.generation.schema import FunctionSchema, Tool
from quadriga.client.types import Chat
from quadriga.errors import InvalidRequest
from quadriga.wire.client import check_num_tools, check_num_turns

_PATH = re.compile(r"\$([\w.\[\]]*)")
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")

T = TypeVar("T", bound=msgspec.Struct)


class ItemPart(msgspec.Struct, kw_only=True):
    """A part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | list[ItemPart]


class InputItem(msgspec.Struct, kw_only=True, tag_field="type"):
    """An item of the input."""

    id: str | None = None


class MessageItem(InputItem, kw_only=True, tag="message"):
    """A turn of the user, of the assistant, or of the system."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ReasoningItem(InputItem, kw_only=True, tag="reasoning"):
    """The reasoning of the assistant before its next item."""

    summary: list[ItemPart] = []
    content: list[ItemPart] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(InputItem, kw_only=True, tag="function_call"):
    """A call of a function, possibly of a namespace. arguments: JSON text."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class FunctionOutputItem(InputItem, kw_only=True, tag="function_call_output"):
    """The output of a function for a call."""

    call_id: str
    output: Content


class CustomCallItem(InputItem, kw_only=True, tag="custom_tool_call"):
    """A call of a custom tool, possibly of a namespace."""

    call_id: str
    name: str
    input: str
    namespace: str | None = None


class CustomOutputItem(InputItem, kw_only=True, tag="custom_tool_call_output"):
    """The output of a custom tool for a call."""

    call_id: str
    output: Content


class AdditionalToolsItem(InputItem, kw_only=True, tag="additional_tools"):
    """Tools that may be called from here on."""

    tools: list[dict[str, Any]]


class ToolSearchCallItem(InputItem, kw_only=True, tag="tool_search_call"):
    """A search for tools. The model is shown all tools at once, and searches for none."""


class ToolSearchOutputItem(InputItem, kw_only=True, tag="tool_search_output"):
    """The tools that a search has found, which may be called from here on."""

    tools: list[dict[str, Any]] = []


CallItem = FunctionCallItem | CustomCallItem
OutputItem = FunctionOutputItem | CustomOutputItem
ToolsItem = AdditionalToolsItem | ToolSearchCallItem | ToolSearchOutputItem
# What becomes a part of the chat.
TurnItem = MessageItem | ReasoningItem | CallItem | OutputItem
AnyItem = TurnItem | ToolsItem

_TYPES: dict[str, type[AnyItem]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CustomOutputItem,
    "additional_tools": AdditionalToolsItem,
    "tool_search_call": ToolSearchCallItem,
    "tool_search_output": ToolSearchOutputItem,
}


async def list_items(given: str | Items, store: ResponseStore) -> Items:
    """Return the input as a list of items, with those that references point to. Raise ApiError."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not given:
        raise invalid("input has no items: send at least one", "input")
    check_num_items(len(given), "input")
    ids = _given_ids(given)
    names = {ids[index]: f"input[{index}]" for index, item in enumerate(given) if _refers(item)}
    found = dict(zip(names, await store.items(names), strict=True))
    return [
        found[ids[index]] if _refers(item) else with_type(item) for index, item in enumerate(given)
    ]


def check_num_items(count: int, name: str) -> None:
    """Raise ApiError for too many items, before each of them is checked."""
    try:
        check_num_turns(count)
    except InvalidRequest as error:
        raise from_server(error, {"prompt": name}) from None


def parse_items(items: Items, num_stored: int = 0) -> list[AnyItem]:
    """Return the items as typed objects.

    Args:
        items: those of the whole conversation.
        num_stored: how many of them come before the request's input, from the store.

    Raises:
        ApiError: an item has a wrong type or field, an id occurs twice, or calls and outputs do not
            belong together.
    """
    names = item_names(len(items), num_stored)
    check_num_items(len(items), "input with the stored conversation")
    parsed = [parse_item(name, item) for name, item in zip(names, items, strict=True)]
    _check_ids(names, parsed)
    _check_calls(names, parsed)
    return parsed


def item_names(count: int, num_stored: int) -> list[str]:
    """Return the names of items in error messages: the request counts only its own."""
    stored = [f"stored_items[{index}]" for index in range(num_stored)]
    return stored + [f"input[{index}]" for index in range(count - num_stored)]


def tools_of(items: list[AnyItem], num_stored: int) -> list[tuple[str, dict[str, Any]]]:
    """Return the tools that items add to those of the request, each with its name in errors."""
    names = item_names(len(items), num_stored)
    return [
        (f"{name}.tools[{index}]", tool)
        for name, item in zip(names, items, strict=True)
        if isinstance(item, AdditionalToolsItem | ToolSearchOutputItem)
        for index, tool in enumerate(item.tools)
    ]


def text_of(content: Content, name: str) -> str:
    """Return the text of a content. `name`: the request's name of the content."""
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            raise invalid(
                f"{name}[{index}].type is {part.type!r}: this server takes only text, as"
                " 'input_text' or 'output_text'",
                f"{name}[{index}].type",
            )
    return "".join(part.text or part.refusal or "" for part in content)


def converted(value: Any, kind: type[T], name: str) -> T:
    """Return a value as a typed object. Raise an ApiError that names its path after `name`."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        text = shortened(str(error))
        path = _PATH.search(text)
        missing = re.search(r"missing required field `(\w*)`", text)
        field = name + (path[1] if path else "")
        if missing is not None:
            raise invalid(f"{field}.{missing[1]} is missing", f"{field}.{missing[1]}") from None
        raise invalid(f"{field}: {text.partition(' - at `')[0]}", field) from None


def _refers(item: dict[str, Any]) -> bool:
    """Return whether an item is a reference to a stored one."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and item.keys() == {"id"})


def _given_ids(given: Items) -> dict[int, str]:
    """Return the ids of an input by the places of their items. Raise ApiError for two of one id."""
    ids: dict[int, str] = {}
    seen: dict[str, str] = {}
    for index, item in enumerate(given):
        if _refers(item) or isinstance(item.get("id"), str):
            ids[index] = str(item.get("id"))
            _check_new_id(seen, ids[index], f"input[{index}]")
    return ids


def with_type(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item whose type is not left out: messages may have none."""
    is_message = item.get("type") is None and "role" in item
    return {**item, "type": "message"} if is_message else item


def parse_item(name: str, item: dict[str, Any]) -> AnyItem:
    """Return an item as a typed object. `name`: the request's name of it. Raise ApiError."""
    kind = item.get("type")
    item_type = _TYPES.get(kind) if isinstance(kind, str) else None
    if item_type is None:
        raise invalid(
            f"{name}.type is {kind!r}: it must be one of {', '.join(_TYPES)}", f"{name}.type"
        )
    return converted(item, item_type, name)


def _check_ids(names: list[str], items: list[AnyItem]) -> None:
    seen: dict[str, str] = {}
    for name, item in zip(names, items, strict=True):
        _check_new_id(seen, item.id or "", name)


def _check_new_id(seen: dict[str, str], item_id: str, name: str) -> None:
    """Note the name of an item by its id, unless that is empty. Raise ApiError if it is known."""
    if item_id and seen.setdefault(item_id, name) != name:
        raise invalid(
            f"{name}.id is {item_id[:100]!r}, which {seen[item_id]} has too: send each item once",
            f"{name}.id",
        )


def _check_calls(names: list[str], items: list[AnyItem]) -> None:
    """Raise ApiError unless each output answers one call before it, and each call has an output."""
    calls: dict[str, int] = {}
    answered: dict[str, int] = {}
    for index, item in enumerate(items):
        name = f"{names[index]}.call_id"
        if isinstance(item, CallItem):
            if item.call_id in calls:
                raise _twice(name, item.call_id, names[calls[item.call_id]])
            calls[item.call_id] = index
        elif isinstance(item, OutputItem):
            if item.call_id in answered:
                raise _twice(name, item.call_id, names[answered[item.call_id]])
            _check_output(name, item, items, calls)
            answered[item.call_id] = index
    for call_id, index in _without(calls, answered):
        raise invalid(
            f"{names[index]} is the call {call_id!r}, and no item has its output: send one with"
            " this call_id",
            "input",
        )


def _check_output(name: str, item: OutputItem, items: list[AnyItem], calls: dict[str, int]) -> None:
    if item.call_id not in calls:
        raise invalid(
            f"{name} is {item.call_id!r}, which is the call_id of no call before it: send the call"
            " too",
            name,
        )
    call = items[calls[item.call_id]]
    if isinstance(call, CustomCallItem) != isinstance(item, CustomOutputItem):
        raise invalid(
            f"{name} is {item.call_id!r}, a call of the other kind: the output of a function_call"
            " is a function_call_output, that of a custom_tool_call a custom_tool_call_output",
            name,
        )


def _without(calls: dict[str, int], answered: dict[str, int]) -> Iterator[tuple[str, int]]:
    return ((call_id, index) for call_id, index in calls.items() if call_id not in answered)


def _twice(name: str, call_id: str, first: str) -> ApiError:
    return invalid(f"{name} is {call_id!r}, which {first} has too: a call has one output", name)


SYSTEM_ROLES = ("system", "developer")
# A custom tool is a function of one string, which has this name.
CUSTOM_ARGUMENT = "input"


@dataclass(slots=True)
class _AssistantTurn:
    """The items of one answer, which follow each other."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def turn(self) -> dict[str, Any]:
        """Return the turn in the server's form."""
        turn: dict[str, Any] = {"role": "assistant", "content": "\n".join(self.texts)}
        if self.reasoning:
            turn["reasoning_content"] = "\n".join(self.reasoning)
        if self.calls:
            turn["tool_calls"] = self.calls
        return turn


def chat_turns(instructions: str | None, items: list[AnyItem], num_stored: int = 0) -> Chat:
    """Return the turns of a chat, whose first `num_stored` items come from the store.

    The instructions and the system's and developer's messages at the head are one system turn. The
    assistant's reasoning, text and calls that follow each other are one turn.
    """
    names = item_names(len(items), num_stored)
    parts = [(name, item) for name, item in zip(names, items, strict=True)
             if not isinstance(item, ToolsItem)]  # fmt: skip
    head: list[str] = [instructions] if instructions else []
    num_head = 0
    for name, item in parts:
        if not isinstance(item, MessageItem) or item.role not in SYSTEM_ROLES:
            break
        head.append(text_of(item.content, f"{name}.content"))
        num_head += 1
    turns: Chat = [{"role": "system", "content": "\n\n".join(head)}] if head else []
    answer: _AssistantTurn | None = None
    for name, item in parts[num_head:]:
        if _is_others(item):
            turns += [answer.turn()] if answer else []
            turns.append(_turn(name, item))
            answer = None
            continue
        has_ended = answer is not None and answer.texts and not answer.calls
        if answer is None or (has_ended and not isinstance(item, CallItem)):
            turns += [answer.turn()] if answer else []
            answer = _AssistantTurn()
        _add(answer, name, item)
    return turns + ([answer.turn()] if answer else [])


def _is_others(item: TurnItem) -> TypeGuard[MessageItem | OutputItem]:
    """Return whether an item is not the assistant's."""
    if isinstance(item, MessageItem):
        return item.role != "assistant"
    return isinstance(item, OutputItem)


def _add(answer: _AssistantTurn, name: str, item: TurnItem) -> None:
    match item:
        case MessageItem():
            answer.texts.append(text_of(item.content, f"{name}.content"))
        case ReasoningItem():
            answer.reasoning += _reasoning(name, item)
        case CustomCallItem():
            answer.calls.append(_call(item, {CUSTOM_ARGUMENT: item.input}))
        case FunctionCallItem():
            answer.calls.append(_call(item, _arguments(name, item)))


def _reasoning(name: str, item: ReasoningItem) -> list[str]:
    """Return the text of a reasoning, or its summary, if it has one of them."""
    text = text_of(item.content or [], f"{name}.content")
    text = text or text_of(item.summary, f"{name}.summary")
    if not text and item.encrypted_content:
        raise invalid(
            f"{name} has only encrypted_content, which this server neither writes nor reads: send"
            " its content, or leave the item out",
            f"{name}.encrypted_content",
        )
    return [text] if text else []


def _turn(name: str, item: MessageItem | OutputItem) -> dict[str, Any]:
    """Return the turn of a message that is not the assistant's, or of a tool's output."""
    if isinstance(item, MessageItem):
        return {"role": item.role, "content": text_of(item.content, f"{name}.content")}
    output = text_of(item.output, f"{name}.output")
    return {"role": "tool", "content": output, "tool_call_id": item.call_id}


def _call(item: CallItem, arguments: Any) -> dict[str, Any]:
    name = function_name(item.name, item.namespace)
    function = {"name": name, "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def function_name(name: str, namespace: str | None) -> str:
    """Return the name under which the model calls a tool, possibly of a namespace."""
    return f"{namespace}__{name}" if namespace else name


def _arguments(name: str, item: FunctionCallItem) -> Any:
    """Return decoded arguments: clients send JSON text, templates take an object."""
    try:
        return json.loads(item.arguments or "{}")
    except (ValueError, RecursionError):
        raise invalid(
            f"{name}.arguments of {item.name} are not JSON", f"{name}.arguments"
        ) from None


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


class NamedTool(NamedTuple):
    """A tool as calls name it.

    Attributes:
        name: of the tool, in its namespace.
        namespace: name of the namespace; "" for none.
        is_custom: its calls are of the type custom_tool_call, with a text as input.
    """

    name: str
    namespace: str = ""
    is_custom: bool = False

    def call(self, call_id: str) -> dict[str, Any]:
        """Return the fields of a call that name it."""
        named = {"call_id": call_id, "name": self.name}
        return {**named, "namespace": self.namespace} if self.namespace else named


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
            raise from_server(error, {}) from None
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
