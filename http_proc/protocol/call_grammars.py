"""Grammars of tool calls: for a call that is forced, and for calls within free text.

The formats are described in tool_calls.py, which parses what these grammars let a model write.
"""

import json
from typing import Any

import msgspec

from http_proc.protocol.errors import invalid
from http_proc.protocol.schema import ChatRequest, Tool
from http_proc.protocol.tool_calls import ToolFormat
from quadriga.sampling.grammar import JSON_OPTIONS

ANY_OBJECT = {"type": "object"}


def forced_call(call: ChatRequest) -> dict[str, Any]:
    """Return fields of SamplingParams for one call, {"name", "arguments"}, that obeys its tool."""
    tools = _forced_tools(call)
    arguments = [tool.function.parameters or ANY_OBJECT for tool in tools]
    return {"json_schema": _any_call(tools, arguments, "arguments")}


def strict_calls(call: ChatRequest, tool_format: ToolFormat) -> dict[str, Any]:
    """Return fields of SamplingParams for text with calls that obey their tools.

    Calls of tools that are not strict may have any arguments.
    """
    arguments = [
        (tool.function.parameters if tool.function.strict else None) or ANY_OBJECT
        for tool in call.tools
    ]
    formats = {ToolFormat.HERMES: _hermes, ToolFormat.MISTRAL: _mistral, ToolFormat.LLAMA3: _llama3}
    return formats[tool_format](call.tools, arguments)


def _hermes(tools: list[Tool], arguments: list[Any]) -> dict[str, Any]:
    trigger, structures = "<tool_call>", []
    for tool, schema in zip(tools, arguments, strict=True):
        name = msgspec.json.encode(tool.function.name).decode()
        begin = f'{trigger}\n{{"name": {name}, "arguments": '
        structures.append({"begin": begin, "schema": schema, "end": "}\n</tool_call>"})
    return {"structural_tag": {"structures": structures, "triggers": [trigger]}}


def _mistral(tools: list[Tool], arguments: list[Any]) -> dict[str, Any]:
    """Allow a list of calls, as older models write it, or a name and its arguments, as newer."""
    trigger = "[TOOL_CALLS]"
    call = _any_call(tools, arguments, "arguments")
    definitions = {key: call.pop(key) for key in ("$defs",) if key in call}
    calls = {"type": "array", "items": call, "minItems": 1, **definitions}
    variants = [(f"{trigger}{space}", calls) for space in ("", " ")]
    for tool, schema in zip(tools, arguments, strict=True):
        variants += [(f"{trigger}{tool.function.name}{mark}", schema) for mark in ("", "[ARGS]")]
    structures = [{"begin": begin, "schema": schema, "end": ""} for begin, schema in variants]
    return {"structural_tag": {"structures": structures, "triggers": [trigger]}}


def _llama3(tools: list[Tool], arguments: list[Any]) -> dict[str, Any]:
    """Allow an answer of calls alone if it begins with a brace, else text."""
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
    """Return the schema of a call of any of the tools. `key`: the name of its arguments."""
    definitions: dict[str, Any] = {}
    calls = [
        _call(tool, schema, key, definitions) for tool, schema in zip(tools, arguments, strict=True)
    ]
    return {"anyOf": calls} | ({"$defs": definitions} if definitions else {})


def _call(tool: Tool, arguments: Any, key: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call of `tool`.

    Its `$defs` move to `definitions`, for the root of the schema, to which references point.
    """
    arguments = dict(arguments)
    defs = arguments.pop("$defs", {})
    if not isinstance(defs, dict) or any(definitions.get(k, v) != v for k, v in defs.items()):
        raise invalid(
            f"tool {tool.function.name!r} has $defs that are not a map, or that another tool"
            " defines differently; rename them",
            "tools",
        )
    definitions.update(defs)
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
