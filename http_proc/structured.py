"""What response_format and tool_choice ask of the text, as a JSON schema."""

from typing import Any

from http_proc.errors import invalid
from http_proc.schema import ChatRequest, Tool

ANY_OBJECT = {"type": "object"}
FORCED_FORMAT = "llama3"
"""How a forced call is written, whatever the model's own way: one JSON object, nothing around."""


def answer_schema(call: ChatRequest) -> dict[str, Any] | None:
    """The schema of response_format; None where any text will do. Raises ApiError."""
    wanted = call.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ANY_OBJECT
    if wanted.type != "json_schema":
        raise invalid(
            f"response_format.type is {wanted.type!r}: it must be 'text', 'json_object' or"
            " 'json_schema'",
            "response_format",
        )
    schema = (wanted.json_schema or {}).get("schema")
    if not isinstance(schema, dict):
        raise invalid(
            "response_format.json_schema.schema is missing: it must be a JSON schema",
            "response_format",
        )
    return schema


def forced_call_schema(call: ChatRequest) -> dict[str, Any] | None:
    """The schema of a call that must be made, {"name", "arguments"}; None where there may be none.
    Raises ApiError."""
    if call.tool_choice in ("none", "auto"):
        return None
    tools = _forced_tools(call)
    definitions: dict[str, Any] = {}
    schema: dict[str, Any] = {"anyOf": [_call_schema(tool, definitions) for tool in tools]}
    return schema | ({"$defs": definitions} if definitions else {})


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


def _call_schema(tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    """What the parameters define goes where their references look for it: to the root."""
    parameters = dict(tool.function.parameters or ANY_OBJECT)
    own = parameters.pop("$defs", {})
    if not isinstance(own, dict) or any(definitions.get(k, v) != v for k, v in own.items()):
        raise invalid(
            f"tool {tool.function.name!r} has $defs that are no map, or that another tool defines"
            " otherwise; give them names of their own",
            "tools",
        )
    definitions.update(own)
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
