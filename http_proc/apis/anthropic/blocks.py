"""Group the parsed events of an answer into content blocks, for a stream or as a whole."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import msgspec

from http_proc.answer.events import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    ReasoningDelta,
    TextDelta,
)
from http_proc.apis.anthropic.chat_call import ThinkingDisplay
from http_proc.apis.anthropic.partial_json import complete_object


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
