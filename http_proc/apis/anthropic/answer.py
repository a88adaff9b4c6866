"""The body of a message, and the reason for its end."""

from typing import Literal

import msgspec

from http_proc.apis.anthropic.blocks import OutputBlock
from http_proc.protocol.timings import TimingsBody
from quadriga.client.types import Completion
from quadriga.wire.messages.to_client import Usage


class MessageUsage(msgspec.Struct):
    """Token counts. input_tokens: tokens of the prompt that did not come from the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0

    @classmethod
    def of(cls, usage: Usage) -> "MessageUsage":
        """Return the counts of a completion."""
        cached = usage.cached_tokens
        return cls(usage.prompt_tokens - cached, usage.completion_tokens, cached)


class MessageBody(msgspec.Struct, kw_only=True):
    """The response of POST /v1/messages. stop_sequence: the string that ended the text."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    timings: TimingsBody | msgspec.UnsetType = msgspec.UNSET


class TokenCount(msgspec.Struct):
    """The response of POST /v1/messages/count_tokens."""

    input_tokens: int


class MessageEnd(msgspec.Struct):
    """Why a message ended."""

    stop_reason: str
    stop_sequence: str | None


def end_of(completion: Completion, num_calls: int, max_tokens: int) -> MessageEnd:
    """Return the reason for the end of a message.

    A message that was aborted has been cut off, so that it ends as one of max_tokens.
    """
    matched = completion.matched_stop
    if completion.finish_reason == "stop":
        if isinstance(matched, str):
            return MessageEnd("stop_sequence", matched)
        return MessageEnd("tool_use" if num_calls else "end_turn", None)
    is_full = completion.usage.completion_tokens < max_tokens
    if completion.finish_reason == "length" and is_full:
        return MessageEnd("model_context_window_exceeded", None)
    return MessageEnd("max_tokens", None)
