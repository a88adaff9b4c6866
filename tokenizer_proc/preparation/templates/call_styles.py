"""Recognise how a rendered call is written: one function for each style of calls."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from quadriga.answer_format import CallStyle
from tokenizer_proc.preparation.templates.probes import IDS, KEYS, VALUES

ARGUMENTS = dict(zip(KEYS, VALUES, strict=True))
_decoder = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call in a rendered turn.

    Attributes:
        start: position of the first character of the call proper: of its JSON object, or its name.
        end: position after the last character.
        marks: the fields of CallFormat that stand within the call.
    """

    style: CallStyle
    start: int
    end: int
    marks: dict[str, Any] = field(default_factory=dict)


def find_call(text: str, name: str) -> FoundCall | None:
    """Return the call of a function in a turn; None if it is written in no known style."""
    at = text.find(name)
    if at < 0:
        return None
    return next(filter(None, (find(text, name, at) for find in _FINDERS)), None)


def _find_json(text: str, name: str, at: int) -> FoundCall | None:
    for start in _braces_before(text, at):
        decoded = _decode(text, start)
        if decoded is None:
            continue
        value, end = decoded
        keys = _keys(value, name)
        if keys is not None and end > at:
            return FoundCall(CallStyle.JSON, start, end, keys)
    return None


def _keys(value: Any, name: str) -> dict[str, str] | None:
    """Return the keys of name and arguments, if the object is a call."""
    if not isinstance(value, dict):
        return None
    arguments = next((key for key, item in value.items() if _is_arguments(item)), None)
    if arguments == name:
        return {"name_key": ""}
    name_key = next((key for key, item in value.items() if item == name), None)
    if name_key is None or arguments is None:
        return None
    return {"name_key": name_key, "arguments_key": arguments}


def _is_arguments(value: Any) -> bool:
    if isinstance(value, str):
        decoded = _decode(value, 0)
        value = decoded and decoded[0]
    return bool(value == ARGUMENTS)


def _find_named_json(text: str, name: str, at: int) -> FoundCall | None:
    after = at + len(name)
    start = text.find("{", after)
    decoded = _decode(text, start) if start >= 0 else None
    if decoded is None or not _is_arguments(decoded[0]):
        return None
    marks = {"name_close": text[after:start]}
    for id_ in IDS:
        before, found, rest = marks["name_close"].partition(id_)
        if found:
            marks = {"id_open": before, "name_close": rest}
    return FoundCall(CallStyle.NAMED_JSON, at, decoded[1], marks)


_PYTHONIC = re.compile(rf"\({KEYS[0]}=(['\"]){VALUES[0]}\1,\s*{KEYS[1]}={VALUES[1]}\)")
_QUOTED = re.compile(rf"\{{{KEYS[0]}:(.+?){VALUES[0]}\1,\s*{KEYS[1]}:{VALUES[1]}\}}")


def _find_pythonic(text: str, name: str, at: int) -> FoundCall | None:
    found = _PYTHONIC.match(text, at + len(name))
    return FoundCall(CallStyle.PYTHONIC, at, found.end()) if found else None


def _find_quoted(text: str, name: str, at: int) -> FoundCall | None:
    found = _QUOTED.match(text, at + len(name))
    return FoundCall(CallStyle.QUOTED, at, found.end(), {"quote": found[1]}) if found else None


def _find_tagged(text: str, name: str, at: int) -> FoundCall | None:
    ends = [at + len(name)]
    gaps = []
    for word in (KEYS[0], str(VALUES[0]), KEYS[1], str(VALUES[1])):
        place = text.find(word, ends[-1])
        if place < 0:
            return None
        gaps.append(text[ends[-1] : place])
        ends.append(place + len(word))
    before_first, string_key_close, before_second, key_close = gaps
    key_open = _last_tag(common_suffix(before_first, before_second))
    value_close = before_second.removesuffix(key_open)
    if not (key_open and key_close.strip() and value_close.strip()):
        return None
    if text.startswith(value_close.rstrip(), ends[-1]):
        end = ends[-1] + len(value_close.rstrip())
    else:
        return None
    marks = {
        "name_close": before_first.removesuffix(key_open),
        "key_open": key_open,
        "key_close": key_close,
        "value_close": value_close.rstrip(),
    }
    if string_key_close != key_close:
        marks["string_key_close"] = string_key_close
    return FoundCall(CallStyle.TAGGED, at, end, marks)


_FINDERS: tuple[Callable[[str, str, int], FoundCall | None], ...] = (
    _find_json,
    _find_named_json,
    _find_pythonic,
    _find_quoted,
    _find_tagged,
)


def common_prefix(first: str, second: str) -> str:
    """Return the longest text with which both texts begin, without a part of a tag at its end."""
    text = first[: _num_equal(first, second)]
    is_cut = text.rfind("<") > text.rfind(">") and text not in (first, second)
    return text[: text.rfind("<")] if is_cut else text


def common_suffix(first: str, second: str) -> str:
    """Return the longest text with which both texts end, without a part of a tag before it."""
    text = first[len(first) - _num_equal(first[::-1], second[::-1]) :]
    before = first.removesuffix(text)
    is_cut = before.rfind("<") > before.rfind(">") and ">" in text
    return text[text.find(">") + 1 :] if is_cut else text


def _num_equal(first: str, second: str) -> int:
    """Return the number of characters with which both texts begin."""
    pairs = zip(first, second, strict=False)
    length = min(len(first), len(second))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), length)


def _last_tag(text: str) -> str:
    """Return a text from its last tag on, or without leading whitespace if it has no tag."""
    start = max(text.rfind("<"), text.rfind("["))
    return text[start:] if start >= 0 else text.lstrip()


def _braces_before(text: str, at: int) -> Iterator[int]:
    """Yield the positions of opening braces before a position, the nearest first."""
    while (at := text.rfind("{", 0, at)) >= 0:
        yield at


def _decode(text: str, start: int) -> tuple[Any, int] | None:
    """Return the JSON value at a position and the position after it."""
    try:
        return _decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
