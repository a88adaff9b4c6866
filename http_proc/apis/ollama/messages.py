"""Convert Ollama's messages to OpenAI's, which the gateway renders."""

import msgspec

from http_proc.answer.events import new_call_id
from http_proc.apis.ollama.requests import OllamaMessage, OllamaToolCall
from http_proc.apis.ollama.sampling import without_images
from http_proc.protocol.chat_messages import chat_prompt
from http_proc.protocol.errors import invalid
from http_proc.protocol.schema import FunctionCall, Message, ToolCall
from quadriga.client.types import Chat


def ollama_chat(messages: list[OllamaMessage]) -> Chat:
    """Return the turns of a chat.

    A tool's answer gets the id of the call that it answers: the one of its tool_call_id, else the
    first open call of its tool_name, else the first open call. Calls without an id get one.

    Raises:
        ApiError: a message has images, or answers no call; or the chat is over a limit.
    """
    open_calls: list[ToolCall] = []
    converted = []
    for index, message in enumerate(messages):
        without_images(message.images, f"messages[{index}].images")
        if message.role == "tool":
            converted.append(_answer(index, message, open_calls))
            continue
        calls = [_call(call) for call in message.tool_calls or []]
        if calls:
            open_calls = list(calls)
        converted.append(
            Message(role=message.role, content=message.content, tool_calls=calls or None)
        )
    turns = chat_prompt(converted)
    for turn, message in zip(turns, messages, strict=True):
        if message.thinking:
            turn["reasoning_content"] = message.thinking
    return turns


def _call(call: OllamaToolCall) -> ToolCall:
    """Return a call with its arguments as JSON text."""
    arguments = msgspec.json.encode(call.function.arguments).decode()
    return ToolCall(call.id or new_call_id(), FunctionCall(call.function.name, arguments))


def _answer(index: int, message: OllamaMessage, open_calls: list[ToolCall]) -> Message:
    """Return the turn of a tool, and remove its call from the open ones."""
    for call in open_calls:
        if message.tool_call_id:
            is_answered = call.id == message.tool_call_id
        else:
            is_answered = message.tool_name in (None, "", call.function.name)
        if is_answered:
            open_calls.remove(call)
            return Message(
                role="tool",
                content=message.content,
                name=call.function.name,
                tool_call_id=call.id,
            )
    names = [call.function.name for call in open_calls]
    raise invalid(
        f"messages[{index}] is the answer of a tool, but answers no call"
        f" (tool_name: {message.tool_name!r}, tool_call_id: {message.tool_call_id!r}); the open"
        f" calls before it are of {names}",
        "messages",
    )
