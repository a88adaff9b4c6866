"""The parser of answers, for the format of a model.

Answers of most models have reasoning and calls between marks; gpt-oss writes messages to channels
(harmony). First come the ways in which models write tool calls, one parser for each, then the calls
of an answer, then answers as a whole.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from http_proc.answer.events import EventWriter, HeldCalls, ParsedAnswer, ParsedCall
from http_proc.answer.marks import (
    SPACE,
    AnswerInput,
    AnswerParser,
    EndOfAnswer,
    Marks,
    ReasoningSink,
    StepRunner,
    Steps,
    TextAroundCalls,
    TextSink,
    UnexpectedText,
    Write,
    first_part,
    marks_of,
    stripped,
)
from http_proc.answer.values import (
    JSON,
    KEYWORD_ARGUMENTS,
    OBJECT,
    PYTHON_ARGUMENTS,
    ValueCopier,
    copy_string,
    escaped,
    quoted,
    to_json,
)
from quadriga.server.answer_format import AnswerFormat, CallFormat, CallStyle, ReasoningFormat

MAX_REFERENCES = 8

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class ToolSchemas(dict[str, Mapping[str, Any]]):
    """The JSON schema of the arguments of each tool of a request, by the tool's name."""

    def types(self, tool: str, argument: str) -> frozenset[str]:
        """Return the JSON types that an argument may have; empty if the schema does not say."""
        schema = self.get(tool, {})
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return frozenset()
        return frozenset(_types(properties.get(argument), schema, MAX_REFERENCES))


def _types(schema: Any, root: Mapping[str, Any], references: int) -> Iterable[str]:
    """Return the types of a schema.

    Args:
        schema: the schema; one of another type than an object has no types.
        root: the schema that references point into.
        references: how many further references and alternatives are followed.
    """
    if not isinstance(schema, Mapping) or references == 0:
        return ()
    named = schema.get("type")
    if isinstance(named, str):
        return (named,)
    if isinstance(named, list):
        return [name for name in named if isinstance(name, str)]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return [
            _TYPES.get(type(value), "array" if isinstance(value, list) else "object")
            for value in values
        ]
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            return [name for part in schema[key] for name in _types(part, root, references - 1)]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return _types(target, root, references - 1)
    return ()


MAX_NAME_LENGTH = 256

_NAME = re.compile(r"[\w.\-/:$]+")


class CallContext(NamedTuple):
    """Hold the input, the output, the marks and the tools of a parser of tool calls.

    Attributes:
        source: the answer.
        writer: takes the events.
        marks: marks of the calls.
        tools: the tools of the request.
        can_return: the text of a call that has begun can still be returned as text.
    """

    source: AnswerInput
    writer: EventWriter
    marks: CallFormat
    tools: ToolSchemas
    can_return: bool = False

    def begin(self, name: str, needs_known_name: bool, call_id: str = "") -> None:
        """Begin a call. Unless `can_return`, its text can no longer be returned as text.

        Raises:
            UnexpectedText: the name is not valid, or it is of no tool of the request and must be.
        """
        if len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):
            raise UnexpectedText
        if needs_known_name and name not in self.tools:
            raise UnexpectedText
        if not self.can_return:
            self.source.release()
        self.writer.begin_call(name, call_id)

    def read_name(self, ends: Marks) -> Steps[tuple[str, str]]:
        """Consume the text before a mark, and return the stripped text and the mark.

        The mark is not consumed.

        Raises:
            UnexpectedText: the text is too long for a name.
        """
        pieces: list[str] = []
        length = 0
        while True:
            num_read, mark = ends.find(self.source)
            if length + num_read > MAX_NAME_LENGTH:
                self.source.take(MAX_NAME_LENGTH - length)
                raise UnexpectedText
            length += num_read
            pieces.append(self.source.take(num_read))
            if mark:
                return "".join(pieces).strip(), mark
            yield from self.source.more()

    def types_of(self, tool: str) -> Callable[[str], frozenset[str]]:
        """Return the function that returns the types of an argument of the tool."""
        return lambda argument: self.tools.types(tool, argument)


class CallBody(Protocol):
    """Parse one call, without the marks around it."""

    def call(self, needs_known_name: bool) -> Steps[None]:
        """Parse a call that begins here, after whitespace.

        Raises:
            UnexpectedText: the text is not a call, or the arguments of the begun call are broken.
        """


_ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
# An object without a mark that begins with another key is text, which need not be held back.
_OTHER_KEYS = frozenset(("type", "id"))


