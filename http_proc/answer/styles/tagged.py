"""Parse calls whose arguments stand between marks, as text."""

import json

from http_proc.answer.marks import EndOfAnswer, Steps, UnexpectedText, Write, first_part, marks_of
from http_proc.answer.styles.call_context import CallContext
from http_proc.answer.values.copier import to_json
from http_proc.answer.values.strings import escaped

_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_UNTYPED = frozenset(("object", "array", "boolean", "null", "integer", "number"))


class TaggedCalls:
    """Parse calls such as <function=f><parameter=a>1</parameter></function>.

    Text between the arguments is dropped. A value becomes JSON of a type that the
    tool's schema allows, if it can be read as one, otherwise a string.
    """

    def __init__(self, context: CallContext) -> None:
        self._context = context
        self._source = context.source
        marks = context.marks
        self._call_ends = marks_of(
            *map(first_part, (marks.call_close, marks.close, *marks.close_variants))
        )
        self._parts = marks_of(first_part(marks.key_open), *self._call_ends.all)
        name_close = first_part(marks.name_close)
        self._name_ends = marks_of(name_close) if name_close else self._parts
        self._string_key_close = marks.string_key_close.strip()
        self._key_close = marks.key_close
        key_end = marks.key_close.strip() if self._string_key_close else first_part(marks.key_close)
        self._key_ends = marks_of(key_end, self._string_key_close)
        self._value_ends = marks_of(first_part(marks.value_close))

    def call(self, needs_known_name: bool) -> Steps[None]:
        """Parse one call."""
        marks, writer = self._context.marks, self._context.writer
        if not (yield from self._source.skip_mark(marks.name_open)):
            raise UnexpectedText
        name, _ = yield from self._context.read_name(self._name_ends)
        yield from self._source.skip_mark(marks.name_close)
        yield from self._source.skip_space()
        if not (yield from self._parts.here(self._source)):
            raise UnexpectedText
        self._context.begin(name, needs_known_name)
        separator = "{"
        while True:
            mark = yield from self._parts.copy_before(self._source)
            if mark in self._call_ends.all:
                break
            yield from self._source.skip_mark(marks.key_open)
            separator = yield from self._argument(name, separator)
        writer.arguments("{}" if separator == "{" else "}")
        writer.end_call()

    def _argument(self, tool: str, separator: str) -> Steps[str]:
        """Parse an argument after `key_open` and return what stands before the next."""
        writer = self._context.writer
        key, is_string = yield from self._key()
        types = self._context.tools.types(tool, key)
        writer.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        if is_string or types == {"string"}:
            writer.arguments('"')
            yield from self._copy_value(lambda text: writer.arguments(escaped(text)))
            writer.arguments('"')
            return ", "
        pieces: list[str] = []
        try:
            yield from self._copy_value(pieces.append)
        except EndOfAnswer:
            writer.arguments("".join(pieces))
            raise
        writer.arguments(_converted("".join(pieces), types))
        return ", "

    def _key(self) -> Steps[tuple[str, bool]]:
        """Consume the name of an argument and return it, and whether its value is a string."""
        key, mark = yield from self._context.read_name(self._key_ends)
        if self._string_key_close:
            self._source.take(len(mark))
        else:
            yield from self._source.skip_mark(self._key_close)
        return key, mark == self._string_key_close

    def _copy_value(self, write: Write) -> Steps[None]:
        """Consume a value and the mark after it, and write it without the newlines of the marks."""
        if self._key_close.endswith("\n") and (yield from self._source.peek()) == "\n":
            self._source.take(1)
        value_close = self._context.marks.value_close
        if value_close.startswith("\n"):
            write = _WithoutLastNewline(write).write
        yield from self._value_ends.copy_before(self._source, write)
        yield from self._source.skip_mark(value_close)


class _WithoutLastNewline:
    """Write text, without the newline at its end."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._newline = ""

    def write(self, text: str) -> None:
        """Write a piece."""
        text = self._newline + text
        self._newline = "\n" if text.endswith("\n") else ""
        self._write(text.removesuffix("\n"))


def _converted(text: str, types: frozenset[str]) -> str:
    """Return the text as a JSON value of one of the types, otherwise as a JSON string.

    Without types, every type but a string is tried first. The fraction of an integer may be zeros.
    """
    value = to_json(text)
    if value is not None:
        kind = _KINDS.get(value[0], "number")
        if kind == "number" and (value.isdigit() or float(value).is_integer()):
            kind = "integer"
        accepted = types or _UNTYPED
        if kind in accepted or (kind == "integer" and "number" in accepted):
            return value
    return json.dumps(text, ensure_ascii=False)
