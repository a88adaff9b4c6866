"""Copy strings as JSON, and convert the escapes that JSON does not have."""

import json
import re

from http_proc.answer.marks import AnswerInput, Steps, Write, marks_of

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
    """Wait until so many characters of an escape have arrived."""
    while len(source.text) - source.at < length:
        yield from source.more()
