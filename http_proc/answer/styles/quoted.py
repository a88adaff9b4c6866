"""Parse calls that are a name and an object with bare keys, whose strings stand between marks."""

from http_proc.answer.marks import Steps, UnexpectedText, first_part, marks_of
from http_proc.answer.styles.call_context import CallContext
from http_proc.answer.values.copier import ValueCopier
from http_proc.answer.values.syntax import OBJECT, quoted


class QuotedCalls:
    """Parse calls such as f{a:1,b:<|"|>x<|"|>}."""

    def __init__(self, context: CallContext) -> None:
        self._context = context
        self._name_ends = marks_of(first_part(context.marks.name_close), "{")
        self._syntax = quoted(context.marks.quote)

    def call(self, needs_known_name: bool) -> Steps[None]:
        """Parse one call."""
        source, writer, marks = self._context.source, self._context.writer, self._context.marks
        if not (yield from source.skip_mark(marks.name_open)):
            raise UnexpectedText
        name, _ = yield from self._context.read_name(self._name_ends)
        yield from source.skip_mark(marks.name_close)
        if (yield from source.skip_space()) != "{":
            raise UnexpectedText
        self._context.begin(name, needs_known_name)
        source.take(1)
        types = self._context.types_of(name)
        copier = ValueCopier(source, self._syntax, writer.arguments, types)
        yield from copier.arguments(OBJECT)
        writer.end_call()
