"""Convert Anthropic's messages and system prompt to the ring's chat.

A turn of the user with results of tools becomes one turn of a tool for each result, and then one
of the user with the text.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from http_proc.apis.anthropic.request_types import ContentBlock, InputMessage
from http_proc.protocol.chat_messages import MAX_CONTENT_PARTS
from http_proc.protocol.errors import ApiError, from_ring, invalid
from quadriga.client.types import Chat
from quadriga.errors import InvalidRequest
from quadriga.wire.chat_limits import check_chat
from quadriga.wire.messages.from_client import ChatMessage

# Claude Code puts it before its system prompt, with a value that differs in each request, so that
# no request would have a cached prefix.
BILLING_HEADER = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n?")

BLOCK_TYPES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


class PlacedBlock(NamedTuple):
    """A block, and its place in the request, such as messages.0.content.1."""

    path: str
    block: ContentBlock


@dataclass(slots=True)
class MergedTurn:
    """Consecutive messages of one role. path: place of the first one in the request."""

    role: str
    path: str
    blocks: list[PlacedBlock] = field(default_factory=list)

    def of_type(self, kind: str) -> list[PlacedBlock]:
        """Return the blocks of a type."""
        return [placed for placed in self.blocks if placed.block.type == kind]

    def text(self, separator: str) -> str:
        """Return the text of all text blocks."""
        texts = (placed.block.text for placed in self.of_type("text"))
        return separator.join(text for text in texts if text)


class RingChat(NamedTuple):
    """A chat in the ring's form. continues_message: the answer continues the last turn."""

    chat: Chat
    continues_message: bool


def read_conversation(messages: list[InputMessage], system: str | list[ContentBlock]) -> RingChat:
    """Return the turns of a request.

    Raises:
        ApiError: a block that is not taken, a tool_result that answers no tool_use, a tool_use
            without its result, or more turns or blocks than are allowed.
    """
    turns = _merged(messages)
    _check_num_blocks(turns)
    converter = _Converter()
    if text := _system_text(system):
        converter.add_system(text)
    for turn in turns:
        match turn.role:
            case "user":
                converter.add_user(turn)
            case "assistant":
                converter.add_assistant(turn)
            case "system":
                converter.add_system(turn.text("\n"))
    converter.check_is_answered()
    _check_limits(converter.chat)
    return RingChat(converter.chat, _continues(turns[-1], converter.chat))


def _merged(messages: list[InputMessage]) -> list[MergedTurn]:
    turns: list[MergedTurn] = []
    for index, message in enumerate(messages):
        path = f"messages.{index}"
        if not turns or turns[-1].role != message.role:
            turns.append(MergedTurn(message.role, path))
        turns[-1].blocks += _blocks(message.role, f"{path}.content", message.content)
    return turns


def _blocks(role: str, path: str, content: str | list[ContentBlock]) -> Iterator[PlacedBlock]:
    """Yield the blocks of a message. Raise ApiError for a type that the role does not have."""
    if isinstance(content, str):
        yield PlacedBlock(path, ContentBlock(type="text", text=content))
        return
    for index, block in enumerate(content):
        place = f"{path}.{index}"
        if block.type not in BLOCK_TYPES[role]:
            raise _not_taken(place, block.type, BLOCK_TYPES[role])
        yield PlacedBlock(place, block)


def _not_taken(path: str, kind: str, taken: tuple[str, ...]) -> ApiError:
    if kind in ("image", "document"):
        return _wrong(path, f"a block of type {kind!r}: this server reads only text; send its text")
    return _wrong(path, f"a block of type {kind!r}: it must be one of {', '.join(taken)} here")


def _wrong(path: str, message: str) -> ApiError:
    return invalid(f"{path}: {message}", path.partition(".")[0])


def _check_num_blocks(turns: list[MergedTurn]) -> None:
    num_blocks = sum(len(turn.blocks) for turn in turns)
    if num_blocks > MAX_CONTENT_PARTS:
        raise invalid(
            f"the messages have {num_blocks} content blocks: at most {MAX_CONTENT_PARTS} are"
            " allowed; join some",
            "messages",
        )


