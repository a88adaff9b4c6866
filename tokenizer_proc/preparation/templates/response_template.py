"""Read the marks of answers from a tokenizer's `response_template`.

The form is that of transformers (utils/chat_parsing): fields of an answer, each with the texts that
open and close it, as text or as an expression, and the parser of its content.
"""

import re
from typing import Any, NamedTuple

from quadriga.answer_format import CallFormat, CallStyle, ReasoningFormat

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_NAMED_GROUP = re.compile(r"\(\?P<(\w+)>(?:\\.|\[[^\]]*\]|[^()\\])*\)")
_ESCAPED = re.compile(r"\\([^A-Za-z0-9])")
_METACHARACTERS = set(".^$*+?{}[]()|")
_NOT_LITERAL = "\0"


class ResponseMarks(NamedTuple):
    """The marks that a `response_template` gives; None: it gives none in a form that is known."""

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None


def read_response_template(config: dict[str, Any]) -> ResponseMarks:
    """Return the marks of `response_template` in a tokenizer_config.json."""
    template = config.get("response_template")
    fields = template.get("fields") if isinstance(template, dict) else None
    if not isinstance(fields, dict):
        return ResponseMarks()
    calls = fields.get("tool_calls")
    reasoning = next((fields[name] for name in _REASONING_FIELDS if name in fields), None)
    return ResponseMarks(
        _read_calls(calls) if isinstance(calls, dict) else None,
        _read_reasoning(reasoning) if isinstance(reasoning, dict) else None,
    )


def _read_reasoning(field: dict[str, Any]) -> ReasoningFormat | None:
    opening, close = _mark(field, "open"), _mark(field, "close")
    if not opening or not close or len(opening) > 1 or len(close) > 1:
        return None
    return ReasoningFormat(open=opening[0].strip(), close=close[0].strip())


def _read_calls(field: dict[str, Any]) -> CallFormat | None:
    opening, close = _mark(field, "open"), _mark(field, "close") or [""]
    if not opening or len(close) > 1:
        return None
    content, arguments = field.get("content", "text"), field.get("content_args") or {}
    name_keys = _transformed(field.get("transform"))
    if len(opening) == 1 and content == "json" and name_keys is not None:
        return CallFormat(
            style=CallStyle.JSON,
            open=opening[0].strip(),
            close=close[0].strip(),
            is_list=bool(field.get("transform_each")),
            name_key=name_keys[0],
            arguments_key=name_keys[1],
        )
    if len(opening) != 2:
        return None
    before, after = opening
    if content == "json":
        return _read_named(before, after, close[0], arguments)
    if content == "xml-inline":
        return _read_tagged(before, after, close[0], arguments)
    return None


def _read_named(
    before: str, after: str, close: str, arguments: dict[str, Any]
) -> CallFormat | None:
    """Return the marks of a name before an object, whose quotes may be marks."""
    quotes = arguments.get("string_delims") or []
    if not quotes:
        return CallFormat(
            style=CallStyle.NAMED_JSON, open=before.strip(), name_close=after, close=close.strip()
        )
    opens_and_closes = {text for pair in quotes for text in pair}
    if len(opens_and_closes) != 1:
        return None
    return CallFormat(
        style=CallStyle.QUOTED,
        open=before.strip(),
        close=close.strip(),
        quote=opens_and_closes.pop(),
    )


def _read_tagged(
    before: str, after: str, close: str, arguments: dict[str, Any]
) -> CallFormat | None:
    """Return the marks of a name before arguments between tags."""
    parts = _literals(str(arguments.get("tag_pattern", "")), ("key", "value"))
    if parts is None:
        return None
    key_open, key_close, value_close = parts
    return CallFormat(
        style=CallStyle.TAGGED,
        open=before.strip(),
        close=close.strip(),
        name_close=after,
        key_open=key_open,
        key_close=key_close,
        value_close=value_close,
    )


def _mark(field: dict[str, Any], name: str) -> list[str] | None:
    """Return a mark, or the two texts around the name of the function; None if it is no text."""
    literal = field.get(name)
    if isinstance(literal, list):
        literal = literal[0] if literal else None
    if isinstance(literal, str):
        return [literal]
    pattern = field.get(f"{name}_pattern")
    if not isinstance(pattern, str):
        return None
    groups = ("name",) if _NAMED_GROUP.search(pattern) else ()
    return _literals(pattern, groups)


def _literals(pattern: str, groups: tuple[str, ...]) -> list[str] | None:
    """Return the texts around the named groups of an expression; None if it has other parts."""
    if tuple(_NAMED_GROUP.findall(pattern)) != groups:
        return None
    parts = [_literal(part) for part in _NAMED_GROUP.sub(_NOT_LITERAL, pattern).split(_NOT_LITERAL)]
    texts = [part for part in parts if part is not None]
    return texts if len(texts) == len(parts) else None


def _literal(pattern: str) -> str | None:
    """Return the text that an expression matches, without optional whitespace, if it is one."""
    pattern = pattern.replace(r"\s*", "").replace(r"\n", "\n")
    plain = _ESCAPED.sub("", pattern)
    if _METACHARACTERS & set(plain) or "\\" in plain:
        return None
    return _ESCAPED.sub(r"\1", pattern)


def _transformed(transform: Any) -> tuple[str, str] | None:
    """Return the keys of name and arguments in the content of a call."""
    if isinstance(transform, list) and len(transform) == 1:
        transform = transform[0]
    if transform is None:
        return "name", "arguments"
    function = transform.get("function", transform) if isinstance(transform, dict) else None
    if not isinstance(function, dict):
        return None
    keys = [_content_key(function.get(name)) for name in ("name", "arguments")]
    return (keys[0], keys[1]) if keys[0] and keys[1] else None


def _content_key(placeholder: Any) -> str:
    """Return the key of a placeholder such as {content.name} or {name}."""
    found = re.fullmatch(r"\{(?:content\.)?(\w+)\}", str(placeholder))
    return found[1] if found else ""
