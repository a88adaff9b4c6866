"""Parse the messages that gpt-oss writes to its channels."""

import re

from http_proc.answer.event_writer import EventWriter
from http_proc.answer.marks import AnswerInput, EndOfAnswer, Steps, UnexpectedText, marks_of
from http_proc.answer.sinks import ReasoningSink, TextSink
from http_proc.answer.stepped import SteppedParser
from http_proc.answer.tool_schemas import ToolSchemas
from http_proc.answer.values.copier import ValueCopier
from http_proc.answer.values.syntax import JSON, OBJECT

MAX_HEADER_LENGTH = 1024

_MESSAGE = marks_of("<|message|>")
_HEADER_BEGINS = marks_of("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "to=")
_ENDS = marks_of("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NAMESPACE = "functions."
_REASONING_CHANNEL = "analysis"
_SEPARATOR = "\n"


class HarmonyParser(SteppedParser):
    """Parse messages into reasoning (channel analysis), calls (to a function) and text (others).

    A message consists of a header with the channel and the recipient, <|message|>, and the content.
    An answer without a header at its beginning continues a message.

    Args:
        source: the answer.
        writer: takes the events.
        tools: the tools of the request; None or empty: calls are text.
        begins_in_reasoning: the prompt ends within a message to the channel analysis.
        parses_reasoning: write reasoning as reasoning; otherwise as text.
    """

    def __init__(
        self,
        source: AnswerInput,
        writer: EventWriter,
        tools: ToolSchemas | None,
        begins_in_reasoning: bool,
        parses_reasoning: bool,
    ) -> None:
        super().__init__(source, writer)
        self._has_tools = bool(tools)
        self._begins_in_reasoning = begins_in_reasoning
        self._parses_reasoning = parses_reasoning
        self._has_written: set[type] = set()

    def _answer(self) -> Steps[None]:
        try:
            yield from self._first_message()
            while True:
                yield from self._message()
        except EndOfAnswer:
            return

    def _first_message(self) -> Steps[None]:
        """Parse the content of the message that the prompt has begun, if there is one."""
        if self._begins_in_reasoning:
            yield from self._content(_REASONING_CHANNEL, "")
            return
        spaces: list[str] = []
        try:
            yield from self._source.skip_space(spaces.append)
        except EndOfAnswer:
            self._writer.text("".join(spaces))
            raise
        if not (yield from _HEADER_BEGINS.here(self._source)):
            self._writer.text("".join(spaces))
            yield from self._content("final", "")

    def _message(self) -> Steps[None]:
        """Parse the next message, with its header."""
        header = yield from self._header()
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        yield from self._content(channel[1] if channel else "", recipient[1] if recipient else "")

    def _header(self) -> Steps[str]:
        """Consume a header and return its last `MAX_HEADER_LENGTH` characters."""
        header = ""

        def write(text: str) -> None:
            nonlocal header
            header = (header + text)[-MAX_HEADER_LENGTH:]

        mark = yield from _MESSAGE.copy_before(self._source, write)
        self._source.take(len(mark))
        return header

    def _content(self, channel: str, recipient: str) -> Steps[None]:
        """Parse the content of a message and the mark that ends it."""
        if self._has_tools and recipient not in ("", "assistant", "user"):
            yield from self._call(recipient.removeprefix(_NAMESPACE))
        else:
            yield from self._copy_content(channel)
        mark = yield from _ENDS.here(self._source)
        if mark not in ("<|start|>", "<|channel|>"):
            self._source.take(len(mark))

    def _copy_content(self, channel: str) -> Steps[None]:
        """Copy the content of a message as reasoning or as text, by its channel."""
        is_reasoning = channel == _REASONING_CHANNEL and self._parses_reasoning
        sink = ReasoningSink(self._writer) if is_reasoning else TextSink(self._writer)
        if sink.kind in self._has_written:
            sink.write(_SEPARATOR)
        self._has_written.add(sink.kind)
        yield from self._copy(_ENDS, sink)

    def _call(self, name: str) -> Steps[None]:
        """Parse the arguments of a call, which begins with the first character of its content."""
        writer = self._writer
        char = yield from self._source.skip_space()
        writer.begin_call(name)
        try:
            if char == "{":
                self._source.take(1)
                yield from ValueCopier(self._source, JSON, writer.arguments).arguments(OBJECT)
            elif (yield from _ENDS.here(self._source)):
                writer.arguments("{}")
            else:
                raise UnexpectedText
            yield from self._end_call()
        except UnexpectedText:
            yield from _ENDS.copy_before(self._source, writer.arguments)
            writer.leave_call()

    def _end_call(self) -> Steps[None]:
        """End a call and drop what stands between its arguments and the end of the message."""
        self._writer.end_call()
        yield from _ENDS.copy_before(self._source)
