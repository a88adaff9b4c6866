"""Parse calls that are a name, a mark, and the arguments as a JSON object."""

import re

from http_proc.answer.marks import Steps, UnexpectedText, first_part, marks_of
from http_proc.answer.styles.call_context import CallContext
from http_proc.answer.styles.json_calls import JsonCalls
from http_proc.answer.values.copier import ValueCopier
from http_proc.answer.values.syntax import JSON, OBJECT

_ID = re.compile(r"[\w-]+")


class NamedJsonCalls:
    """Parse calls such as f[ARGS]{"a": 1}.

    If the format has no mark before the name, a call may also be an object with both.
    """

    def __init__(self, context: CallContext) -> None:
        self._context = context
        marks = context.marks
        self._objects = JsonCalls(context)
        self._name_ends = marks_of(first_part(marks.name_close), first_part(marks.id_open), "{")
        self._id_ends = marks_of(first_part(marks.name_close), "{")

    def call(self, needs_known_name: bool) -> Steps[None]:
        """Parse one call."""
        source, marks = self._context.source, self._context.marks
        if not (yield from source.skip_mark(marks.name_open)):
            raise UnexpectedText
        if (yield from source.skip_space()) == "{" and not marks.name_open:
            yield from self._objects.call(needs_known_name)
            return
        name, end = yield from self._context.read_name(self._name_ends)
        name, call_id = self._split_name(name)
        if end == first_part(marks.id_open):
            source.take(len(end))
            text, end = yield from self._context.read_name(self._id_ends)
            call_id = text if _ID.fullmatch(text) else ""
        if end != "{":
            yield from source.skip_mark(marks.name_close)
        if (yield from source.skip_space()) != "{":
            raise UnexpectedText
        self._context.begin(name, needs_known_name, call_id)
        source.take(1)
        yield from ValueCopier(source, JSON, self._context.writer.arguments).arguments(OBJECT)
        self._context.writer.end_call()

    def _split_name(self, text: str) -> tuple[str, str]:
        """Return the name and the id of a call. The id is empty if no number follows the name."""
        marks = self._context.marks
        if marks.index_open:
            name, index_open, index = text.rpartition(marks.index_open)
            if index_open and index.isdigit():
                return name, f"{marks.name_open}{text}"
        return text, ""