class JsonCalls:
    """Parse calls such as {"name": "f", "arguments": {"a": 1}}.

    The arguments may stand before the name, be a string of JSON, be null, or be missing.

    Args:
        context: input, output, marks and tools.
        is_exact: the arguments may not be missing, and nothing may follow them that is no part of
            a call.
    """

    def __init__(self, context: CallContext, is_exact: bool = False) -> None:
        self._context = context
        self._is_exact = is_exact
        self._source = context.source
        self._name_key = context.marks.name_key
        self._argument_keys = _ARGUMENT_KEYS | {context.marks.arguments_key}

    def call(self, needs_known_name: bool) -> Steps[None]:
        """Parse one object."""
        yield from self._expect("{")
        arguments = _Arguments(self._context, needs_known_name)
        has_more = (yield from self._source.skip_space()) != "}"
        while has_more:
            key = yield from self._short_string()
            yield from self._expect(":")
            yield from self._member(key, arguments)
            if arguments.are_complete and not self._is_exact:
                break
            has_more = yield from self._goes_on()
        if not has_more:
            self._source.take(1)
        if not arguments.are_complete:
            if self._is_exact:
                raise UnexpectedText
            arguments.end_without()
        elif has_more:
            yield from self._rest()

    def _member(self, key: str, arguments: "_Arguments") -> Steps[None]:
        if not self._name_key and not arguments.name:
            arguments.set_name(key)
            yield from arguments.copy()
        elif key == self._name_key and not arguments.name:
            arguments.set_name((yield from self._short_string()))
        elif key in self._argument_keys and not arguments.has_begun:
            yield from arguments.copy()
        elif arguments.needs_known_name and key not in _OTHER_KEYS:
            raise UnexpectedText
        else:
            yield from ValueCopier(self._source, JSON, _drop).value()

    def _goes_on(self) -> Steps[bool]:
        """Consume a comma and return True, or return False before the closing brace."""
        char = yield from self._source.skip_space()
        if char == "}":
            return False
        yield from self._expect(",")
        return True

    def _rest(self) -> Steps[None]:
        """Drop the rest of the object, after its call has ended."""
        try:
            while (yield from self._goes_on()):
                yield from ValueCopier(self._source, JSON, _drop).value()
                yield from self._expect(":")
                yield from ValueCopier(self._source, JSON, _drop).value()
        except UnexpectedText:
            return
        self._source.take(1)

    def _expect(self, char: str) -> Steps[None]:
        if (yield from self._source.skip_space()) != char:
            raise UnexpectedText
        self._source.take(1)

    def _short_string(self) -> Steps[str]:
        """Consume a string that is a key or a name and return it."""
        if (yield from self._source.skip_space()) != '"':
            raise UnexpectedText
        pieces: list[str] = []
        # A character takes up to 6 characters as an escape.
        num_left = MAX_NAME_LENGTH * 6

        def write(text: str) -> None:
            nonlocal num_left
            num_left -= len(text)
            if num_left < 0:
                self._source.give_back(None if "\\" in text else -num_left)
                raise UnexpectedText
            pieces.append(text)

        yield from copy_string(self._source, '"', write)
        return str(json.loads("".join(pieces)))


