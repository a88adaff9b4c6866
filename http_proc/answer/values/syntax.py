"""Describe how values are written: in JSON, in Python, or with bare keys."""

import re
from typing import NamedTuple

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
