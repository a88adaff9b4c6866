"""The output of a response: answer events to items, and to the stream's events about them."""

from collections.abc import Mapping
from typing import Any

from http_proc.answer.events import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    ReasoningDelta,
    TextDelta,
)
from http_proc.apis.responses.output_items import (
    CallOutput,
    CustomCallOutput,
    FunctionCallOutput,
    ItemPlace,
    MessageOutput,
    NamedTool,
    OpenItem,
    ReasoningOutput,
    StreamEvent,
)
from quadriga.client.logprobs import TokenLogprob


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
                    out += self._add_text(event.text)
                case ReasoningDelta():
                    out += self._add_reasoning(event.text)
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
        out = [] if self._ended or self._open else self._begin(MessageOutput(self._place))
        # A call that is open here lacks its end.
        is_complete = not is_cut and not isinstance(self._open, CallOutput)
        return out + self._end("completed" if is_complete else "incomplete")

    def _add_text(self, text: str) -> list[StreamEvent]:
        out: list[StreamEvent] = []
        if not isinstance(self._open, MessageOutput):
            out = self._begin(MessageOutput(self._place))
        assert isinstance(self._open, MessageOutput)
        out += self._open.add(text, self._logprobs)
        self._logprobs = []
        return out

    def _add_reasoning(self, text: str) -> list[StreamEvent]:
        out: list[StreamEvent] = []
        if not isinstance(self._open, ReasoningOutput):
            out = self._begin(ReasoningOutput(self._place))
        assert isinstance(self._open, ReasoningOutput)
        out += self._open.add(text)
        return out

    def _call(self, event: CallBegin) -> CallOutput:
        tool = self._tools.get(event.name, NamedTool(event.name))
        kind = CustomCallOutput if tool.is_custom else FunctionCallOutput
        return kind(self._place, event.id, tool)

    @property
    def _next_index(self) -> int:
        return len(self._ended) + (self._open is not None)

    @property
    def _place(self) -> ItemPlace:
        """Place of the item that begins now."""
        return ItemPlace(self._response_id, self._next_index)

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
