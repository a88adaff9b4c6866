"""Derive how a model writes its answers: from its chat template, its tokenizer's files, and flags.

In this order: the marks of reasoning, the marks that a tokenizer's `response_template` names, the
derivation (`derive_format`), and what --tool-call-parser and --reasoning-parser change of it.
"""

import json
import re
from typing import Any, NamedTuple

import msgspec

from quadriga.server.answer_format import (
    KNOWN_FORMATS,
    AnswerFormat,
    CallFormat,
    CallStyle,
    ReasoningFormat,
)
from quadriga.server.config.frontend_args import AUTO, EXACT, NONE
from tokenizer_proc.preparation.templates.adapt import TemplateNeeds
from tokenizer_proc.preparation.templates.probes import (
    ARGUMENTS,
    CONTENT,
    REASONING,
    REASONING_FIELDS,
    SWITCHES,
    Prober,
    assistant,
    derive_calls,
    texts_of,
    user,
)

# Find the marks of a model's reasoning, and the variable of the template that switches it.

# The last tag of a text, and a word after it as in <|channel>thought.
_LAST_TAG = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])\s*\w*\s*$")


class _Switch(NamedTuple):
    """The variable that turns the reasoning on and off, and whether it is on by default."""

    name: str = ""
    is_default: bool = True


def derive_reasoning(
    prober: Prober, source: str, given: ReasoningFormat | None
) -> ReasoningFormat | None:
    """Return the marks of the reasoning; None if the template knows of none.

    Args:
        prober: renders the template.
        source: the template's text.
        given: the marks, if they are known.
    """
    marks = _rendered_marks(prober)
    known = _known_reasoning(source, marks)
    derived = ReasoningFormat(open=marks[0], close=marks[1]) if marks else None
    found = given or known or derived
    if found is None:
        return None
    switch = _find_switch(prober)
    return msgspec.structs.replace(found, switch=switch.name, is_default=switch.is_default)


def _rendered_marks(prober: Prober) -> tuple[str, str] | None:
    """Return what stands before and after the reasoning of an assistant's turn."""
    turn = assistant(**dict.fromkeys(REASONING_FIELDS, REASONING))
    for variables in ({}, dict.fromkeys(SWITCHES, True)):
        text = prober.text([user(), turn], variables=variables)
        before, found, after = (text or "").partition(REASONING)
        opening = _LAST_TAG.search(before)
        if found and opening and CONTENT in after:
            marks = opening.group().strip(), _first_tag(after[: after.index(CONTENT)])
            return None if _are_of_turns(prober, marks) else marks
    return None


def _are_of_turns(prober: Prober, marks: tuple[str, str]) -> bool:
    """Return whether the marks begin and end turns, so that they are none of the reasoning."""
    question = prober.text([user()]) or ""
    answer = (prober.text([user(), assistant()]) or "").partition(CONTENT)[0]
    return marks[0] in question or (marks[0] in answer and marks[1] not in answer)


def _first_tag(text: str) -> str:
    """Return a text up to the end of its first tag, without whitespace around it."""
    end = text.find(">") + 1 or text.find("]") + 1 or len(text)
    return text[:end].strip()


def _known_reasoning(source: str, marks: tuple[str, str] | None) -> ReasoningFormat | None:
    """Return the known format whose marks are all in the template, the one with the most marks."""
    formats = [known.reasoning for known in KNOWN_FORMATS.values() if known.reasoning]
    if marks is not None:
        formats = [known for known in formats if (known.open, known.close) == marks]
    present = [known for known in formats if all(mark in source for mark in _marks(known))]
    return max(present, key=lambda known: len(_marks(known)), default=None)


def _marks(known: ReasoningFormat) -> list[str]:
    marks = (known.open, known.close, known.text_open, known.text_close)
    return [mark for mark in marks if mark]


