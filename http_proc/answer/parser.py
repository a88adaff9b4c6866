"""The parser of answers, for the format of a model.

Answers of most models have reasoning and calls between marks; gpt-oss writes messages to channels
(harmony).
"""

import re
from collections.abc import Callable
from typing import Protocol

from http_proc.answer.events import AnswerEvent, EventWriter, ParsedAnswer
from http_proc.answer.marks import (
    AnswerInput,
    EndOfAnswer,
    Marks,
    ReasoningSink,
    SteppedParser,
    Steps,
    TextAroundCalls,
    TextSink,
    UnexpectedText,
    first_part,
    marks_of,
    stripped,
)
from http_proc.answer.styles import (
    CallBody,
    CallContext,
    JsonCalls,
    NamedJsonCalls,
    PythonicCalls,
    QuotedCalls,
    TaggedCalls,
    ToolSchemas,
)
from http_proc.answer.values import JSON, OBJECT, ValueCopier
from quadriga.server.answer_format import AnswerFormat, CallFormat, CallStyle, ReasoningFormat

__all__ = ["AnswerParser", "ToolSchemas", "make_parser", "parse_answer"]


# Parse the calls of an answer, with the marks before, between and after them.

_BODIES: dict[CallStyle, Callable[[CallContext], CallBody]] = {
    CallStyle.JSON: JsonCalls,
    CallStyle.NAMED_JSON: NamedJsonCalls,
    CallStyle.TAGGED: TaggedCalls,
    CallStyle.PYTHONIC: PythonicCalls,
    CallStyle.QUOTED: QuotedCalls,
}
_LIST_STYLES = (CallStyle.JSON, CallStyle.NAMED_JSON, CallStyle.PYTHONIC)
_MIN_DISTINCTIVE_LENGTH = 4
# What models write around the object of a call instead of the marks of their template: each mark
# that opens, with the one that closes.
_LOOSE_MARKS = {
    "```json": "```",
    "```": "```",
    "<tools>": "</tools>",
    "<function_call>": "</function_call>",
}


class CallsParser:
    """Parse calls, from the mark that opens them to the one that closes them.

    Args:
        context: input, output, marks and tools.
        takes_unmarked: in a format of JSON objects with marks, an object without them, or in a
            Markdown fence, is a call, too, if it has the name of a tool of the request, and
            arguments.

    Attributes:
        triggers: marks that begin calls.
        first_characters: characters that an answer of calls without a mark begins with; empty if
            calls have a mark.
    """

    def __init__(self, context: CallContext, takes_unmarked: bool = False) -> None:
        self._context = context
        self._source = context.source
        marks = self._format = context.marks
        self._body = _BODIES[marks.style](context)
        self._opens = stripped(marks.open, *marks.open_variants)
        self._closes = marks_of(*map(first_part, (marks.close, *marks.close_variants)))
        self._call_close = marks_of(first_part(marks.call_close))
        self._separator = marks_of(marks.separator.strip())
        loose = _LOOSE_MARKS if takes_unmarked and _are_marked_objects(marks) else {}
        # A mark of the format itself keeps its meaning.
        own = {*self._opens, *_inner_triggers(marks)}
        self._loose_marks = {opening: end for opening, end in loose.items() if opening not in own}
        self.triggers = marks_of(*own, *self._loose_marks)
        self._ends = marks_of(*self._call_close.all, *self._closes.all, *self.triggers.all)
        is_unmarked = not (marks.open or marks.call_open or marks.name_open)
        self.first_characters = _first_characters(marks) if is_unmarked or loose else ""
        self._is_loose = bool(loose)
        self._is_in_list = False
        self._is_after_call = False

    def parse(self, trigger: str) -> Steps[str]:
        """Parse calls and return the consumed text that turned out to be no call.

        Args:
            trigger: the mark that stands here; empty: calls without a mark may begin here.
        """
        self._source.hold()
        self._is_in_list = self._is_after_call = False
        try:
            if trigger in self._loose_marks or (self._is_loose and not trigger):
                yield from self._loose_calls(trigger)
            else:
                if trigger in self._opens:
                    self._source.take(len(trigger))
                yield from self._calls(needs_known_name=not trigger)
        except UnexpectedText:
            pass
        except EndOfAnswer:
            if self._is_after_call or self._context.writer.is_in_call:
                return ""
            self._source.take_rest()
        return self._source.release()

    def _calls(self, needs_known_name: bool) -> Steps[None]:
        """Parse calls up to the mark that closes them. Text after broken arguments joins them."""
        while True:
            yield from self._open_call()
            try:
                yield from self._body.call(needs_known_name)
            except UnexpectedText:
                if not self._context.writer.is_in_call:
                    raise
                yield from self._ends.copy_before(self._source, self._context.writer.arguments)
                self._context.writer.leave_call()
            self._source.hold()
            self._is_after_call = True
            yield from self._drop(self._call_close, self._format.call_close)
            if not (yield from self._goes_on()):
                break
            self._is_after_call = False
        yield from self._drop(self._closes)

    def _loose_calls(self, mark: str) -> Steps[None]:
        """Parse objects that follow a mark which is not of the format, or none, and the end."""
        self._source.take(len(mark))
        ends = marks_of(self._loose_marks.get(mark, ""))
        while True:
            try:
                yield from self._body.call(needs_known_name=True)
            except UnexpectedText:
                if not self._context.writer.is_in_call:
                    raise
                yield from marks_of(*ends.all, *self._ends.all).copy_before(
                    self._source, self._context.writer.arguments
                )
                self._context.writer.leave_call()
            self._source.hold()
            self._is_after_call = True
            if (yield from self._source.skip_space()) != "{":
                break
            self._is_after_call = False
        yield from self._drop(ends)

    def _open_call(self) -> Steps[None]:
        """Consume the bracket of a list of calls and the mark that opens a call."""
        char = yield from self._source.skip_space()
        if char == "[" and self._format.style in _LIST_STYLES and not self._is_in_list:
            self._source.take(1)
            self._is_in_list = True
        if not (yield from self._source.skip_mark(self._format.call_open)):
            raise UnexpectedText

    def _goes_on(self) -> Steps[bool]:
        """Consume what stands between two calls and return whether another begins."""
        char = yield from self._source.skip_space()
        if self._is_in_list and char == ",":
            self._source.take(1)
            return True
        if self._is_in_list and char == "]":
            self._source.take(1)
            self._source.hold()
            self._is_in_list = False
            char = yield from self._source.skip_space()
        separator = yield from self._separator.here(self._source)
        self._source.take(len(separator))
        char = yield from self._source.skip_space()
        begin = first_part(self._format.call_open or self._format.name_open)
        if begin:
            return (yield from self._source.at_mark(begin))
        if self._format.style is CallStyle.PYTHONIC:
            return bool(separator)
        return char == "{" and self._format.style is CallStyle.JSON

    def _drop(self, marks: Marks, mark: str = "") -> Steps[None]:
        """Drop a mark if it stands here, even if the end of the answer cuts it off."""
        if not marks.all:
            return
        yield from self._source.skip_space()
        found = yield from marks.here(self._source)
        if found:
            yield from self._source.skip_mark(mark or found)
            self._source.hold()
            return
        if self._source.is_ended and marks.can_begin_with_rest(self._source):
            self._source.take_rest()
            self._source.hold()


