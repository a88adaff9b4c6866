"""Adapt chats and tools to what a template takes.

`find_needs` finds by probes what a template needs of the chats that it is given, and
`template_messages` converts a chat of the wire to the messages that the template is given. Where a
template knows no tools, they are described in the system message and called in a text form.
"""

import hashlib
import json
import string
from dataclasses import dataclass
from typing import Any

import msgspec

from quadriga.server.answer_format import CallFormat, CallStyle
from quadriga.wire.client import ChatMessage
from tokenizer_proc.preparation.templates.probes import (
    ARGUMENTS,
    CONTENT,
    KEYS,
    NAMES,
    RESULT,
    TOOLS,
    VALUES,
    Message,
    Prober,
    assistant,
    calls,
    results,
    user,
)

# Find by probes what a template needs of the chats that it is given.

_SYSTEM = "Sysprobe."
_LONG_IDS = ("call_0123456789abcdef", "call_fedcba9876543210")


@dataclass(frozen=True, slots=True)
class TemplateNeeds:
    """What a template takes, and in which form.

    Attributes:
        takes_tools: it writes the tools of a chat into the prompt.
        takes_calls: it writes the calls of an assistant's turn.
        takes_results: it writes the answers of tools.
        takes_system: it writes a system message at the head of a chat.
        takes_developer: it has a form of its own for a message of the developer.
        takes_repeated_roles: it takes several turns of one role in a row.
        arguments_are_text: it wants the arguments of calls as JSON text, and not as an object.
        ids_are_short: it takes ids of calls only if they are 9 letters and digits.
    """

    takes_tools: bool = False
    takes_calls: bool = False
    takes_results: bool = False
    takes_system: bool = True
    takes_developer: bool = False
    takes_repeated_roles: bool = True
    arguments_are_text: bool = False
    ids_are_short: bool = False


def find_needs(prober: Prober) -> TemplateNeeds:
    """Return what a template needs."""
    tools = TOOLS if (takes_tools := _takes_tools(prober)) else None
    as_text = json.dumps(ARGUMENTS)
    objects, texts = (_with_call(prober, arguments, tools) for arguments in (ARGUMENTS, as_text))
    takes_calls = _quality(objects) > 0 or _quality(texts) > 0
    is_text = takes_calls and _quality(texts) > _quality(objects)
    arguments = as_text if is_text else ARGUMENTS
    answered = [user(), _calling(arguments), *results(1), assistant()]
    takes_results = _holds(prober.text(answered, tools), RESULT)
    renamed = json.loads(json.dumps(answered).replace(_call_id(answered), _LONG_IDS[0]))
    system: list[Message] = [{"role": "system", "content": _SYSTEM}, user()]
    return TemplateNeeds(
        takes_tools=takes_tools,
        takes_calls=takes_calls,
        takes_results=takes_results,
        takes_system=_holds(prober.text(system, asks=True), _SYSTEM),
        takes_developer=_takes_developer(prober),
        takes_repeated_roles=_holds(prober.text([user(), user(), assistant()]), CONTENT),
        arguments_are_text=is_text,
        ids_are_short=takes_results and prober.text(renamed, tools) is None,
    )


def _takes_developer(prober: Prober) -> bool:
    """Return whether a developer's message differs from a system message, but for the role."""
    of_developer, of_system = (
        prober.text([{"role": role, "content": _SYSTEM}, user()], asks=True)
        for role in ("developer", "system")
    )
    if of_developer is None or _SYSTEM not in of_developer:
        return False
    return of_developer.replace("developer", "system") != of_system


def _takes_tools(prober: Prober) -> bool:
    system = {"role": "system", "content": _SYSTEM}
    return any(
        _holds(prober.text(chat, TOOLS, asks=True), NAMES[0])
        for chat in ([user()], [system, user()])
    )


def _calling(arguments: object) -> Message:
    return assistant("", tool_calls=calls(arguments, 1))


def _call_id(chat: list[Message]) -> str:
    return str(chat[-2]["tool_call_id"])


def _with_call(prober: Prober, arguments: object, tools: list[Message] | None) -> str | None:
    text = prober.text([user(), _calling(arguments)], tools)
    return text or prober.text([user(), _calling(arguments), *results(1)], tools)


def _holds(text: str | None, word: str) -> bool:
    return text is not None and word in text


def _quality(text: str | None) -> int:
    """Return 2 for arguments as templates should write them, 1 for Python's or escaped, 0: none."""
    if not _holds(text, str(VALUES[0])):
        return 0
    return 1 if _holds(text, f"'{KEYS[0]}': ") or _holds(text, f'\\"{KEYS[0]}\\"') else 2


# Write tool calls as text, in the form in which the model answers.

Function = dict[str, Any]


def write_calls(calls: list[dict[str, Any]], form: CallFormat) -> str:
    """Return calls in OpenAI's form as text.

    Args:
        calls: the calls; the arguments are a map or JSON text.
        form: the marks and the style. HARMONY is written as JSON between its marks.
    """
    functions = [_function(call) for call in calls]
    if form.style is CallStyle.PYTHONIC:
        return form.open + "[" + ", ".join(map(_pythonic, functions)) + "]" + form.close
    bodies = [_write_one(index, function, form) for index, function in enumerate(functions)]
    if form.is_list:
        return f"{form.open}[{', '.join(bodies)}]{form.close}"
    if form.call_open or form.call_close or form.separator:
        return form.open + form.separator.join(bodies) + form.close
    return "\n".join(form.open + body + form.close for body in bodies)


def _function(call: dict[str, Any]) -> Function:
    function = call.get("function")
    function = function if isinstance(function, dict) else call
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}
    is_map = isinstance(arguments, dict)
    return {
        "name": str(function.get("name", "")),
        "arguments": arguments if is_map else {"arguments": arguments},
    }