def _find_switch(prober: Prober) -> _Switch:
    plain = prober.text([user()], asks=True)
    for name in SWITCHES:
        on, off = (
            prober.text([user()], asks=True, variables={name: value}) for value in (True, False)
        )
        if None not in (on, off) and on != off:
            return _Switch(name, plain != off)
    return _Switch()


# Read the marks of answers from a tokenizer's `response_template`.
#
# The form is that of transformers (utils/chat_parsing): fields of an answer, each with the texts
# that open and close it, as text or as an expression, and the parser of its content.

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


DERIVED = "derived from the chat template"
GIVEN = "response_template of the tokenizer"
# The form of calls that is described to a model whose template has no tools.
GENERIC = "hermes"
GENERIC_SOURCE = "hermes, as the chat template has no tools"
UNKNOWN_SOURCE = "hermes, as the chat template does not show how calls are written"
# Texts of templates that do not show how calls are written, or show a part of it only.
HINTS = {"harmony": ("<|channel|>", "<|message|>", "commentary"), "lfm2": ("<|tool_list_start|>",)}


class Derivation(NamedTuple):
    """How a model writes its answers.

    Attributes:
        has_calls: the marks of calls were found in the template or among the known formats;
            otherwise they are those of GENERIC.
    """

    answer_format: AnswerFormat
    has_calls: bool


def derive_format(
    prober: Prober,
    source: str,
    needs: TemplateNeeds,
    end_marks: tuple[str, ...],
    special_tokens: frozenset[str],
    given: ResponseMarks,
) -> Derivation:
    """Return the format of answers.

    Args:
        prober: renders the template.
        source: the template's text.
        needs: what the template takes.
        end_marks: tokens that end a turn, which no answer has as text.
        special_tokens: tokens that leave no text unless asked for.
        given: marks that the tokenizer's configuration gives; they are preferred.
    """
    calls = None
    if given.calls is not None:
        calls = _named(given.calls, GIVEN)
    elif needs.takes_tools or needs.takes_calls:
        calls = _find_calls(prober, source, needs, end_marks)
    has_calls = calls is not None
    if calls is None:
        unknown = UNKNOWN_SOURCE if needs.takes_tools else GENERIC_SOURCE
        calls = _Named(KNOWN_FORMATS[GENERIC].calls, unknown)
    reasoning = derive_reasoning(prober, source, given.reasoning)
    if calls.source == "harmony":
        reasoning = KNOWN_FORMATS["harmony"].reasoning
    answer_format = AnswerFormat(
        source=calls.source,
        calls=calls.calls,
        reasoning=reasoning,
        takes_tools=needs.takes_tools,
        has_special_marks=has_special_marks(calls.calls, reasoning, special_tokens),
    )
    return Derivation(answer_format, has_calls)


class _Named(NamedTuple):
    calls: CallFormat | None
    source: str


def _named(calls: CallFormat, source: str) -> _Named:
    """Return the known format with the same marks, or the marks with their source."""
    known = _known_like(calls)
    return _Named(known.calls, known.source) if known else _Named(calls, source)


def _find_calls(
    prober: Prober, source: str, needs: TemplateNeeds, end_marks: tuple[str, ...]
) -> _Named | None:
    """Return the marks of calls and where they come from; None if they cannot be found."""
    for name, hints in HINTS.items():
        if all(hint in source for hint in hints):
            return _Named(KNOWN_FORMATS[name].calls, name)
    arguments = json.dumps(ARGUMENTS) if needs.arguments_are_text else ARGUMENTS
    found = derive_calls(prober, arguments, end_marks)
    if found.calls is not None:
        return _named(found.calls, DERIVED)
    known = _known_by_marks(source)
    if known is None or known.calls is None:
        return None
    agrees = found.style is known.calls.style if found.is_shown else True
    return _Named(known.calls, known.source) if agrees else None


