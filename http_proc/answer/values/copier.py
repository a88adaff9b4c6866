"""Copy values from an answer as JSON, while they arrive."""

import json
import re
from collections.abc import Callable

from http_proc.answer.marks import AnswerInput, EndOfAnswer, Steps, UnexpectedText, Write, marks_of
from http_proc.answer.values.scalars import scalar_to_json
from http_proc.answer.values.strings import ESCAPING_QUOTES, copy_string
from http_proc.answer.values.syntax import PYTHON, Brackets, ValueSyntax

# Objects and lists nest no deeper; decoders of JSON allow several hundred levels.
MAX_DEPTH = 128

_BARE_KEY = re.compile(r"""[^\s,:=\[\]{}()"']+""")


def no_types(_: str) -> frozenset[str]:
    """Return no types, for arguments without a schema."""
    return frozenset()


class ValueCopier:
    """Copy values from the answer and write them as JSON.

    JSON is written as the model wrote it, with two exceptions: control characters and backslashes
    that JSON does not allow in strings are escaped, and commas before closing brackets are dropped.

    Args:
        source: the answer.
        syntax: how the values are written.
        write: takes pieces of JSON.
        types: returns the JSON types of a key of the outermost object; empty: unknown.
    """

    def __init__(
        self,
        source: AnswerInput,
        syntax: ValueSyntax,
        write: Write,
        types: Callable[[str], frozenset[str]] = no_types,
    ) -> None:
        self._source = source
        self._syntax = syntax
        self._write = write
        self._types = types
        self._key = ""
        self._quotes = marks_of(*syntax.quotes)

    def value(self) -> Steps[None]:
        """Copy one value.

        Raises:
            UnexpectedText: The text is not a value. What was valid is written.
        """
        yield from self._copy([], needs_value=True)

    def arguments(self, brackets: Brackets) -> Steps[None]:
        """Copy an object whose opening bracket is consumed."""
        self._write(brackets.json[0])
        frames = [brackets]
        yield from self._copy(frames, needs_value=(yield from self._enter(brackets)))

    def _copy(self, frames: list[Brackets], needs_value: bool) -> Steps[None]:
        """Copy up to the end of the outermost of the open objects and lists.

        Args:
            frames: the open objects and lists, outermost first.
            needs_value: a value follows; otherwise a closing bracket.
        """
        while True:
            if needs_value:
                char = yield from self._source.skip_space(self._write)
                brackets = self._syntax.brackets.get(char)
                if brackets is not None:
                    if len(frames) == MAX_DEPTH:
                        raise UnexpectedText
                    self._source.take(1)
                    self._write(brackets.json[0])
                    frames.append(brackets)
                    needs_value = yield from self._enter(brackets)
                    continue
                yield from self._scalar(char, is_argument=len(frames) == 1)
            while frames and not (yield from self._goes_on(frames[-1])):
                self._source.take(1)
                self._write(frames.pop().json[1])
            if not frames:
                return
            needs_value = True

    def _enter(self, brackets: Brackets) -> Steps[bool]:
        """Copy the first key and return True, or return False if the brackets are empty."""
        char = yield from self._source.skip_space(self._write)
        if char == brackets.closing:
            return False
        if brackets.colon:
            yield from self._copy_key(char, brackets.colon)
        return True

    def _goes_on(self, brackets: Brackets) -> Steps[bool]:
        """Copy the comma and the next key, or return False before the closing bracket."""
        char = yield from self._source.skip_space(self._write)
        if char == brackets.closing:
            return False
        if char != ",":
            raise UnexpectedText
        self._source.take(1)
        spaces: list[str] = []
        char = yield from self._source.skip_space(spaces.append)
        if char == brackets.closing:
            return False
        self._write("," + "".join(spaces))
        if brackets.colon:
            yield from self._copy_key(char, brackets.colon)
        return True

    def _copy_key(self, char: str, colon: str) -> Steps[None]:
        """Copy a key and the colon, or what stands for it, after it."""
        quote = yield from self._quote_here(char)
        if quote and self._types is no_types:
            yield from self._string(quote, self._write)
        elif quote:
            pieces: list[str] = []
            yield from self._string(quote, pieces.append)
            self._write("".join(pieces))
            self._key = json.loads("".join(pieces))
        elif self._syntax.has_bare_keys:
            self._key = yield from self._token(_BARE_KEY)
            self._write(json.dumps(self._key, ensure_ascii=False))
        else:
            raise UnexpectedText
        if (yield from self._source.skip_space(self._write)) != colon:
            raise UnexpectedText
        self._source.take(1)
        self._write(":" if colon == ":" else ": ")

    def _quote_here(self, char: str) -> Steps[str]:
        """Return the quote that stands here; empty if none does."""
        if char in ESCAPING_QUOTES:
            return char if char in self._syntax.quotes else ""
        if not self._quotes.may_begin_in(char):
            return ""
        return (yield from self._quotes.here(self._source))

    def _scalar(self, char: str, is_argument: bool) -> Steps[None]:
        """Copy a string, a number or a literal.

        Args:
            char: the first character.
            is_argument: the value is a member of the outermost object.
        """
        quote = yield from self._quote_here(char)
        if quote:
            yield from self._string(quote, self._write)
            return
        token = (yield from self._token(self._syntax.token)).rstrip()
        is_string = is_argument and self._types(self._key) == {"string"}
        value = None if is_string else scalar_to_json(token)
        if value is None and self._syntax.has_bare_strings:
            value = json.dumps(token, ensure_ascii=False)
        self._write(token if value is None else value)
        if value is None:
            raise UnexpectedText

    def _token(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Consume a token without quotes and return it.

        If the answer ends within the token, its beginning is written.
        """
        pieces = []
        try:
            while True:
                pieces.append(self._source.take_match(pattern))
                if self._source.at < len(self._source.text):
                    break
                yield from self._source.more()
        except EndOfAnswer:
            self._write("".join(pieces))
            raise
        token = "".join(pieces)
        if not token:
            raise UnexpectedText
        return token

    def _string(self, quote: str, write: Write) -> Steps[None]:
        """Copy a string in the syntax of the values."""
        return copy_string(self._source, quote, write, self._syntax.has_python_escapes)


def to_json(text: str) -> str | None:
    """Return a value in JSON or Python as JSON, or None if the text is not one value."""
    source = AnswerInput()
    source.push(f"{text.strip()}\n")
    source.is_ended = True
    pieces: list[str] = []
    try:
        for _ in ValueCopier(source, PYTHON, pieces.append).value():
            pass
    except (UnexpectedText, EndOfAnswer):
        return None
    return None if source.text[source.at :].strip() else "".join(pieces)
