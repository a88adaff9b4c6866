"""POST /v1/messages and POST /v1/messages/count_tokens, Anthropic's API.

First the content blocks of an answer, then its body and its stream, then the handlers.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from http_proc.answer.events import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    ReasoningDelta,
    TextDelta,
)
from http_proc.apis.anthropic_requests import (
    SAMPLING,
    CountTokensRequest,
    MessageErrorBody,
    MessagesRequest,
    ThinkingDisplay,
    chat_call,
    display_of,
    error_body,
    with_max_tokens,
)
from http_proc.core.call import Call
from http_proc.core.caller import current_caller
from http_proc.core.errors import ApiError, from_ring
from http_proc.core.gateway import Gateway, ResponseHead
from http_proc.core.streaming import SERVER_SENT_EVENTS, EventSink, named_event
from http_proc.core.timings import TimingsBody, timings_body
from http_proc.generation.chat_answers import ChatAnswer, collect_chat, stream_chat
from http_proc.generation.chat_messages import check_counts
from http_proc.generation.prepare import prepare_chat
from http_proc.generation.sampling import Sampling, convert, take_sampling
from http_proc.web.endpoint import answering, generating
from quadriga.client.async_client import RequestOptions
from quadriga.client.types import Completion, StreamChunk
from quadriga.errors import QuadrigaError
from quadriga.sampling.params import SamplingParams
from quadriga.wire.client import Usage

# A string, also one that is cut off, or a character of the structure.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}\[\],]', re.S)
_CLOSING = {"{": "}", "[": "]"}


def complete_object(text: str) -> dict[str, Any]:
    """Return the members of a JSON object that are complete; {} if there are none.

    The text is cut after its last complete value, and the open brackets are closed.
    """
    closings: list[str] = []
    end = 0
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark in _CLOSING:
            closings.append(_CLOSING[mark])
            end = token.end()
        elif mark in ("}", "]"):
            if not closings:
                break
            closings.pop()
            end = token.end()
        elif mark == ",":
            end = token.start()
    try:
        value = json.loads(text[:end] + "".join(reversed(closings)))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning. signature: a checksum of its text, which this server does not verify."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any] = msgspec.field(default_factory=dict)


OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock


class TextPiece(msgspec.Struct, tag_field="type", tag="text_delta"):
    """A piece of a text block."""

    text: str


class ThinkingPiece(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """A piece of a thinking block."""

    thinking: str


class SignaturePiece(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """The signature of a thinking block, before its end."""

    signature: str


class InputPiece(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """A piece of the JSON text of a tool's input."""

    partial_json: str


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """The begin of a block, which is still empty."""

    index: int
    content_block: OutputBlock


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """An addition to the block that began last."""

    index: int
    delta: TextPiece | ThinkingPiece | SignaturePiece | InputPiece


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """The end of the block that began last."""

    index: int


BlockStep = BlockStart | BlockDelta | BlockStop


class BlockWriter:
    """Turn parsed events into blocks, which follow each other and never interleave.

    Text and reasoning of white space alone make no block.

    Attributes:
        num_calls: number of tool_use blocks so far.
    """

    def __init__(self, display: ThinkingDisplay) -> None:
        self.num_calls = 0
        self._display = display
        self._num_blocks = 0
        self._open: type[OutputBlock] | None = None
        self._held: tuple[type[OutputBlock], str] = (TextBlock, "")
        self._digest = hashlib.sha256()
        self._steps: list[BlockStep] = []

    def push(self, events: Iterable[AnswerEvent]) -> list[BlockStep]:
        """Return the steps of the next events."""
        for event in events:
            match event:
                case TextDelta():
                    self._add_text(event.text)
                case ReasoningDelta():
                    self._add_reasoning(event.text)
                case CallBegin():
                    self.num_calls += 1
                    self._begin(ToolUseBlock(event.id, event.name))
                case ArgumentsDelta():
                    self._add(InputPiece(event.text))
                case CallEnd():
                    self._end()
        return self._taken()

    def finish(self) -> list[BlockStep]:
        """Return the end of the last block."""
        self._end()
        return self._taken()

    def _taken(self) -> list[BlockStep]:
        steps, self._steps = self._steps, []
        return steps

    def _add_text(self, text: str) -> None:
        if text := self._visible(TextBlock, text):
            if self._open is not TextBlock:
                self._begin(TextBlock())
            self._add(TextPiece(text))

    def _add_reasoning(self, text: str) -> None:
        if not self._display.has_blocks:
            return
        if text := self._visible(ThinkingBlock, text):
            if self._open is not ThinkingBlock:
                self._begin(ThinkingBlock())
                self._digest = hashlib.sha256()
            self._digest.update(text.encode())
            if self._display.has_text:
                self._add(ThinkingPiece(text))

    def _visible(self, kind: type[OutputBlock], text: str) -> str:
        """Return what is added to a block; white space at its begin is held until text follows."""
        if self._open is kind:
            return text
        held_kind, held = self._held
        text = held + text if held_kind is kind else text
        is_held = not text or text.isspace()
        self._held = (kind, text if is_held else "")
        return "" if is_held else text

    def _begin(self, block: OutputBlock) -> None:
        self._end()
        self._open = type(block)
        self._steps.append(BlockStart(self._num_blocks, block))
        self._num_blocks += 1

    def _add(self, piece: TextPiece | ThinkingPiece | SignaturePiece | InputPiece) -> None:
        self._steps.append(BlockDelta(self._num_blocks - 1, piece))

    def _end(self) -> None:
        if self._open is None:
            return
        if self._open is ThinkingBlock:
            self._add(SignaturePiece(f"sha256:{self._digest.hexdigest()}"))
        self._steps.append(BlockStop(self._num_blocks - 1))
        self._open = None


