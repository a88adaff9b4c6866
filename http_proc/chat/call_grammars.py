"""Grammars of tool calls: for a call that is forced, and for calls within free text."""

import json
from typing import Any

import msgspec

from http_proc.chat.call import ChatCall
from http_proc.protocol.errors import invalid
from http_proc.protocol.response_format import ANY_OBJECT
from http_proc.protocol.schema import Tool
from quadriga.answer_format import CallFormat, CallStyle
from quadriga.sampling.grammar import JSON_OPTIONS

# A forced call is one JSON object without text around it, whatever the model's own format.
FORCED_CALL = CallFormat(style=CallStyle.JSON)


def forced_call(call: ChatCall) -> dict[str, Any]:
    """Return fields of SamplingParams for one call, {"name", "arguments"}, that obeys its tool."""
    name = call.tool_choice.name
    tools = [tool for tool in call.tools if not name or tool.function.name == name]
    arguments = [tool.function.parameters or ANY_OBJECT for tool in tools]
    return {"json_schema": _any_call(tools, arguments, "arguments", call.name("tools"))}


def strict_calls(call: ChatCall, calls: CallFormat) -> dict[str, Any]:
    """Return fields of SamplingParams for text with calls that obey their tools.

    Calls of tools that are not strict may have any arguments.
    """
    arguments = [
        (tool.function.parameters if tool.function.strict else None) or ANY_OBJECT
        for tool in call.tools
    ]
    if calls.open == "[TOOL_CALLS]":
        return _mistral(call.tools, arguments, call.name("tools"))
    if calls.style is CallStyle.JSON and not (calls.open or calls.call_open):
        return _llama3(call.tools, arguments, call.name("tools"))
    return _hermes(call.tools, arguments)


def _hermes(tools: list[Tool], arguments: list[Any]) -> dict[str, Any]:
    trigger, structures = "<tool_call>", []
    for tool, schema in zip(tools, arguments, strict=True):
        name = msgspec.json.encode(tool.function.name).decode()
        begin = f'{trigger}\n{{"name": {name}, "arguments": '
        structures.append({"begin": begin, "schema": schema, "end": "}\n</tool_call>"})
    return {"structural_tag": {"structures": structures, "triggers": [trigger]}}


def _mistral(tools: list[Tool], arguments: list[Any], field: str) -> dict[str, Any]:
    """Allow a list of calls, as older models write it, or a name and its arguments, as newer."""
    trigger = "[TOOL_CALLS]"
    call = _any_call(tools, arguments, "arguments", field)
    definitions = {key: call.pop(key) for key in ("$defs",) if key in call}
    calls = {"type": "array", "items": call, "minItems": 1, **definitions}
    variants = [(f"{trigger}{space}", calls) for space in ("", " ")]
    for tool, schema in zip(tools, arguments, strict=True):
        variants += [(f"{trigger}{tool.function.name}{mark}", schema) for mark in ("", "[ARGS]")]
    structures = [{"begin": begin, "schema": schema, "end": ""} for begin, schema in variants]
    return {"structural_tag": {"structures": structures, "triggers": [trigger]}}


def _llama3(tools: list[Tool], arguments: list[Any], field: str) -> dict[str, Any]:
    """Allow an answer of calls alone if it begins with a brace, else text."""
    schema = _any_call(tools, arguments, "parameters", field) | {"x-guidance": JSON_OPTIONS}
    lines = [
        "%llguidance {}",
        "start: TEXT? | SPACE? call (BETWEEN call)*",
        f"call: %json {json.dumps(schema)}",
        r"BETWEEN: /\s*;\s*/",
        r"SPACE: /\s+/",
        r"TEXT: /\s*[^\s{](.|\n)*/",
    ]
    return {"ebnf": "\n".join(lines)}


def _any_call(tools: list[Tool], arguments: list[Any], key: str, field: str) -> dict[str, Any]:
    """Return the schema of a call of any of the tools. `key`: the name of its arguments."""
    definitions: dict[str, Any] = {}
    calls = [
        _call(tool, schema, key, definitions, field)
        for tool, schema in zip(tools, arguments, strict=True)
    ]
    return {"anyOf": calls} | ({"$defs": definitions} if definitions else {})


def _call(
    tool: Tool, arguments: Any, key: str, definitions: dict[str, Any], field: str
) -> dict[str, Any]:
    """Return the schema of a call of `tool`.

    Its `$defs` move to `definitions`, for the root of the schema, to which references point.
    """
    arguments = dict(arguments)
    defs = arguments.pop("$defs", {})
    if not isinstance(defs, dict) or any(definitions.get(k, v) != v for k, v in defs.items()):
        raise invalid(
            f"tool {tool.function.name!r} has $defs that are not a map, or that another tool"
            " defines differently; rename them",
            field,
        )
    definitions.update(defs)
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
    }
