"""Convert the items of a request's input to the turns of a chat."""

import json
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from http_proc.apis.responses.items import (
    AnyItem,
    CallItem,
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ToolsItem,
    TurnItem,
    item_names,
    text_of,
)
from http_proc.protocol.errors import invalid
from quadriga.client.types import Chat

SYSTEM_ROLES = ("system", "developer")
# A custom tool is a function of one string, which has this name.
CUSTOM_ARGUMENT = "input"


@dataclass(slots=True)
class _AssistantTurn:
    """The items of one answer, which follow each other."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ends_with_text(self) -> bool:
        """True if the answer has its text and calls no tool."""
        return bool(self.texts) and not self.calls

    def turn(self) -> dict[str, Any]:
        """Return the turn in the ring's form."""
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
        if not _is_system(item):
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
        if answer is None or (answer.ends_with_text and not isinstance(item, CallItem)):
            turns += [answer.turn()] if answer else []
            answer = _AssistantTurn()
        _add(answer, name, item)
    return turns + ([answer.turn()] if answer else [])


def _is_system(item: TurnItem) -> TypeGuard[MessageItem]:
    return isinstance(item, MessageItem) and item.role in SYSTEM_ROLES


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
