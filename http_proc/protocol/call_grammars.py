"""Grammars of tool calls: one that must be made, and those in a text that may have some.

How each format is written is told in tool_calls.py, which reads what these let the model write.
"""

import json
from typing import Any

import msgspec

from http_proc.protocol.errors import invalid
from http_proc.protocol.schema import ChatRequest, Tool
from quadriga.sampling.grammar import JSON_OPTIONS

ANY_OBJECT = {"type": "object"}


def forced_call(call: ChatRequest) -> dict[str, Any]:
    """As fields of SamplingParams: one call, {"name", "arguments"}, that obeys its tool. Raises
    ApiError."""
    tools = _forced_tools(call)
    arguments = [tool.function.parameters or ANY_OBJECT for tool in tools]
    return {"json_schema": _any_call(tools, arguments, "arguments")}


def free_calls(call: ChatRequest, tool_format: str) -> dict[str, Any]:
    """As fields of SamplingParams: text with calls in it that obey their tools; those that are not
    strict have any arguments. Raises ApiError."""
    arguments = [
        (tool.function.parameters if tool.function.strict else None) or ANY_OBJECT
        for tool in call.tools
    ]
    formats = {"hermes": _hermes, "mistral": _mistral, "llama3": _llama3}
    return formats[tool_format](call.tools, arguments)


def _hermes(tools: list[Tool], arguments: list[Any]) -> dict[str, Any]:
    trigger, structures = "<tool_call>", []
    for tool, schema in zip(tools, arguments, strict=True):
        name = msgspec.json.encode(tool.function.name).decode()
        begin = f'{trigger}\n{{"name": {name}, "arguments": '
        structures.append({"begin": begin, "schema": schema, "end": "}\n</tool_call>"})
    return {"structural_tag": {"structures": structures, "triggers": [trigger]}}


def _mistral(tools: list[Tool], arguments: list[Any]) -> dict[str, Any]:
    """A list of calls, as older models have it, or a name before its arguments, as newer ones."""
    trigger = "[TOOL_CALLS]"
    one = _any_call(tools, arguments, "arguments")
    definitions = {key: one.pop(key) for key in ("$defs",) if key in one}
    calls = {"type": "array", "items": one, "minItems": 1, **definitions}
    ways = [(f"{trigger}{space}", calls) for space in ("", " ")]
    for tool, schema in zip(tools, arguments, strict=True):
        ways += [(f"{trigger}{tool.function.name}{mark}", schema) for mark in ("", "[ARGS]")]
    structures = [{"begin": begin, "schema": schema, "end": ""} for begin, schema in ways]
    return {"structural_tag": {"structures": structures, "triggers": [trigger]}}


def _llama3(tools: list[Tool], arguments: list[Any]) -> dict[str, Any]:
    """An answer that begins with a brace is calls and nothing else, any other is text."""
    schema = _any_call(tools, arguments, "parameters") | {"x-guidance": JSON_OPTIONS}
    lines = [
        "%llguidance {}",
        "start: TEXT? | SPACE? call (BETWEEN call)*",
        f"call: %json {json.dumps(schema)}",
        r"BETWEEN: /\s*;\s*/",
        r"SPACE: /\s+/",
        r"TEXT: /\s*[^\s{](.|\n)*/",
    ]
    return {"ebnf": "\n".join(lines)}


def _any_call(tools: list[Tool], arguments: list[Any], key: str) -> dict[str, Any]:
    """The schema of an object that calls one of the tools. key: what its arguments are called."""
    definitions: dict[str, Any] = {}
    calls = [
        _call(tool, schema, key, definitions) for tool, schema in zip(tools, arguments, strict=True)
    ]
    return {"anyOf": calls} | ({"$defs": definitions} if definitions else {})


def _call(tool: Tool, arguments: Any, key: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """What the arguments define goes where their references look for it: to the root."""
    arguments = dict(arguments)
    own = arguments.pop("$defs", {})
    if not isinstance(own, dict) or any(definitions.get(k, v) != v for k, v in own.items()):
        raise invalid(
            f"tool {tool.function.name!r} has $defs that are no map, or that another tool defines"
            " otherwise; give them names of their own",
            "tools",
        )
    definitions.update(own)
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _forced_tools(call: ChatRequest) -> list[Tool]:
    if call.tool_choice == "required":
        if not call.tools:
            raise invalid("tool_choice 'required' needs tools", "tool_choice")
        return call.tools
    choice = call.tool_choice if isinstance(call.tool_choice, dict) else {}
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid(
            "tool_choice must be 'none', 'auto', 'required' or"
            ' {"type": "function", "function": {"name": …}}',
            "tool_choice",
        )
    tools = [tool for tool in call.tools if tool.function.name == name]
    if not tools:
        raise invalid(f"tool_choice names {name!r}, which is not among the tools", "tool_choice")
    return tools
