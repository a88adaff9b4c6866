"""Format the chunks of a chat as server-sent events."""

from dataclasses import dataclass
from typing import Any

import msgspec

from http_proc.endpoints.usage import StreamUsage
from http_proc.gateway import ResponseHead
from http_proc.protocol.logprobs import chat_logprobs
from http_proc.protocol.tool_calls import ToolCallParser, ToolFormat, make_parser
from http_proc.responses import Template, event
from quadriga.client.types import StreamChunk

KIND = "chat.completion.chunk"
CONTENT = "@content@"  # placeholder of the text in a chunk

_encode = msgspec.json.encode


@dataclass(slots=True)
class ChatChoiceStream:
    """The state of one choice between its chunks."""

    template: Template
    parser: ToolCallParser | None
    num_calls: int = 0


class ChatStream:
    """Renderer of a chat.

    The first event of a choice has the role, the last one the finish_reason. A tool call is one
    event, sent when it is complete. A chunk without text is sent only if it is the first or last.
    """

    def __init__(
        self,
        head: ResponseHead,
        usage: StreamUsage,
        tool_format: ToolFormat | None,
        parallel_tool_calls: bool,
    ) -> None:
        self._head = head
        self._usage = usage
        self._tool_format = tool_format
        self._max_calls = None if parallel_tool_calls else 1
        self._choices: dict[int, ChatChoiceStream] = {}

    def render(self, index: int, chunk: StreamChunk) -> bytes:
        """Return the events of a chunk of choice `index`."""
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

    def finish(self) -> bytes:
        """Return the event with the usage of all choices, if the request asks for it."""
        usage = self._usage.total()
        return (
            b"" if usage is None else event(_encode(self._head.chunk(KIND, []) | {"usage": usage}))
        )

    def _open(self, index: int) -> ChatChoiceStream:
        chunk = self._head.chunk(KIND, [_choice(index, {"content": CONTENT})]) | self._usage.slot
        template = Template(chunk, CONTENT, *self._usage.slot.values())
        return ChatChoiceStream(
            template, make_parser(self._tool_format) if self._tool_format else None
        )

    def _parse(
        self, choice: ChatChoiceStream, chunk: StreamChunk
    ) -> tuple[str, list[dict[str, Any]]]:
        """Return the text, and the deltas of the calls that are complete now."""
        assert choice.parser is not None
        parts = [choice.parser.push(chunk.text)]
        if chunk.completion is not None:
            parts.append(choice.parser.finish())
        deltas = []
        for call in (call for part in parts for call in part.calls):
            if self._max_calls is None or choice.num_calls < self._max_calls:
                body = {"index": choice.num_calls, **msgspec.to_builtins(call)}
                deltas.append({"tool_calls": [body]})
                choice.num_calls += 1
        return "".join(part.text for part in parts), deltas

    def _full(
        self, index: int, choice: ChatChoiceStream, text: str, chunk: StreamChunk, usage: bytes
    ) -> bytes:
        """Return an event with more than text: logprobs, or the end of the choice."""
        fields: dict[str, Any] = {}
        if chunk.logprobs is not None:
            fields["logprobs"] = chat_logprobs(chunk.logprobs)
        if chunk.completion is not None:
            reason = chunk.completion.finish_reason
            called = choice.num_calls and reason == "stop"
            fields["finish_reason"] = "tool_calls" if called else reason
            fields["stop_reason"] = chunk.completion.matched_stop
        return self._delta(index, {"content": text} if text else {}, usage, fields)

    def _delta(
        self, index: int, delta: dict[str, Any], usage: bytes, fields: dict[str, Any] | None = None
    ) -> bytes:
        chunk = self._head.chunk(KIND, [_choice(index, delta) | (fields or {})])
        return event(_encode(chunk | ({"usage": msgspec.Raw(usage)} if self._usage.slot else {})))


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
