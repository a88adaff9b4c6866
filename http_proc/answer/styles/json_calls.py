"""Parse calls that are JSON objects with the name and the arguments."""

import json

from http_proc.answer.marks import SPACE, AnswerInput, EndOfAnswer, Steps, UnexpectedText, Write
from http_proc.answer.stepped import StepRunner
from http_proc.answer.styles.call_context import MAX_NAME_LENGTH, CallContext
from http_proc.answer.values.copier import ValueCopier
from http_proc.answer.values.strings import copy_string
from http_proc.answer.values.syntax import JSON, OBJECT

_ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
# An object without a mark that begins with another key is text, which need not be held back.
_OTHER_KEYS = frozenset(("type", "id"))


class JsonCalls:
    """Parse calls such as {"name": "f", "arguments": {"a": 1}}.

    The arguments may stand before the name, be a string of JSON, be null, or be missing.
    """

    def __init__(self, context: CallContext) -> None:
        self._context = context
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
            if arguments.are_complete:
                break
            has_more = yield from self._goes_on()
        if not arguments.are_complete:
            self._source.take(1)
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
            UnexpectedText: The name is empty, or it is of no tool and must be.
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
            UnexpectedText: The object has no name either, or lacks the marks of a format that has
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
            UnexpectedText: It is not part of an object.
        """
        self.is_empty = False
        self._runner.push(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        self._check_end()

    def finish(self) -> None:
        """End the text.

        Raises:
            UnexpectedText: The object has not ended.
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