def _inner_triggers(marks: CallFormat) -> list[str]:
    """Return the marks that begin calls when the model leaves out the mark `open`."""
    return [
        mark
        for mark in stripped(marks.call_open, marks.name_open)
        if len(mark) >= _MIN_DISTINCTIVE_LENGTH and not mark[0].isalnum()
    ]


def _are_marked_objects(marks: CallFormat) -> bool:
    """Return whether each call is an object with its name and arguments, between marks."""
    has_marks = bool(marks.open or marks.call_open)
    return (
        marks.style is CallStyle.JSON and has_marks and bool(marks.name_key) and not marks.is_list
    )


def _first_characters(marks: CallFormat) -> str:
    """Return the characters that calls without a mark can begin with."""
    if marks.style is CallStyle.PYTHONIC:
        return "["
    return "{[" if marks.is_list else "{"


# Parse an answer whose reasoning and calls stand between marks.

_NEWLINES = re.compile(r"[\r\n]*")
_NO_REASONING = ReasoningFormat(open="", close="")


class MarkedAnswerParser(SteppedParser):
    """Parse reasoning at the beginning of an answer, then text and calls.

    Args:
        source: the answer.
        writer: takes the events.
        reasoning: marks of the reasoning; None: the format has no reasoning.
        calls: parser of the calls; None: calls are text.
        begins_in_reasoning: the prompt ends within the reasoning.
        parses_reasoning: write reasoning as reasoning; otherwise as text, with its marks.
    """

    def __init__(
        self,
        source: AnswerInput,
        writer: EventWriter,
        reasoning: ReasoningFormat | None,
        calls: CallsParser | None,
        begins_in_reasoning: bool,
        parses_reasoning: bool,
    ) -> None:
        super().__init__(source, writer)
        self._calls = calls
        marks = reasoning or _NO_REASONING
        self._opens = marks_of(*stripped(marks.open, *marks.open_variants))
        self._closes = marks_of(*stripped(marks.close, *marks.close_variants))
        self._begins_in_reasoning = begins_in_reasoning and bool(self._closes.all)
        self._parses_reasoning = parses_reasoning
        dropped = stripped(marks.text_open, marks.text_close) if parses_reasoning else []
        self._text_marks = marks_of(*dropped, *(calls.triggers.all if calls else ()))
        self._dropped = frozenset(dropped)
        self._text = TextAroundCalls(writer) if calls else TextSink(writer)

    def _answer(self) -> Steps[None]:
        try:
            space = yield from self._reasoning()
            yield from self._answer_proper(space)
        except EndOfAnswer:
            pass
        self._text.finish()

    # --- the reasoning ------------------------------------------------------------------------

    def _reasoning(self) -> Steps[str]:
        """Parse the reasoning and return the whitespace before an answer that has none."""
        space = yield from self._space_before_answer()
        mark = yield from self._opens.here(self._source)
        if not mark and not self._begins_in_reasoning:
            return space
        self._source.take(len(mark))
        if not self._parses_reasoning:
            raw = TextSink(self._writer)
            raw.write(space + mark)
            raw.write(self._source.take(len((yield from self._copy(self._closes, raw)))))
            return ""
        yield from self._skip_newlines()
        close = yield from self._copy(self._closes, ReasoningSink(self._writer))
        self._source.take(len(close))
        yield from self._skip_newlines()
        return ""

    def _space_before_answer(self) -> Steps[str]:
        """Consume and return the whitespace that may stand before the reasoning."""
        if not self._opens.all:
            return ""
        pieces: list[str] = []
        try:
            yield from self._source.skip_space(pieces.append)
        except EndOfAnswer:
            if not (self._begins_in_reasoning and self._parses_reasoning):
                self._writer.text("".join(pieces))
            raise
        return "".join(pieces)

    def _skip_newlines(self) -> Steps[None]:
        while True:
            self._source.take_match(_NEWLINES)
            if self._source.at < len(self._source.text):
                return
            yield from self._source.more()

    # --- text and calls -----------------------------------------------------------------------

    def _answer_proper(self, space: str) -> Steps[None]:
        """Parse the text and the calls after the reasoning; the whitespace belongs to the text."""
        self._text.write(space)
        calls = self._calls
        if calls is not None and calls.first_characters:
            char = yield from self._source.skip_space(self._text.write)
            if char in calls.first_characters:
                yield from self._parse_calls("", calls)
        while True:
            mark = yield from self._copy(self._text_marks, self._text)
            if calls is None or mark in self._dropped:
                self._source.take(len(mark))
            else:
                yield from self._parse_calls(mark, calls)

    def _parse_calls(self, mark: str, calls: CallsParser) -> Steps[None]:
        """Parse calls that begin at a mark, and write as text what turns out to be none."""
        num_calls = self._writer.num_calls
        rest = yield from calls.parse(mark)
        if self._writer.num_calls > num_calls:
            self._text.after_calls()
        self._text.write(rest)


