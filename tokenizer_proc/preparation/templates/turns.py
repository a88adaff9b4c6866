"""Convert a chat of the wire to the messages that a template is given."""

import hashlib
import json
import string
from typing import Any

import msgspec

from quadriga.answer_format import CallFormat
from quadriga.wire.messages.from_client import ChatMessage
from tokenizer_proc.preparation.templates.generic_tools import as_text_turns, with_tools
from tokenizer_proc.preparation.templates.needs import TemplateNeeds

SHORT_ID_LENGTH = 9
_SHORT_ID_ALPHABET = string.ascii_letters + string.digits


def template_messages(
    messages: list[ChatMessage],
    tools: list[dict[str, Any]],
    needs: TemplateNeeds,
    form: CallFormat,
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
