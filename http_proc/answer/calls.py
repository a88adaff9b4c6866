"""Parse the calls of an answer, with the marks before, between and after them."""

from collections.abc import Callable

from http_proc.answer.marks import (
    EndOfAnswer,
    Marks,
    Steps,
    UnexpectedText,
    first_part,
    marks_of,
    stripped,
)
from http_proc.answer.styles.call_context import CallBody, CallContext
from http_proc.answer.styles.json_calls import JsonCalls
from http_proc.answer.styles.named_json import NamedJsonCalls
from http_proc.answer.styles.pythonic import PythonicCalls
from http_proc.answer.styles.quoted import QuotedCalls
from http_proc.answer.styles.tagged import TaggedCalls
from quadriga.answer_format import CallFormat, CallStyle

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
