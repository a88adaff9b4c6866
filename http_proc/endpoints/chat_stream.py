"""The chunks of a chat as events."""

from typing import Any

import msgspec

from http_proc.endpoints.usage import UsageInStream
from http_proc.gateway import Head
from http_proc.protocol.logprobs import chat_logprobs
from http_proc.protocol.tool_calls import ParsedCalls, ToolCallParser, make_parser
from http_proc.streaming.sse import Template, event
from quadriga.client.types import StreamChunk

CONTENT = "@content@"
"""The place of the text in a chunk."""

_encode = msgspec.json.encode


class ChatChoiceStream:
    """What a choice needs between its chunks."""

    __slots__ = ("calls", "parser", "template")

    def __init__(self, template: Template, parser: ToolCallParser | None) -> None:
        self.template = template
        self.parser = parser
        self.calls = 0


class ChatStream:
    """The first event of a choice has its role, the last its finish_reason; a tool call is one
    event, sent when it is whole. A chunk without text is sent only if it is the first or last."""

    def __init__(
        self, head: Head, usage: UsageInStream, tool_format: str, parallel_tool_calls: bool
    ) -> None:
        self._head = head
        self._usage = usage
        self._tool_format = tool_format
        self._most_calls = None if parallel_tool_calls else 1
        self._choices: dict[int, ChatChoiceStream] = {}

    def render(self, index: int, chunk: StreamChunk) -> bytes:
        usage = self._usage.of_chunk(index, chunk)
        choice, events = self._choices.get(index), b""
        if choice is None:
            choice = self._choices[index] = self._open(index)
            events = self._delta(index, {"role": "assistant", "content": ""}, usage)
        text = chunk.text
        if choice.parser is not None:
            text, calls = self._parse(choice, chunk)
            if calls and text:
                events += choice.template.fill(_encode(text), usage)
                text = ""
            for delta in calls:
                events += self._delta(index, delta, usage)
        if chunk.completion is not None or chunk.logprobs is not None:
            return events + self._full(index, choice, text, chunk, usage)
        if text or (usage != b"null" and not events):
            return events + choice.template.fill(_encode(text), usage)
        return events

    def last(self) -> bytes:
        usage = self._usage.last()
        return b"" if usage is None else event(_encode(self._chunk([]) | {"usage": usage}))

    def _open(self, index: int) -> ChatChoiceStream:
        one = self._choice(index, {"content": CONTENT})
        chunk = self._chunk([one]) | self._usage.slot
        template = Template(chunk, CONTENT, *self._usage.slot.values())
        return ChatChoiceStream(
            template, make_parser(self._tool_format) if self._tool_format else None
        )

    def _parse(
        self, choice: ChatChoiceStream, chunk: StreamChunk
    ) -> tuple[str, list[dict[str, Any]]]:
        """The text, and the deltas of the calls that are whole now."""
        assert choice.parser is not None
        found = [choice.parser.push(chunk.text)]
        if chunk.completion is not None:
            found.append(choice.parser.finish())
        deltas = []
        for call in (call for part in found for call in part.calls):
            if self._most_calls is None or choice.calls < self._most_calls:
                body = {"index": choice.calls, **msgspec.to_builtins(call)}
                deltas.append({"tool_calls": [body]})
                choice.calls += 1
        return _joined(found), deltas

    def _full(
        self, index: int, choice: ChatChoiceStream, text: str, chunk: StreamChunk, usage: bytes
    ) -> bytes:
        """An event that has more than text: an end, or log-probabilities."""
        more: dict[str, Any] = {}
        if chunk.logprobs is not None:
            more["logprobs"] = chat_logprobs(chunk.logprobs)
        if chunk.completion is not None:
            reason = chunk.completion.finish_reason
            called = choice.calls and reason == "stop"
            more["finish_reason"] = "tool_calls" if called else reason
            more["stop_reason"] = chunk.completion.matched_stop
        return self._delta(index, {"content": text} if text else {}, usage, more)

    def _delta(
        self, index: int, delta: dict[str, Any], usage: bytes, fields: dict[str, Any] | None = None
    ) -> bytes:
        one = self._choice(index, delta) | (fields or {})
        more = {"usage": msgspec.Raw(usage)} if self._usage.slot else {}
        return event(_encode(self._chunk([one]) | more))

    def _choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "object": "chat.completion.chunk",
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
        }


def _joined(found: list[ParsedCalls]) -> str:
    return "".join(part.text for part in found)