# Parse the messages that gpt-oss writes to its channels.

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


class AnswerParser(Protocol):
    """Parse one answer, piece by piece, however it is cut into pieces."""

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended at a call that repeats an earlier one."""

    def push(self, text: str) -> list[AnswerEvent]:
        """Take the next piece of the answer and return what is certain now."""

    def finish(self) -> list[AnswerEvent]:
        """Return the rest; nothing may be pushed afterwards."""


def make_parser(
    answer_format: AnswerFormat,
    *,
    tools: ToolSchemas | None = None,
    begins_in_reasoning: bool = False,
    parses_reasoning: bool = True,
    max_calls: int | None = None,
    ends_at_repeat: bool = False,
    takes_unmarked: bool = False,
) -> AnswerParser:
    """Return a parser for one answer.

    Args:
        answer_format: how the model marks reasoning and calls.
        tools: the tools of the request; None or empty: calls are text.
        begins_in_reasoning: the prompt ends within the reasoning.
        parses_reasoning: separate the reasoning from the text. Otherwise it is part of the text,
            with its marks; marks of calls within it still begin no call.
        max_calls: number of calls after which further ones are dropped; None: no limit.
        ends_at_repeat: a call that repeats an earlier one ends the answer, and is dropped.
        takes_unmarked: a JSON object without the marks of calls is a call of a tool of the request
            if it has the form of one. False for an answer that a grammar makes.
    """
    source, writer = AnswerInput(), EventWriter(max_calls, ends_at_repeat)
    calls = answer_format.calls
    if calls is not None and calls.style is CallStyle.HARMONY:
        return HarmonyParser(source, writer, tools, begins_in_reasoning, parses_reasoning)
    calls_parser = None
    if calls is not None and tools:
        calls_parser = CallsParser(CallContext(source, writer, calls, tools), takes_unmarked)
    return MarkedAnswerParser(
        source,
        writer,
        answer_format.reasoning,
        calls_parser,
        begins_in_reasoning,
        parses_reasoning,
    )


def parse_answer(parser: AnswerParser, text: str) -> ParsedAnswer:
    """Parse a whole answer at once."""
    answer = ParsedAnswer()
    answer.add(parser.push(text))
    answer.add(parser.finish())
    return answer