def _write_one(index: int, function: Function, form: CallFormat) -> str:
    name, arguments = str(function["name"]), function["arguments"]
    if form.style is CallStyle.JSON:
        value = {name: arguments}
        if form.name_key:
            value = {form.name_key: name, form.arguments_key: arguments}
        return form.call_open + _json(value) + form.call_close
    if form.style is CallStyle.TAGGED:
        body = "".join(_tagged(key, value, form) for key, value in arguments.items())
    elif form.style is CallStyle.QUOTED:
        body = _quoted(arguments, form.quote)
    else:
        body = _json(arguments)
    if form.index_open:
        name += f"{form.index_open}{index}"
    return form.call_open + form.name_open + name + form.name_close + body + form.call_close


def _tagged(key: str, value: Any, form: CallFormat) -> str:
    if isinstance(value, str):
        key_close, text = form.string_key_close or form.key_close, value
    else:
        key_close, text = form.key_close, _json(value)
    return form.key_open + key + key_close + text + form.value_close


def _quoted(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        fields = (f"{key}:{_quoted(item, quote)}" for key, item in value.items())
        return "{" + ",".join(fields) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_quoted(item, quote) for item in value) + "]"
    return _json(value)


def _pythonic(function: Function) -> str:
    fields = (f"{key}={value!r}" for key, value in function["arguments"].items())
    return f"{function['name']}({', '.join(fields)})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# Tools for templates without tools: described in the system message, called in a text form.

Turn = dict[str, Any]

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
    messages: list[Turn], tools: list[dict[str, Any]], needs: TemplateNeeds, form: CallFormat
) -> list[Turn]:
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


def _prepended(turn: Turn, first: str, second: str) -> Turn:
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


def as_text_turns(messages: list[Turn], needs: TemplateNeeds, form: CallFormat) -> list[Turn]:
    """Return a chat whose calls and answers of tools are text where the template takes no others.

    Turns of one role in a row are joined if the template requires that roles alternate.
    """
    turns: list[Turn] = []
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


def _are_texts_of_one_role(first: Turn, second: Turn) -> bool:
    is_text = not (first.get("tool_calls") or second.get("tool_calls"))
    return is_text and first["role"] == second["role"] and first["role"] in ("user", "assistant")


def _joined(first: Turn, second: Turn, separator: str) -> Turn:
    return first | {"content": f"{first['content']}{separator}{second['content']}"}


def _with_calls_as_text(message: Turn, form: CallFormat) -> Turn:
    texts = [message["content"], write_calls(message["tool_calls"], form)]
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return plain | {"content": "\n".join(text for text in texts if text)}


# Convert a chat of the wire to the messages that a template is given.

SHORT_ID_LENGTH = 9
_SHORT_ID_ALPHABET = string.ascii_letters + string.digits


def template_messages(
    messages: list[ChatMessage], tools: list[dict[str, Any]], needs: TemplateNeeds, form: CallFormat
) -> list[dict[str, Any]]:
    """Return the messages as the template takes them; tools that it does not take are described.

    Args:
        messages: the chat.
        tools: functions in OpenAI's form.
        needs: what the template takes.
        form: how the model writes calls, for a template that does not write them.
    """
    values = [_as_template_value(message, needs) for message in messages]
    has_calls = any(message.role == "tool" or message.tool_calls for message in messages)
    if has_calls and not (needs.takes_calls and needs.takes_results):
        values = as_text_turns(values, needs, form)
    if tools and not needs.takes_tools:
        values = with_tools(values, tools, needs, form)
    return values


def _as_template_value(message: ChatMessage, needs: TemplateNeeds) -> dict[str, Any]:
    """Return a message as templates know it: role, content, and other fields that are not empty.

    The reasoning has the three names under which templates look for it. A developer's message is
    the system's where the template has no form for it.
    """
    value: dict[str, Any] = {"role": message.role, "content": message.content}
    value |= {k: v for k, v in msgspec.structs.asdict(message).items() if v}
    if message.role == "developer" and not needs.takes_developer:
        value["role"] = "system"
    if message.reasoning_content:
        value |= dict.fromkeys(("reasoning", "thinking"), message.reasoning_content)
    if message.tool_calls:
        value["tool_calls"] = [_call(call, needs) for call in message.tool_calls]
    if message.tool_call_id and needs.ids_are_short:
        value["tool_call_id"] = short_id(message.tool_call_id)
    return value


def _call(call: dict[str, Any], needs: TemplateNeeds) -> dict[str, Any]:
    """Return a call with its arguments and its id in the form that the template takes."""
    value = dict(call)
    if needs.ids_are_short and isinstance(id_ := call.get("id"), str):
        value["id"] = short_id(id_)
    function = call.get("function")
    if isinstance(function, dict) and "arguments" in function:
        value["function"] = function | {"arguments": _arguments(function["arguments"], needs)}
    return value


def _arguments(arguments: Any, needs: TemplateNeeds) -> Any:
    is_text = isinstance(arguments, str)
    if needs.arguments_are_text:
        return arguments if is_text else json.dumps(arguments, ensure_ascii=False)
    if not is_text:
        return arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def short_id(id_: str) -> str:
    """Return an id of 9 letters and digits: the id itself if it is one, else a hash of it."""
    if len(id_) == SHORT_ID_LENGTH and id_.isascii() and id_.isalnum():
        return id_
    number = int.from_bytes(hashlib.sha256(id_.encode()).digest()[:16], "big")
    characters = []
    for _ in range(SHORT_ID_LENGTH):
        number, place = divmod(number, len(_SHORT_ID_ALPHABET))
        characters.append(_SHORT_ID_ALPHABET[place])
    return "".join(characters)