class _Arguments:
    """Write the arguments of one call, which are held back until the name is known.

    Attributes:
        needs_known_name: the object is a call only if its name is of a tool of the request.
        name: the name of the call; empty: it has not arrived.
        has_begun: the arguments have begun to arrive.
        are_complete: the call has ended.
    """

    def __init__(self, context: CallContext, needs_known_name: bool) -> None:
        self.name = ""
        self.has_begun = False
        self.are_complete = False
        self._context = context
        self.needs_known_name = needs_known_name
        self._pieces: list[str] = []

    def set_name(self, name: str) -> None:
        """Set the name of the call, and write the call if its arguments have arrived.

        Raises:
            UnexpectedText: the name is empty, or it is of no tool and must be.
        """
        if not name or (self.needs_known_name and name not in self._context.tools):
            raise UnexpectedText
        self.name = name
        if self.has_begun:
            self._begin()
            self._end()

    def end_without(self) -> None:
        """End a call without arguments at the end of its object.

        Raises:
            UnexpectedText: the object has no name either, or lacks the marks of a format that has
                marks, so that it is not a call.
        """
        marks = self._context.marks
        if not self.name or (self.needs_known_name and (marks.open or marks.call_open)):
            raise UnexpectedText
        self._write("{}")
        self._end()

    def copy(self) -> Steps[None]:
        """Copy the arguments, which begin here."""
        source = self._context.source
        char = yield from source.skip_space()
        self.has_begun = True
        if char == "{":
            source.take(1)
            yield from ValueCopier(source, JSON, self._write).arguments(OBJECT)
        elif char == '"':
            yield from self._unwrap()
        elif char == "n":
            yield from ValueCopier(source, JSON, _drop).value()
            self._write("{}")
        else:
            raise UnexpectedText
        if self.name:
            self._end()

    def _unwrap(self) -> Steps[None]:
        """Copy arguments that are a string of JSON."""
        inner = _UnwrappedObject(self._write)

        def write(piece: str) -> None:
            if piece == '"':  # The quotes around the string are pieces of their own.
                return
            try:
                inner.push(json.loads(f'"{piece}"'))
            except UnexpectedText:
                source.give_back(None if "\\" in piece else inner.num_left)
                raise

        source = self._context.source
        yield from copy_string(source, '"', write)
        if inner.is_empty:
            self._write("{}")
        else:
            inner.finish()

    def _write(self, text: str) -> None:
        if not self.name:
            self._pieces.append(text)
            return
        if not self._context.writer.is_in_call:
            self._begin()
        self._context.writer.arguments(text)

    def _begin(self) -> None:
        self._context.begin(self.name, self.needs_known_name)
        for piece in self._pieces:
            self._context.writer.arguments(piece)

    def _end(self) -> None:
        self._context.writer.end_call()
        self.are_complete = True


