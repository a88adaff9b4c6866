"""The output of a response: answer events to items, and to the stream's events about them.

First the input of custom tools, which is read out of the arguments of a call while they arrive,
then the kinds of items, then the output as a whole.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from http_proc.answer.events import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    ReasoningDelta,
    TextDelta,
)
from http_proc.apis.responses.input import CUSTOM_ARGUMENT, NamedTool
from http_proc.generation.logprobs import chat_logprobs
from quadriga.client.types import TokenLogprob

_HEAD = re.compile(r'\s*\{\s*"' + CUSTOM_ARGUMENT + r'"\s*:\s*"')
_BARE_HEAD = '{"' + CUSTOM_ARGUMENT + '":"'
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_MAX_ESCAPE_CHARS = 6
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LOW_SURROGATE = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")


class CustomInputReader:
    """Decode {"input": "…"} piece by piece.

    Arguments of another form are the input as they are, at the end.
    """

    def __init__(self) -> None:
        self._held = ""
        self._has_head = False
        self._has_other_form = False
        self._has_ended = False

    def push(self, text: str) -> str:
        """Return the part of the input that is certain after the next piece of the arguments."""
        if self._has_ended:
            return ""
        self._held += text
        if self._has_other_form:
            return ""
        if not self._has_head:
            head = _HEAD.match(self._held)
            if head is None:
                self._has_other_form = not _BARE_HEAD.startswith("".join(self._held.split()))
                return ""
            self._held, self._has_head = self._held[head.end() :], True
        return self._decoded()

    def finish(self) -> str:
        """Return the rest of the input."""
        if self._has_head or self._has_ended:
            return ""
        return self._held

    def _decoded(self) -> str:
        """Remove the complete characters from the held text and return them."""
        pieces, position, held = [], 0, self._held
        while position < len(held):
            if (plain := _PLAIN.match(held, position)) is not None:
                pieces.append(plain[0])
                position = plain.end()
                continue
            if held[position] == '"':
                self._has_ended, position = True, len(held)
                break
            piece = self._escape(held[position : position + 2 * _MAX_ESCAPE_CHARS])
            if piece is None:
                break
            pieces.append(piece[0])
            position += piece[1]
        self._held = held[position:]
        return "".join(pieces)

    @staticmethod
    def _escape(text: str) -> tuple[str, int] | None:
        """Return the character of an escape and its length; None: it may go on."""
        escape = _ESCAPE.match(text)
        if escape is None:
            # A backslash before another character is no JSON: it stays as it is.
            may_go_on = re.fullmatch(r"\\(u[0-9a-fA-F]{0,3})?", text)
            return None if may_go_on else (text[0], 1)
        if not _HIGH_SURROGATE.fullmatch(escape[0]):
            char = json.loads(f'"{escape[0]}"')
            is_surrogate = "\ud800" <= char <= "\udfff"
            return "\N{REPLACEMENT CHARACTER}" if is_surrogate else char, len(escape[0])
        rest = text[_MAX_ESCAPE_CHARS:]
        if _LOW_SURROGATE.match(rest):
            pair = text[: 2 * _MAX_ESCAPE_CHARS]
            return json.loads(f'"{pair}"'), len(pair)
        may_be_pair = re.fullmatch(r"(\\(u([dD]([c-fC-F][0-9a-fA-F]?)?)?)?)?", rest)
        return None if may_be_pair else ("\N{REPLACEMENT CHARACTER}", _MAX_ESCAPE_CHARS)


StreamEvent = dict[str, Any]
ID_BYTES = 16


def item_id(prefix: str, response_id: str, place: str) -> str:
    """Return the id of an item: `place` is unique among the items of the response."""
    name = f"{response_id}/{place}".encode()
    return f"{prefix}_{hashlib.blake2b(name, digest_size=ID_BYTES).hexdigest()}"


class OutputItem:
    """An item that is being written, with the stream's events about it.

    Args:
        prefix: the begin of the item's id.
        response_id: id of the response, of which that of the item is made.
        number: place of the item in the output.
    """

    def __init__(self, prefix: str, response_id: str, number: int) -> None:
        self._id = item_id(prefix, response_id, str(number))
        self._index = number
        self._pieces: list[str] = []

    @property
    def _text(self) -> str:
        return "".join(self._pieces)

    def _of_item(self, what: str, item: dict[str, Any]) -> StreamEvent:
        """Return response.output_item.added or .done."""
        kind = f"response.output_item.{what}"
        return {"type": kind, "output_index": self._index, "item": item}

    def _of_value(self, kind: str, **fields: Any) -> StreamEvent:
        """Return an event about the item's arguments, its input or its content part."""
        place = {"item_id": self._id, "output_index": self._index}
        return {"type": f"response.{kind}", **place, **fields}


