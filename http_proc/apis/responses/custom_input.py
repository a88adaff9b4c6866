"""Read the input of a custom tool out of the arguments of a call, while they arrive."""

import json
import re

from http_proc.apis.responses.turns import CUSTOM_ARGUMENT

_HEAD = re.compile(r'\s*\{\s*"' + CUSTOM_ARGUMENT + r'"\s*:\s*"')
_BARE_HEAD = '{"' + CUSTOM_ARGUMENT + '":"'
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_MAX_ESCAPE_CHARS = 6
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LOW_SURROGATE = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")


class CustomInputReader:
    """Decode {"input": "…"} piece by piece.

    Arguments of another form are the input as they are, at the end.
    """

    def __init__(self) -> None:
        self._held = ""
        self._has_head = False
        self._has_other_form = False
        self._has_ended = False

    def push(self, text: str) -> str:
        """Return the part of the input that is certain after the next piece of the arguments."""
        if self._has_ended:
            return ""
        self._held += text
        if self._has_other_form:
            return ""
        if not self._has_head:
            head = _HEAD.match(self._held)
            if head is None:
                self._has_other_form = not _BARE_HEAD.startswith("".join(self._held.split()))
                return ""
            self._held, self._has_head = self._held[head.end() :], True
        return self._decoded()

    def finish(self) -> str:
        """Return the rest of the input."""
        if self._has_head or self._has_ended:
            return ""
        return self._held

    def _decoded(self) -> str:
        """Remove the complete characters from the held text and return them."""
        pieces, position, held = [], 0, self._held
        while position < len(held):
            if (plain := _PLAIN.match(held, position)) is not None:
                pieces.append(plain[0])
                position = plain.end()
                continue
            if held[position] == '"':
                self._has_ended, position = True, len(held)
                break
            piece = self._escape(held[position : position + 2 * _MAX_ESCAPE_CHARS])
            if piece is None:
                break
            pieces.append(piece[0])
            position += piece[1]
        self._held = held[position:]
        return "".join(pieces)

    @staticmethod
    def _escape(text: str) -> tuple[str, int] | None:
        """Return the character of an escape and its length; None: it may go on."""
        escape = _ESCAPE.match(text)
        if escape is None:
            # A backslash before another character is no JSON: it stays as it is.
            may_go_on = re.fullmatch(r"\\(u[0-9a-fA-F]{0,3})?", text)
            return None if may_go_on else (text[0], 1)
        if not _HIGH_SURROGATE.fullmatch(escape[0]):
            return _without_surrogates(json.loads(f'"{escape[0]}"')), len(escape[0])
        rest = text[_MAX_ESCAPE_CHARS:]
        if _LOW_SURROGATE.match(rest):
            pair = text[: 2 * _MAX_ESCAPE_CHARS]
            return json.loads(f'"{pair}"'), len(pair)
        may_be_pair = re.fullmatch(r"(\\(u([dD]([c-fC-F][0-9a-fA-F]?)?)?)?)?", rest)
        return None if may_be_pair else ("\N{REPLACEMENT CHARACTER}", _MAX_ESCAPE_CHARS)


def _without_surrogates(text: str) -> str:
    return "\N{REPLACEMENT CHARACTER}" if "\ud800" <= text <= "\udfff" else text
