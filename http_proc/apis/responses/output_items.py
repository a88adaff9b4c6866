"""The kinds of output items of a response, each with the stream's events about it."""

import hashlib
from typing import Any, NamedTuple

from http_proc.apis.responses.custom_input import CustomInputReader
from http_proc.protocol.logprobs import chat_logprobs
from quadriga.client.logprobs import TokenLogprob

StreamEvent = dict[str, Any]
ID_BYTES = 16


def item_id(prefix: str, response_id: str, place: str) -> str:
    """Return the id of an item: `place` is unique among the items of the response."""
    name = f"{response_id}/{place}".encode()
    return f"{prefix}_{hashlib.blake2b(name, digest_size=ID_BYTES).hexdigest()}"


class NamedTool(NamedTuple):
    """A tool as calls name it.

    Attributes:
        name: Of the tool, in its namespace.
        namespace: Name of the namespace; "" for none.
        is_custom: Its calls are of the type custom_tool_call, with a text as input.
    """

    name: str
    namespace: str = ""
    is_custom: bool = False

    def call(self, call_id: str) -> dict[str, Any]:
        """Return the fields of a call that name it."""
        named = {"call_id": call_id, "name": self.name}
        return {**named, "namespace": self.namespace} if self.namespace else named


class ItemPlace(NamedTuple):
    """Where an item stands: in which response, and its number among the items of the output."""

    response_id: str
    number: int


class ItemEvents:
    """Make the events about one item. `prefix`: the begin of the item's id."""

    def __init__(self, prefix: str, place: ItemPlace) -> None:
        self.id = item_id(prefix, place.response_id, str(place.number))
        self._index = place.number

    def of_item(self, what: str, item: dict[str, Any]) -> StreamEvent:
        """Return response.output_item.added or .done."""
        kind = f"response.output_item.{what}"
        return {"type": kind, "output_index": self._index, "item": item}

    def of_part(self, kind: str, **fields: Any) -> StreamEvent:
        """Return an event about the only content part of the item."""
        return self.of_value(kind, content_index=0, **fields)

    def of_value(self, kind: str, **fields: Any) -> StreamEvent:
        """Return an event about the item's arguments or input."""
        place = {"item_id": self.id, "output_index": self._index}
        return {"type": f"response.{kind}", **place, **fields}


class ReasoningOutput:
    """A reasoning item."""

    def __init__(self, place: ItemPlace) -> None:
        self._events = ItemEvents("rs", place)
        self._pieces: list[str] = []

    def begin(self) -> list[StreamEvent]:
        """Return the events of the begin."""
        added = self._events.of_item("added", self._body("in_progress", []))
        return [added, self._events.of_part("content_part.added", part=_reasoning_part(""))]

    def add(self, text: str) -> list[StreamEvent]:
        """Add a piece of the text."""
        self._pieces.append(text)
        return [self._events.of_part("reasoning_text.delta", delta=text)]

    def end(self, status: str) -> list[StreamEvent]:
        """Return the events of the end."""
        text = "".join(self._pieces)
        return [
            self._events.of_part("reasoning_text.done", text=text),
            self._events.of_part("content_part.done", part=_reasoning_part(text)),
            self._events.of_item("done", self.body(status)),
        ]

    def body(self, status: str) -> dict[str, Any]:
        """Return the item as it is now."""
        return self._body(status, [_reasoning_part("".join(self._pieces))])

    def _body(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._events.id, "type": "reasoning", "summary": []}
        return {**head, "content": content, "encrypted_content": None, "status": status}


class MessageOutput:
    """A message with one part, the text."""

    def __init__(self, place: ItemPlace) -> None:
        self._events = ItemEvents("msg", place)
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def begin(self) -> list[StreamEvent]:
        """Return the events of the begin."""
        added = self._events.of_item("added", self._body("in_progress", []))
        return [added, self._events.of_part("content_part.added", part=_text_part("", []))]

    def add(self, text: str, logprobs: list[TokenLogprob]) -> list[StreamEvent]:
        """Add a piece of the text, and the logprobs of its tokens."""
        tokens = chat_logprobs(logprobs)["content"] if logprobs else []
        self._pieces.append(text)
        self._logprobs += tokens
        return [self._events.of_part("output_text.delta", delta=text, logprobs=tokens)]

    def end(self, status: str) -> list[StreamEvent]:
        """Return the events of the end."""
        text = "".join(self._pieces)
        part = _text_part(text, self._logprobs)
        return [
            self._events.of_part("output_text.done", text=text, logprobs=self._logprobs),
            self._events.of_part("content_part.done", part=part),
            self._events.of_item("done", self.body(status)),
        ]

    def body(self, status: str) -> dict[str, Any]:
        """Return the item as it is now."""
        return self._body(status, [_text_part("".join(self._pieces), self._logprobs)])

    def _body(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._events.id, "type": "message", "status": status}
        return {**head, "role": "assistant", "content": content}


class FunctionCallOutput:
    """A call of a function."""

    def __init__(self, place: ItemPlace, call_id: str, tool: NamedTool) -> None:
        self._events = ItemEvents("fc", place)
        self._call_id, self._tool = call_id, tool
        self._pieces: list[str] = []

    def begin(self) -> list[StreamEvent]:
        """Return the event of the begin."""
        return [self._events.of_item("added", self.body("in_progress"))]

    def add(self, text: str) -> list[StreamEvent]:
        """Add a piece of the arguments."""
        self._pieces.append(text)
        return [self._events.of_value("function_call_arguments.delta", delta=text)]

    def end(self, status: str) -> list[StreamEvent]:
        """Return the events of the end."""
        fields = {"arguments": "".join(self._pieces), "name": self._tool.name}
        return [
            self._events.of_value("function_call_arguments.done", **fields),
            self._events.of_item("done", self.body(status)),
        ]

    def body(self, status: str) -> dict[str, Any]:
        """Return the item as it is now."""
        head = {"id": self._events.id, "type": "function_call", "status": status}
        arguments = "".join(self._pieces)
        return {**head, "arguments": arguments, **self._tool.call(self._call_id)}


class CustomCallOutput:
    """A call of a custom tool, whose input is the one argument of a function."""

    def __init__(self, place: ItemPlace, call_id: str, tool: NamedTool) -> None:
        self._events = ItemEvents("ctc", place)
        self._call_id, self._tool = call_id, tool
        self._reader = CustomInputReader()
        self._pieces: list[str] = []

    def begin(self) -> list[StreamEvent]:
        """Return the event of the begin."""
        return [self._events.of_item("added", self.body("in_progress"))]

    def add(self, text: str) -> list[StreamEvent]:
        """Add a piece of the arguments."""
        return self._add(self._reader.push(text))

    def end(self, status: str) -> list[StreamEvent]:
        """Return the events of the end."""
        rest = self._add(self._reader.finish())
        text = "".join(self._pieces)
        return [
            *rest,
            self._events.of_value("custom_tool_call_input.done", input=text),
            self._events.of_item("done", self.body(status)),
        ]

    def body(self, status: str) -> dict[str, Any]:
        """Return the item as it is now."""
        head = {"id": self._events.id, "type": "custom_tool_call", "status": status}
        return {**head, "input": "".join(self._pieces), **self._tool.call(self._call_id)}

    def _add(self, text: str) -> list[StreamEvent]:
        if not text:
            return []
        self._pieces.append(text)
        return [self._events.of_value("custom_tool_call_input.delta", delta=text)]


CallOutput = FunctionCallOutput | CustomCallOutput
OpenItem = ReasoningOutput | MessageOutput | CallOutput


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