class PartOutput(OutputItem):
    """An item with one content part, which is a text."""

    prefix, kind = "", ""

    def __init__(self, response_id: str, number: int) -> None:
        super().__init__(self.prefix, response_id, number)

    def begin(self) -> list[StreamEvent]:
        """Return the events of the begin."""
        added = self._of_item("added", self._body("in_progress", []))
        return [added, self._of_part("content_part.added", part=self._part())]

    def add(self, text: str, **fields: Any) -> list[StreamEvent]:
        """Add a piece of the text. `fields`: of its event."""
        self._pieces.append(text)
        return [self._of_part(f"{self.kind}.delta", delta=text, **fields)]

    def end(self, status: str) -> list[StreamEvent]:
        """Return the events of the end."""
        return [
            self._of_part(f"{self.kind}.done", text=self._text, **self._beside_text()),
            self._of_part("content_part.done", part=self._part()),
            self._of_item("done", self.body(status)),
        ]

    def body(self, status: str) -> dict[str, Any]:
        """Return the item as it is now."""
        return self._body(status, [self._part()])

    def _body(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        raise NotImplementedError

    def _part(self) -> dict[str, Any]:
        return {"type": self.kind, "text": self._text}

    def _beside_text(self) -> dict[str, Any]:
        return {}

    def _of_part(self, kind: str, **fields: Any) -> StreamEvent:
        """Return an event about the only content part of the item."""
        return self._of_value(kind, content_index=0, **fields)


class ReasoningOutput(PartOutput):
    """A reasoning item."""

    prefix, kind = "rs", "reasoning_text"

    def _body(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._id, "type": "reasoning", "summary": []}
        return {**head, "content": content, "encrypted_content": None, "status": status}


class MessageOutput(PartOutput):
    """A message of the assistant."""

    prefix, kind = "msg", "output_text"

    def __init__(self, response_id: str, number: int) -> None:
        super().__init__(response_id, number)
        self._logprobs: list[dict[str, Any]] = []

    def add_text(self, text: str, logprobs: list[TokenLogprob]) -> list[StreamEvent]:
        """Add a piece of the text, and the logprobs of its tokens."""
        tokens = chat_logprobs(logprobs)["content"] if logprobs else []
        self._logprobs += tokens
        return self.add(text, logprobs=tokens)

    def _body(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "status": status}
        return {**head, "role": "assistant", "content": content}

    def _part(self) -> dict[str, Any]:
        return {**super()._part(), "annotations": [], **self._beside_text()}

    def _beside_text(self) -> dict[str, Any]:
        return {"logprobs": [*self._logprobs]}


class CallOutput(OutputItem):
    """A call of a function, or of a custom tool, whose input is the one argument of a function."""

    def __init__(self, response_id: str, number: int, call_id: str, tool: NamedTool) -> None:
        super().__init__("ctc" if tool.is_custom else "fc", response_id, number)
        self._call_id, self._tool = call_id, tool
        self._reader = CustomInputReader() if tool.is_custom else None
        self._kind = "custom_tool_call_input" if tool.is_custom else "function_call_arguments"

    def begin(self) -> list[StreamEvent]:
        """Return the event of the begin."""
        return [self._of_item("added", self.body("in_progress"))]

    def add(self, text: str) -> list[StreamEvent]:
        """Add a piece of the arguments."""
        return self._add(text if self._reader is None else self._reader.push(text))

    def end(self, status: str) -> list[StreamEvent]:
        """Return the events of the end."""
        rest = [] if self._reader is None else self._add(self._reader.finish())
        value = self._value()
        if self._reader is None:
            value["name"] = self._tool.name
        done = self._of_value(f"{self._kind}.done", **value)
        return [*rest, done, self._of_item("done", self.body(status))]

    def body(self, status: str) -> dict[str, Any]:
        """Return the item as it is now."""
        kind = "function_call" if self._reader is None else "custom_tool_call"
        head = {"id": self._id, "type": kind, "status": status}
        return {**head, **self._value(), **self._tool.call(self._call_id)}

    def _value(self) -> dict[str, Any]:
        return {"arguments" if self._reader is None else "input": self._text}

    def _add(self, text: str) -> list[StreamEvent]:
        if not text and self._reader is not None:
            return []
        self._pieces.append(text)
        return [self._of_value(f"{self._kind}.delta", delta=text)]


OpenItem = PartOutput | CallOutput
Part = TypeVar("Part", bound=PartOutput)


class ResponseOutput:
    """The output of a response: items in the order in which the model writes them.

    Args:
        response_id: id of the response, of which the ids of the items are made.
        tools: the tools of the request, by the names under which the model calls them.
    """

    def __init__(self, response_id: str, tools: Mapping[str, NamedTool]) -> None:
        self._response_id = response_id
        self._tools = tools
        self._ended: list[dict[str, Any]] = []
        self._open: OpenItem | None = None
        self._logprobs: list[TokenLogprob] = []

    @property
    def items(self) -> list[dict[str, Any]]:
        """The items that have ended, and the one that is being written."""
        return self._ended + ([self._open.body("incomplete")] if self._open else [])

    def push(
        self, events: list[AnswerEvent], logprobs: list[TokenLogprob] | None
    ) -> list[StreamEvent]:
        """Add the events of a chunk, whose tokens have `logprobs`, and return those of the stream.

        The logprobs of a chunk without events are those of the text that follows, unless the tokens
        are marks between a reasoning or a call and the text.
        """
        follows_mark = not isinstance(self._open, MessageOutput) and self._next_index > 0
        if events and follows_mark:
            self._logprobs = []
        self._logprobs += logprobs or []
        out: list[StreamEvent] = []
        for event in events:
            match event:
                case TextDelta():
                    message, begin = self._part(MessageOutput)
                    out += begin + message.add_text(event.text, self._logprobs)
                    self._logprobs = []
                case ReasoningDelta():
                    reasoning, begin = self._part(ReasoningOutput)
                    out += begin + reasoning.add(event.text)
                case CallBegin():
                    out += self._begin(self._call(event))
                case ArgumentsDelta():
                    assert isinstance(self._open, CallOutput)
                    out += self._open.add(event.text)
                case CallEnd():
                    out += self._end("completed")
        if events:
            self._logprobs = []
        return out

    def finish(self, is_cut: bool) -> list[StreamEvent]:
        """End the output; an answer without events is an empty message.

        Args:
            is_cut: the answer did not end by itself, so that its last item is incomplete.
        """
        out = [] if self._ended or self._open else self._part(MessageOutput)[1]
        # A call that is open here lacks its end.
        is_complete = not is_cut and not isinstance(self._open, CallOutput)
        return out + self._end("completed" if is_complete else "incomplete")

    def _part(self, kind: type[Part]) -> tuple[Part, list[StreamEvent]]:
        """Return the open item of a kind, and the events of its begin if it begins now."""
        if isinstance(self._open, kind):
            return self._open, []
        item = kind(self._response_id, self._next_index)
        return item, self._begin(item)

    def _call(self, event: CallBegin) -> CallOutput:
        tool = self._tools.get(event.name, NamedTool(event.name))
        return CallOutput(self._response_id, self._next_index, event.id, tool)

    @property
    def _next_index(self) -> int:
        return len(self._ended) + (self._open is not None)

    def _begin(self, item: OpenItem) -> list[StreamEvent]:
        """End the open item, which is incomplete if it is a call, and begin the next."""
        out = self._end("incomplete" if isinstance(self._open, CallOutput) else "completed")
        self._open = item
        return out + item.begin()

    def _end(self, status: str) -> list[StreamEvent]:
        if self._open is None:
            return []
        out = self._open.end(status)
        self._ended.append(self._open.body(status))
        self._open = None
        return out