def _check_limits(chat: Chat) -> None:
    try:
        check_chat(msgspec.convert(chat, list[ChatMessage]))
    except InvalidRequest as error:
        raise from_ring(error, {"prompt": "messages"}) from None


def _continues(last: MergedTurn, chat: Chat) -> bool:
    """Return whether the answer continues the last turn, which is then the assistant's."""
    if last.role != "assistant" or chat[-1]["role"] != "assistant":
        return False
    if not chat[-1]["content"]:
        raise _wrong(last.path, "the assistant's last message is continued: give it text")
    return True


def _system_text(system: str | list[ContentBlock]) -> str:
    texts = [placed.block.text or "" for placed in _blocks("system", "system", system)]
    if texts and (header := BILLING_HEADER.match(texts[0])):
        texts[0] = texts[0][header.end() :]
    return "\n".join(text for text in texts if text)


def _result_text(path: str, block: ContentBlock) -> str:
    content, text = block.content, ""
    if isinstance(content, str):
        text = content
    elif content is not None:
        for index, part in enumerate(content):
            if part.type != "text":
                raise _not_taken(f"{path}.content.{index}", part.type, ("text",))
        text = "\n".join(part.text for part in content if part.text)
    # No chat template has a mark for a failure.
    return f"Error: {text}" if block.is_error else text


class _Converter:
    """Collect the ring's turns, and check that calls and their results belong together."""

    def __init__(self) -> None:
        self.chat: list[dict[str, Any]] = []
        self._open_calls: dict[str, str] = {}  # id -> name of the tool
        self._calls_path = ""

    def add_system(self, text: str) -> None:
        """Append a system prompt; one that follows another is added to it."""
        if self.chat and self.chat[-1]["role"] == "system":
            self.chat[-1]["content"] += f"\n{text}"
        else:
            self.chat.append({"role": "system", "content": text})

    def add_user(self, turn: MergedTurn) -> None:
        """Append the results of tools, and the text."""
        results = turn.of_type("tool_result")
        for placed in results:
            self._add_result(placed)
        self.check_is_answered()
        text = turn.text("\n")
        if text or not results:
            self.chat.append({"role": "user", "content": text})

    def add_assistant(self, turn: MergedTurn) -> None:
        """Append text, reasoning and calls as one turn; a turn without any of them is left out."""
        self.check_is_answered()
        message: dict[str, Any] = {"role": "assistant", "content": turn.text("")}
        thinking = turn.of_type("thinking")
        if reasoning := "".join(placed.block.thinking or "" for placed in thinking):
            message["reasoning_content"] = reasoning
        self._calls_path = turn.path
        if calls := [self._call(placed) for placed in turn.of_type("tool_use")]:
            message["tool_calls"] = calls
        if message["content"] or len(message) > 2:
            self.chat.append(message)

    def check_is_answered(self) -> None:
        """Raise ApiError if a call of the assistant's last turn has no result."""
        if self._open_calls:
            names = ", ".join(map(repr, self._open_calls))
            raise _wrong(
                self._calls_path,
                f"tool_use without tool_result: {names}; the next message must have a tool_result"
                " for each tool_use",
            )

    def _add_result(self, placed: PlacedBlock) -> None:
        path, block = placed
        name = self._open_calls.pop(block.tool_use_id or "", None)
        if name is None:
            raise _wrong(
                f"{path}.tool_use_id",
                f"{block.tool_use_id!r} answers no tool_use of the message before it, or one that"
                " has its result already",
            )
        turn = {"role": "tool", "content": _result_text(path, block), "name": name}
        self.chat.append(turn | {"tool_call_id": block.tool_use_id})

    def _call(self, placed: PlacedBlock) -> dict[str, Any]:
        path, block = placed
        if not block.id or not block.name or block.input is None:
            raise _wrong(path, "a tool_use must have an id, a name and an input")
        if block.id in self._open_calls:
            raise _wrong(f"{path}.id", f"{block.id!r} is the id of another tool_use; rename it")
        self._open_calls[block.id] = block.name
        function = {"name": block.name, "arguments": block.input}
        return {"id": block.id, "type": "function", "function": function}
