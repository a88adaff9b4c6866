"""Format the answer to a message as server-sent events."""

from typing import Any

import msgspec

from http_proc.answer.events import AnswerEvent
from http_proc.apis.anthropic.answer import MessageBody, MessageUsage, end_of
from http_proc.apis.anthropic.blocks import BlockDelta, BlockStart, BlockStep, BlockWriter
from http_proc.apis.anthropic.errors import error_body
from http_proc.gateway import ResponseHead
from http_proc.protocol.errors import ApiError
from http_proc.protocol.timings import timings_body
from http_proc.responses import SERVER_SENT_EVENTS, named_event
from quadriga.client.types import Completion, StreamChunk

_encode = msgspec.json.encode


class MessageStream:
    """ChatRenderer of Anthropic's messages."""

    framing = SERVER_SENT_EVENTS

    def __init__(self, head: ResponseHead, writer: BlockWriter, max_tokens: int) -> None:
        self._head = head
        self._writer = writer
        self._max_tokens = max_tokens
        self._completion: Completion | None = None

    def start(self, num_prompt_tokens: int) -> bytes:
        """Return message_start, whose usage does not know the cached tokens yet, and a ping."""
        usage = MessageUsage(num_prompt_tokens, 0)
        body = MessageBody(id=self._head.id, model=self._head.model, content=[], usage=usage)
        message = {"type": "message_start", "message": body}
        return named_event(b"message_start", _encode(message)) + named_event(
            b"ping", b'{"type":"ping"}'
        )

    def render(self, _: int, events: list[AnswerEvent], chunk: StreamChunk, /) -> bytes:
        """Return the events of the blocks."""
        steps = self._writer.push(events)
        if chunk.completion is not None:
            self._completion = chunk.completion
            steps += self._writer.finish()
        return b"".join(map(_step_event, steps))

    def finish(self) -> bytes:
        """Return message_delta (why it ended, counts, timings) and message_stop."""
        completion = self._completion
        assert completion is not None
        delta: dict[str, Any] = {
            "type": "message_delta",
            "delta": end_of(completion, self._writer.num_calls, self._max_tokens),
            "usage": MessageUsage.of(completion.usage),
            "timings": timings_body([completion]),
        }
        return named_event(b"message_delta", _encode(delta)) + named_event(
            b"message_stop", b'{"type":"message_stop"}'
        )

    def error(self, error: ApiError) -> bytes:
        """Return the event error."""
        return named_event(b"error", error_body(error))


def _step_event(step: BlockStep) -> bytes:
    match step:
        case BlockDelta():
            name = b"content_block_delta"
        case BlockStart():
            name = b"content_block_start"
        case _:
            name = b"content_block_stop"
    return named_event(name, _encode(step))
