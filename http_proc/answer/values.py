"""Copy the values of arguments from an answer as JSON, while they arrive.

They are written in JSON, in Python, or with bare keys.
"""

import json
import math
import re
from collections.abc import Callable
from typing import NamedTuple

from http_proc.answer.marks import AnswerInput, EndOfAnswer, Steps, UnexpectedText, Write, marks_of

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LEADING_ZERO = re.compile(r"[+-]?0[0-9]")
_LITERALS = {"true": "true", "false": "false", "null": "null",
             "True": "true", "False": "false", "None": "null"}  # fmt: skip


def scalar_to_json(token: str) -> str | None:
    """Return a number or a literal as JSON, or None if the token is neither."""
    if token in _LITERALS:
        return _LITERALS[token]
    if _NUMBER.fullmatch(token):
        return token
    if token[:1].isalpha() or _LEADING_ZERO.match(token):
        return None
    try:
        return str(int(token, 0))
    except ValueError:
        pass
    try:
        number = float(token)
    except ValueError:
        return None
    return json.dumps(number) if math.isfinite(number) else None


# A backslash escapes within these quotes, not within other marks.
ESCAPING_QUOTES = ('"', "'")

_PLAIN = {quote: re.compile(rf"[^{quote}\"\\\x00-\x1f]+") for quote in ESCAPING_QUOTES}
_SHORT_ESCAPES = '"\\/bfnrt'
_HEX_DIGITS = {"u": 4, "x": 2, "U": 8}
_UNICODE_ESCAPE_LENGTH = 6
_REPLACEMENT = "\\ufffd"
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB]")
_LOW_SURROGATE = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HEX = re.compile(r"[0-9a-fA-F]+")


def escaped(text: str) -> str:
    """Return a piece of text as it stands in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def copy_string(
    source: AnswerInput, quote: str, write: Write, has_python_escapes: bool = False
) -> Steps[None]:
    """Copy a string as JSON, in pieces that contain whole escapes only.

    Args:
        source: the answer, at the quote that opens the string.
        quote: the quote. Backslashes escape in " and ', not between other marks.
        write: takes pieces of JSON, quotes included.
        has_python_escapes: the string may have the escapes of Python.
    """
    source.take(len(quote))
    write('"')
    if quote not in _PLAIN:
        yield from marks_of(quote).copy_before(source, lambda text: write(escaped(text)))
        source.take(len(quote))
        write('"')
        return
    while True:
        plain = source.take_match(_PLAIN[quote])
        if plain:
            write(plain)
        char = yield from source.peek()
        if char == "\\":
            write((yield from _escape(source, has_python_escapes)))
        elif char == quote:
            source.take(1)
            write('"')
            return
        elif char == '"' or char < " ":
            write(escaped(source.take(1)))


def _escape(source: AnswerInput, has_python_escapes: bool) -> Steps[str]:
    """Consume an escape and return it in JSON. The backslash of an unknown escape is kept."""
    yield from _need(source, 2)
    char = source.text[source.at + 1]
    if char in _SHORT_ESCAPES:
        return source.take(2)
    if has_python_escapes and char in "'\n":
        source.take(2)
        return char.strip()
    if char in _HEX_DIGITS and (has_python_escapes or char == "u"):
        length = 2 + _HEX_DIGITS[char]
        yield from _need(source, length)
        code = source.text[source.at + 2 : source.at + length]
        if char != "u" and _HEX.fullmatch(code) and int(code, 16) <= 0x10FFFF:
            source.take(length)
            return escaped(chr(int(code, 16)).encode("utf-8", "replace").decode())
        if char == "u" and _HEX.fullmatch(code):
            return (yield from _unicode_escape(source))
    source.take(1)
    return "\\\\"


def _unicode_escape(source: AnswerInput) -> Steps[str]:
    """Consume an escape of four hex digits, or two that are a surrogate pair.

    Half of a pair, which no UTF-8 text can have, becomes a replacement character.
    """
    length = _UNICODE_ESCAPE_LENGTH
    if not _HIGH_SURROGATE.match(source.text, source.at):
        escape = source.take(length)
        return _REPLACEMENT if _LOW_SURROGATE.match(escape) else escape
    yield from _need(source, length + 1)
    if source.text[source.at + length] == "\\":
        yield from _need(source, 2 * length)
        if _LOW_SURROGATE.match(source.text, source.at + length):
            return source.take(2 * length)
    source.take(length)
    return _REPLACEMENT


def _need(source: AnswerInput, length: int) -> Steps[None]:
    """Wait until `count` characters of an escape have arrived."""
    while len(source.text) - source.at < length:
        yield from source.more()


_TOKEN = re.compile(r"""[^\s,:=\[\]{}()"']+""")
_LOOSE_TOKEN = re.compile(r"[^,\[\]{}]+")


class Brackets(NamedTuple):
    """The brackets of an object or a list, and what stands for them in JSON.

    Attributes:
        closing: the closing bracket.
        json: both brackets in JSON.
        colon: stands between a key and its value; empty in a list.
    """

    closing: str
    json: str
    colon: str = ""


OBJECT = Brackets("}", "{}", ":")
KEYWORD_ARGUMENTS = Brackets(")", "{}", "=")
_LIST = Brackets("]", "[]")
_TUPLE = Brackets(")", "[]")


class ValueSyntax(NamedTuple):
    """Describe how values are written.

    Attributes:
        brackets: objects and lists, by their opening brackets.
        quotes: marks before and after a string. Backslashes escape in " and ', not in other marks.
        has_python_escapes: strings may have the escapes of Python.
        has_bare_strings: strings without spaces or commas may lack quotes.
        has_bare_keys: keys of objects may lack quotes.
        token: pattern of numbers, literals and strings without quotes.
    """

    brackets: dict[str, Brackets]
    quotes: tuple[str, ...] = ('"',)
    has_python_escapes: bool = False
    has_bare_strings: bool = False
    has_bare_keys: bool = False
    token: re.Pattern[str] = _TOKEN


JSON = ValueSyntax({"{": OBJECT, "[": _LIST})
PYTHON = ValueSyntax({"{": OBJECT, "[": _LIST, "(": _TUPLE}, ('"', "'"), has_python_escapes=True)
PYTHON_ARGUMENTS = PYTHON._replace(has_bare_strings=True, has_bare_keys=True)


def quoted(quote: str) -> ValueSyntax:
    """Return the syntax of objects with bare keys, whose strings stand between marks."""
    quotes = (quote, '"') if quote else ('"',)
    return ValueSyntax(
        JSON.brackets, quotes, has_bare_strings=True, has_bare_keys=True, token=_LOOSE_TOKEN
    )


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
            UnexpectedText: the text is not a value. What was valid is written.
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