class _UnwrappedObject:
    """Copy a JSON object whose text arrives in pieces.

    Attributes:
        is_empty: nothing has arrived.
    """

    def __init__(self, write: Write) -> None:
        self.is_empty = True
        self._write = write
        self._source = AnswerInput()
        self._runner = StepRunner(self._source, self._copy())

    @property
    def num_left(self) -> int:
        """Characters of the last piece that are not consumed."""
        return len(self._source.text) - self._source.at

    def push(self, text: str) -> None:
        """Take the next piece.

        Raises:
            UnexpectedText: it is not part of an object.
        """
        self.is_empty = False
        self._runner.push(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        self._check_end()

    def finish(self) -> None:
        """End the text.

        Raises:
            UnexpectedText: the object has not ended.
        """
        try:
            self._runner.finish()
        except EndOfAnswer:
            raise UnexpectedText from None
        self._check_end()

    def _check_end(self) -> None:
        """Consume whitespace after the object, which nothing else may follow."""
        if self._runner.is_done:
            self._source.take_match(SPACE)
            if self._source.has_rest:
                raise UnexpectedText

    def _copy(self) -> Steps[None]:
        if (yield from self._source.skip_space()) != "{":
            raise UnexpectedText
        self._source.take(1)
        yield from ValueCopier(self._source, JSON, self._write).arguments(OBJECT)


def _drop(_: str) -> None:
    """Discard a piece."""


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


class PythonicCalls:
    """Parse calls such as f(a=1)."""

    def __init__(self, context: CallContext) -> None:
        self._context = context
        self._name_ends = marks_of("(")

    def call(self, needs_known_name: bool) -> Steps[None]:
        """Parse one call. A call with an argument without a keyword is text."""
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


_BODIES: dict[CallStyle, Callable[[CallContext], CallBody]] = {
    CallStyle.JSON: JsonCalls,
    CallStyle.NAMED_JSON: NamedJsonCalls,
    CallStyle.TAGGED: TaggedCalls,
    CallStyle.PYTHONIC: PythonicCalls,
    CallStyle.QUOTED: QuotedCalls,
}
_LIST_STYLES = (CallStyle.JSON, CallStyle.NAMED_JSON, CallStyle.PYTHONIC)
_MIN_DISTINCTIVE_LENGTH = 4
# What models write around calls instead of the marks of their format: each mark that opens, with
# the one that closes. A Markdown block begins a line.
_BLOCKS = {"```json": "```", "```": "```"}
_TAGS = {"<tools>": "</tools>", "<function_call>": "</function_call>"}
_BLOCK_OPENS = marks_of(*_BLOCKS)
_NEWLINE = "\n"
_BLOCK_TRIGGERS = tuple(_NEWLINE + mark for mark in _BLOCKS)
_FIRST_OF_UNMARKED = "{[`"


class UnmarkedCalls:
    """Parse calls that lack the marks of their format, once it is certain that they are calls.

    A whole answer, or what stands in its first Markdown block or between other marks, is calls if
    it consists of JSON objects, or of a list of them, each with the name of a tool of the request
    and with arguments, and of nothing else. It is held back while it may still become that. Blocks
    that follow the first one at once are like it.

    Args:
        context: input, output, marks and tools.

    Attributes:
        triggers: marks that begin such calls.
    """

    def __init__(self, context: CallContext) -> None:
        self._source = context.source
        self._writer = context.writer
        marks = context.marks
        is_named = marks.style is CallStyle.JSON and marks.name_key
        self._context = context._replace(
            marks=marks if is_named else CallFormat(style=CallStyle.JSON), can_return=True
        )
        self._own_closes = marks_of(
            *map(first_part, (marks.call_close, marks.close, *marks.close_variants))
        )
        self.triggers = (*_TAGS, *_BLOCK_TRIGGERS)

    def parse(self, trigger: str) -> Steps[None]:
        """Parse calls with the marks around them, and write them.

        Args:
            trigger: the mark that stands here; empty: the answer begins here.

        Raises:
            UnexpectedText: the text is no call.
            EndOfAnswer: the answer ended before the calls.
        """
        if trigger in _TAGS:
            self._source.take(len(trigger))
            yield from self._marked(_TAGS[trigger])
            return
        if trigger:
            self._source.take(len(_NEWLINE))
        block = yield from _BLOCK_OPENS.here(self._source)
        if block:
            self.triggers = tuple(_TAGS)
        else:
            yield from self._whole_answer()
        while block:
            self._source.take(len(block))
            yield from self._marked(_BLOCKS[block])
            yield from self._source.skip_space()
            block = yield from _BLOCK_OPENS.here(self._source)

    def _marked(self, close: str) -> Steps[None]:
        """Parse calls and the mark that closes them, for which the end of the answer may stand."""
        calls = yield from self._calls()
        if not (yield from self._ends_with(marks_of(close))):
            raise UnexpectedText
        self._write(calls)

    def _whole_answer(self) -> Steps[None]:
        """Parse calls which nothing follows but a mark of the format that closes them."""
        calls = yield from self._calls()
        yield from self._ends_with(self._own_closes)
        try:
            yield from self._source.skip_space()
        except EndOfAnswer:
            self._write(calls)
            return
        raise UnexpectedText

    def _calls(self) -> Steps[list[ParsedCall]]:
        """Parse objects, or a list of them, and return them."""
        held = HeldCalls()
        objects = JsonCalls(self._context._replace(writer=held), is_exact=True)
        is_list = (yield from self._source.skip_space()) == "["
        if is_list:
            self._source.take(1)
        while True:
            yield from objects.call(needs_known_name=True)
            try:
                char = yield from self._source.skip_space()
            except EndOfAnswer:
                if is_list:
                    raise
                break
            if char != ("," if is_list else "{"):
                break
            if is_list:
                self._source.take(1)
        if is_list:
            if char != "]":
                raise UnexpectedText
            self._source.take(1)
        answer = ParsedAnswer()
        answer.add(held.take())
        return answer.calls

    def _ends_with(self, closes: Marks) -> Steps[bool]:
        """Consume a mark, even if the end of the answer cuts it off, and return whether it is one.

        The end of the answer counts as a mark.
        """
        try:
            yield from self._source.skip_space()
        except EndOfAnswer:
            return True
        found = yield from closes.here(self._source)
        self._source.take(len(found))
        if not found and self._source.is_ended and closes.can_begin_with_rest(self._source):
            self._source.take_rest()
            return True
        return bool(found)

    def _write(self, calls: list[ParsedCall]) -> None:
        """Write calls, whose text cannot be returned as text any more."""
        self._source.hold()
        for call in calls:
            self._writer.begin_call(call.name)
            self._writer.arguments(call.arguments)
            self._writer.end_call()


class CallsParser:
    """Parse calls, from the mark that opens them to the one that closes them.

    Args:
        context: input, output, marks and tools.
        takes_unmarked: `UnmarkedCalls` are calls, too.

    Attributes:
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
        self._own = marks_of(*self._opens, *_inner_triggers(marks))
        self._unmarked = UnmarkedCalls(context) if takes_unmarked else None
        self._ends = marks_of(*self._call_close.all, *self._closes.all, *self._own.all)
        is_unmarked = not (marks.open or marks.call_open or marks.name_open)
        self._own_first = _first_characters(marks) if is_unmarked else ""
        self.first_characters = self._own_first + (_FIRST_OF_UNMARKED if takes_unmarked else "")
        self._is_in_list = False
        self._is_after_call = False

    @property
    def triggers(self) -> Marks:
        """Marks that begin calls. A mark of the format itself keeps its meaning."""
        if self._unmarked is None:
            return self._own
        own = self._own.all
        return marks_of(*own, *(m for m in self._unmarked.triggers if m.strip() not in own))

    def parse(self, trigger: str) -> Steps[str]:
        """Parse calls and return the consumed text that turned out to be no call.

        Args:
            trigger: the mark that stands here; empty: calls without a mark may begin here.
        """
        self._source.hold()
        self._is_in_list = self._is_after_call = False
        try:
            if self._unmarked is not None and not (yield from self._is_own(trigger)):
                yield from self._unmarked.parse(trigger)
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

    def _is_own(self, trigger: str) -> Steps[bool]:
        """Return whether calls in the form of the format begin at a trigger, or without one."""
        if trigger:
            return trigger in self._own.all
        return (yield from self._source.peek()) in self._own_first

    def _calls(self, needs_known_name: bool) -> Steps[None]:
        """Parse calls up to the mark that closes them."""
        while True:
            yield from self._open_call()
            yield from self._call(needs_known_name)
            yield from self._drop(self._call_close, self._format.call_close)
            if not (yield from self._goes_on()):
                break
            self._is_after_call = False
        yield from self._drop(self._closes)

    def _call(self, needs_known_name: bool) -> Steps[None]:
        """Parse one call. Text after broken arguments, up to the next mark, joins them."""
        try:
            yield from self._body.call(needs_known_name)
        except UnexpectedText:
            if not self._context.writer.is_in_call:
                raise
            yield from self._ends.copy_before(self._source, self._context.writer.arguments)
            self._context.writer.leave_call()
        self._source.hold()
        self._is_after_call = True

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


def _first_characters(marks: CallFormat) -> str:
    """Return the characters that calls without a mark can begin with."""
    if marks.style is CallStyle.PYTHONIC:
        return "["
    return "{[" if marks.is_list else "{"


_NEWLINES = re.compile(r"[\r\n]*")
_NO_REASONING = ReasoningFormat(open="", close="")


class MarkedAnswerParser(AnswerParser):
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
        self._dropped = frozenset(dropped)
        self._text = TextAroundCalls(writer) if calls else TextSink(writer)

    def _answer(self) -> Steps[None]:
        try:
            space = yield from self._reasoning()
            yield from self._answer_proper(space)
        except EndOfAnswer:
            pass
        self._text.finish()

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

    def _answer_proper(self, space: str) -> Steps[None]:
        """Parse the text and the calls after the reasoning; the whitespace belongs to the text."""
        self._text.write(space)
        calls = self._calls
        if calls is not None and calls.first_characters:
            char = yield from self._source.skip_space(self._text.write)
            if char in calls.first_characters and not (
                yield from calls.triggers.here(self._source)
            ):
                yield from self._parse_calls("", calls)
        while True:
            triggers = calls.triggers.all if calls else ()
            mark = yield from self._copy(marks_of(*self._dropped, *triggers), self._text)
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


MAX_HEADER_LENGTH = 1024

_MESSAGE = marks_of("<|message|>")
_HEADER_BEGINS = marks_of("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "to=")
_ENDS = marks_of("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NAMESPACE = "functions."
_REASONING_CHANNEL = "analysis"
_SEPARATOR = "\n"


class HarmonyParser(AnswerParser):
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
            writer.end_call()
            yield from _ENDS.copy_before(self._source)  # to the end of the message
        except UnexpectedText:
            yield from _ENDS.copy_before(self._source, writer.arguments)
            writer.leave_call()


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
        takes_unmarked: `UnmarkedCalls` are calls, too, except in gpt-oss's format. False for an
            answer that a grammar makes.
    """
    source, writer = AnswerInput(), EventWriter(max_calls, ends_at_repeat)
    calls = answer_format.calls
    if calls is not None and calls.style is CallStyle.HARMONY:
        return HarmonyParser(source, writer, tools, begins_in_reasoning, parses_reasoning)
    calls_parser = None
    if calls is not None and tools:
        calls_parser = CallsParser(CallContext(source, writer, calls, tools), takes_unmarked)
    return MarkedAnswerParser(
        source, writer, answer_format.reasoning, calls_parser, begins_in_reasoning, parses_reasoning
    )


def parse_answer(parser: AnswerParser, text: str) -> ParsedAnswer:
    """Parse a whole answer at once."""
    answer = ParsedAnswer()
    answer.add(parser.push(text))
    answer.add(parser.finish())
    return answer
