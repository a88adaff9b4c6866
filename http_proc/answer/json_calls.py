"""Parse calls that are JSON objects with the name and the arguments."""

import json

from http_proc.answer.call_context import MAX_NAME_LENGTH, CallContext
from http_proc.answer.marks import AnswerInput, Steps
from http_proc.answer.values import JSON, OBJECT, UnexpectedText, ValueCopier

_ARGUMENT_KEYS = frozenset(("arguments", "parameters"))


class JsonCalls:
    """Parse {"name": "f", "arguments": {"a": 1}}.

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
        num_left = MAX_NAME_LENGTH * 6  # every character may be an escape

        def write(text: str) -> None:
            nonlocal num_left
            num_left -= len(text)
            if num_left < 0:
                raise UnexpectedText
            pieces.append(text)

        yield from ValueCopier(self._source, JSON, write).string('"', write)
        return str(json.loads("".join(pieces)))


class _Arguments:
    """The arguments of one call, which are held back until the name is known.

    Attributes:
        name: the name of the call; empty: it has not arrived.
        has_begun: the arguments have begun to arrive.
        are_complete: the call has ended.
    """

    def __init__(self, context: CallContext, needs_known_name: bool) -> None:
        self.name = ""
        self.has_begun = False
        self.are_complete = False
        self._context = context
        self._needs_known_name = needs_known_name
        self._pieces: list[str] = []
        self._are_copied = False

    def set_name(self, name: str) -> None:
        """Take the name."""
        if not name:
            raise UnexpectedText
        self.name = name
        if self.has_begun:
            self._begin()
            self._end()

    def end_without(self) -> None:
        """End a call whose object has ended: without arguments, or it is no call."""
        if not self.name:
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
        self._are_copied = True
        if self.name:
            self._end()

    def _unwrap(self) -> Steps[None]:
        """Copy arguments that are a string of JSON."""
        inner = AnswerInput()
        copying = self._copy_inner(inner)
        next(copying)
        is_done = False

        def write(escapes: str) -> None:
            nonlocal is_done
            text = json.loads(f'"{escapes}"') if escapes != '"' else ""
            inner.push(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
            if not is_done:
                is_done = next(copying, True) is True
            if is_done and inner.text[inner.at :].strip():
                raise UnexpectedText

        yield from ValueCopier(self._context.source, JSON, write).string('"', write)
        if not self._pieces and not self._context.writer.is_in_call:
            self._write("{}")
        elif not is_done:
            raise UnexpectedText

    def _copy_inner(self, inner: AnswerInput) -> Steps[None]:
        if (yield from inner.skip_space()) != "{":
            raise UnexpectedText
        inner.take(1)
        yield from ValueCopier(inner, JSON, self._write).arguments(OBJECT)

    def _write(self, text: str) -> None:
        if not self.name:
            self._pieces.append(text)
            return
        if not self._context.writer.is_in_call:
            self._begin()
        self._context.writer.arguments(text)

    def _begin(self) -> None:
        self._context.begin(self.name, self._needs_known_name)
        for piece in self._pieces:
            self._context.writer.arguments(piece)

    def _end(self) -> None:
        self._context.writer.end_call()
        self.are_complete = True


def _drop(_: str) -> None:
    """Write nothing."""