def has_special_marks(
    calls: CallFormat | None, reasoning: ReasoningFormat | None, special_tokens: frozenset[str]
) -> bool:
    """Return whether a mark has a special token in it."""
    marks = [mark for part in (calls, reasoning) if part is not None for mark in texts_of(part)]
    return any(token and token in mark for mark in marks for token in special_tokens)


def _known_like(derived: CallFormat) -> AnswerFormat | None:
    """Return the known format with the same marks as the derived ones."""
    return next(
        (
            known
            for known in KNOWN_FORMATS.values()
            if known.calls is not None and _agree(known.calls, derived)
        ),
        None,
    )


def _agree(known: CallFormat, derived: CallFormat) -> bool:
    known_close = _plain(known.call_close + known.close)
    derived_close = _plain(derived.call_close + derived.close)
    return _signature(known) == _signature(derived) and (
        derived_close == known_close
        or (known_close != "" and derived_close.startswith(known_close))
    )


def _signature(calls: CallFormat) -> tuple[object, ...]:
    keys = (calls.name_key, calls.arguments_key) if calls.style is CallStyle.JSON else ()
    marks = (
        calls.open + calls.call_open + calls.name_open,
        calls.name_close,
        calls.key_open,
        calls.key_close,
        calls.string_key_close,
        calls.value_close,
        calls.quote,
    )
    return (calls.style, calls.is_list, keys, *map(_plain, marks))


def _plain(mark: str) -> str:
    return re.sub(r"\s+", "", mark)


def _known_by_marks(source: str) -> AnswerFormat | None:
    """Return the known format whose marks of calls are all in the template, if it has any."""
    present = []
    for known in KNOWN_FORMATS.values():
        marks = [] if known.calls is None else [m for m in _outer(known.calls) if m]
        if marks and all(mark.strip() in source for mark in marks):
            present.append((sum(map(len, marks)), known))
    return max(present, key=lambda found: found[0])[1] if present else None


def _outer(calls: CallFormat) -> tuple[str, ...]:
    return (calls.open, calls.close, calls.call_open, calls.call_close)


# Apply --tool-call-parser and --reasoning-parser to the format that the template shows.


class ParserNames(NamedTuple):
    """What the flags choose: AUTO, NONE, or a name of KNOWN_FORMATS.

    Attributes:
        takes_unmarked: calls may lack the marks of their form.
    """

    tool_call: str = AUTO
    reasoning: str = AUTO
    takes_unmarked: bool = True

    @classmethod
    def of_flags(cls, tool_call: str, reasoning: str) -> "ParserNames":
        """Return what --tool-call-parser and --reasoning-parser choose."""
        form = tool_call.removesuffix(EXACT)
        return cls(form, reasoning, takes_unmarked=form == tool_call)


def overrule(
    derived: AnswerFormat, names: ParserNames, special_tokens: frozenset[str]
) -> AnswerFormat:
    """Return the format with the marks that the flags choose.

    Args:
        derived: what the chat template shows.
        names: the values of the flags.
        special_tokens: tokens that leave no text unless asked for.
    """
    calls, reasoning = derived.calls, derived.reasoning
    if names.tool_call != AUTO:
        calls = KNOWN_FORMATS[names.tool_call].calls if names.tool_call != NONE else None
    if names.reasoning != AUTO:
        known = KNOWN_FORMATS[names.reasoning].reasoning if names.reasoning != NONE else None
        reasoning = known and _with_switch(known, reasoning)
    return msgspec.structs.replace(
        derived,
        source=derived.source if names.tool_call == AUTO else names.tool_call,
        calls=calls,
        reasoning=reasoning,
        has_special_marks=has_special_marks(calls, reasoning, special_tokens),
        takes_unmarked=names.takes_unmarked,
    )


def _with_switch(known: ReasoningFormat, derived: ReasoningFormat | None) -> ReasoningFormat:
    """Return a known format with the switch that the chat template has."""
    if derived is None or not derived.switch:
        return known
    return msgspec.structs.replace(known, switch=derived.switch, is_default=derived.is_default)
