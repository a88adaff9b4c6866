"""Parse calls that are calls of Python, and those whose objects have bare keys."""

from http_proc.answer.call_context import CallContext, first_part
from http_proc.answer.marks import Steps, marks_of
from http_proc.answer.values import (
    KEYWORD_ARGUMENTS,
    OBJECT,
    PYTHON_ARGUMENTS,
    UnexpectedText,
    ValueCopier,
    quoted,
)


class PythonicCalls:
    """Parse f(a=1)."""

    def __init__(self, context: CallContext) -> None:
        self._context = context
        self._name_ends = marks_of("(")

    def call(self, needs_known_name: bool) -> Steps[None]:
        """Parse one call. Arguments without a keyword make it text."""
        source, writer = self._context.source, self._context.writer
        name, _ = yield from self._context.read_name(self._name_ends)
        source.take(1)
        char = yield from source.skip_space()
        if not (char == ")" or char == "_" or char.isalpha()):
            raise UnexpectedText
        self._context.begin(name, needs_known_name)
        types = self._context.types_of(name)
        copier = ValueCopier(source, PYTHON_ARGUMENTS, writer.arguments, types)
        yield from copier.arguments(KEYWORD_ARGUMENTS)
        writer.end_call()


class QuotedCalls:
    """Parse f{a:1,b:<|"|>x<|"|>}."""

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
