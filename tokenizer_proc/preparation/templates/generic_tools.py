"""Tools for templates without tools: described in the system message, called in a text form."""

import json
from typing import Any

from quadriga.answer_format import CallFormat
from tokenizer_proc.preparation.templates.needs import TemplateNeeds
from tokenizer_proc.preparation.templates.write_calls import write_calls

Message = dict[str, Any]

_EXAMPLES: dict[str, Any] = {
    "string": "text",
    "integer": 1,
    "number": 1.5,
    "boolean": True,
    "array": [],
    "object": {},
    "null": None,
}


def with_tools(
    messages: list[Message],
    tools: list[dict[str, Any]],
    needs: TemplateNeeds,
    form: CallFormat,
) -> list[Message]:
    """Return a chat that describes the tools in its system message.

    If the template takes no system message, the description precedes the first user's content.
    """
    description = describe(tools, form)
    if messages and messages[0]["role"] == "system":
        return [_prepended(messages[0], messages[0]["content"], description), *messages[1:]]
    if needs.takes_system:
        return [{"role": "system", "content": description}, *messages]
    first = next((i for i, turn in enumerate(messages) if turn["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": description}, *messages]
    turn = messages[first]
    return [
        *messages[:first],
        _prepended(turn, description, turn["content"]),
        *messages[first + 1 :],
    ]


def _prepended(turn: Message, first: str, second: str) -> Message:
    return turn | {"content": f"{first}\n\n{second}" if first and second else first or second}


def describe(tools: list[dict[str, Any]], form: CallFormat) -> str:
    """Return the text that describes the tools and the form of a call, with one example."""
    functions = [tool.get("function", tool) for tool in tools]
    schemas = "\n".join(
        json.dumps(_described(function), ensure_ascii=False) for function in functions
    )
    return (
        "You can call functions. They are described by JSON schemas:\n"
        f"<tools>\n{schemas}\n</tools>\n\n"
        "To call a function, answer only with a call in this form:\n"
        f"{write_calls([_example(functions[0])], form)}"
    )


def _described(function: dict[str, Any]) -> dict[str, Any]:
    return {
        key: function[key] for key in ("name", "description", "parameters") if function.get(key)
    }


def _example(function: dict[str, Any]) -> dict[str, Any]:
    """Return a call of a function with a value for each parameter that it requires."""
    schema = function.get("parameters")
    schema = schema if isinstance(schema, dict) else {}
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    names = required if isinstance(required, list) and required else list(properties)[:1]
    arguments = {
        name: _example_value(properties.get(name)) for name in names if isinstance(name, str)
    }
    return {"function": {"name": function.get("name", ""), "arguments": arguments}}


def _example_value(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return _EXAMPLES["string"]
    if isinstance(choices := schema.get("enum"), list) and choices:
        return choices[0]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    return _EXAMPLES.get(kind if isinstance(kind, str) else "", _EXAMPLES["string"])


def write_result(content: str) -> str:
    """Return a tool's answer as the text of a user's turn."""
    return f"<tool_response>\n{content}\n</tool_response>"


def as_text_turns(messages: list[Message], needs: TemplateNeeds, form: CallFormat) -> list[Message]:
    """Return a chat whose calls and answers of tools are text where the template takes no others.

    Turns of one role in a row are joined if the template requires that roles alternate.
    """
    turns: list[Message] = []
    follows_result = False
    for message in messages:
        is_result = message["role"] == "tool" and not needs.takes_results
        turn = message
        if message.get("tool_calls") and not needs.takes_calls:
            turn = _with_calls_as_text(message, form)
        elif is_result:
            turn = {"role": "user", "content": write_result(message["content"])}
        if is_result and follows_result:
            turns[-1] = _joined(turns[-1], turn, "\n")
        elif turns and not needs.takes_repeated_roles and _are_texts_of_one_role(turns[-1], turn):
            turns[-1] = _joined(turns[-1], turn, "\n\n")
        else:
            turns.append(turn)
        follows_result = is_result
    return turns


def _are_texts_of_one_role(first: Message, second: Message) -> bool:
    is_text = not (first.get("tool_calls") or second.get("tool_calls"))
    return is_text and first["role"] == second["role"] and first["role"] in ("user", "assistant")


def _joined(first: Message, second: Message, separator: str) -> Message:
    return first | {"content": f"{first['content']}{separator}{second['content']}"}


def _with_calls_as_text(message: Message, form: CallFormat) -> Message:
    texts = [message["content"], write_calls(message["tool_calls"], form)]
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return plain | {"content": "\n".join(text for text in texts if text)}