def whole_blocks(steps: Iterable[BlockStep]) -> list[OutputBlock]:
    """Return the blocks that a client collects from the steps of a stream."""
    blocks: list[OutputBlock] = []
    pieces: list[str] = []
    for step in steps:
        match step:
            case BlockStart(content_block=block):
                blocks.append(block)
                pieces = []
            case BlockDelta(delta=SignaturePiece(signature=signature)):
                blocks[-1] = ThinkingBlock("", signature)
            case BlockDelta(delta=piece):
                pieces.append(_text_of(piece))
            case BlockStop():
                _fill(blocks[-1], "".join(pieces))
    return blocks


def _text_of(piece: TextPiece | ThinkingPiece | SignaturePiece | InputPiece) -> str:
    (text,) = msgspec.structs.astuple(piece)
    assert isinstance(text, str)
    return text


def _fill(block: OutputBlock, text: str) -> None:
    match block:
        case TextBlock():
            block.text = text
        case ThinkingBlock():
            block.thinking = text
        case ToolUseBlock():
            block.input = _object(text)


def _object(text: str) -> dict[str, Any]:
    """Return the input of a call; a call that was cut off has what is complete."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = complete_object(text)
    return value if isinstance(value, dict) else {}


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


async def messages(gateway: Gateway, call: Call, sink: EventSink) -> MessageBody | None:
    """Answer a conversation."""
    body = await call.parse()
    check_counts(body)
    sampling = take_sampling(body, SAMPLING, {})
    fields = convert(body, MessagesRequest)
    current_caller().set_user((fields.metadata or {}).get("user_id"))
    gateway.check_model(fields.model)
    chat = chat_call(fields, with_max_tokens(sampling, fields.max_tokens))
    prepared = await prepare_chat(gateway, chat)
    # Clients such as Claude Code ask for more tokens than the context of many models has.
    options: RequestOptions = {**prepared.options, "clamp_max_new_tokens": True}
    head = gateway.head(call, "msg", "_")
    writer = BlockWriter(display_of(fields.thinking))
    with gateway.open_group(head.id, prepared.names, call.record) as group:
        in_chunks = chat.stream or prepared.reader.ends_at_repeat
        group.submit(chat.messages, prepared.params, in_chunks, options)
        if chat.stream:
            stream = MessageStream(head, writer, fields.max_tokens)
            await stream_chat(sink, group, prepared, stream)
            return None
        (answer,) = await collect_chat(group, prepared)
    return _body(head, answer, writer, fields.max_tokens)


async def count_tokens(gateway: Gateway, call: Call, _: EventSink) -> TokenCount:
    """Return the number of tokens of the prompt that a conversation would have."""
    body = await call.parse()
    check_counts(body)
    fields = convert(body, CountTokensRequest)
    gateway.check_model(fields.model)
    chat = chat_call(fields, Sampling(SamplingParams(), {}))
    prepared = await prepare_chat(gateway, chat)
    prompt: Any = chat.messages
    try:
        tokens = await gateway.ring.tokenize(prompt, prepared.options["chat"])
    except QuadrigaError as error:
        raise from_ring(error, prepared.names) from None
    return TokenCount(len(tokens))


def _body(
    head: ResponseHead, answer: ChatAnswer, writer: BlockWriter, max_tokens: int
) -> MessageBody:
    completion = answer.completion
    steps = writer.push(answer.events) + writer.finish()
    end = end_of(completion, writer.num_calls, max_tokens)
    return MessageBody(
        id=head.id,
        model=head.model,
        content=whole_blocks(steps),
        stop_reason=end.stop_reason,
        stop_sequence=end.stop_sequence,
        usage=MessageUsage.of(completion.usage),
        timings=timings_body([completion]),
    )


_ERRORS: dict[str, Any] = {"error_body": error_body, "error": MessageErrorBody}

ANTHROPIC_ENDPOINTS = [
    generating("/v1/messages", messages, "Answer a conversation, in Anthropic's format",
               MessagesRequest, MessageBody, sampling=SAMPLING, is_resumable=True, **_ERRORS),
    answering("/v1/messages/count_tokens", count_tokens, "Number of tokens of a conversation",
              CountTokensRequest, TokenCount, **_ERRORS),
]  # fmt: skip
