"""Tool calls as parts of a structural tag, made of the marks with which a model writes them."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from http_proc.chat.argument_forms import (
    NOTES,
    optional,
    pythonic_arguments,
    quoted_arguments,
    tagged_arguments,
    text,
)
from http_proc.protocol.schema import FunctionSchema
from quadriga.answer_format import CallFormat, CallStyle
from quadriga.sampling.json_schema import OPTIONS
from quadriga.sampling.tag_formats import (
    Alternatives,
    AnyText,
    Format,
    JsonValue,
    RegexMatch,
    SeparatedTags,
    Sequence,
    Tag,
    TriggeredTags,
)

ANY_OBJECT = {"type": "object"}
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_CALL_ID, _CALL_INDEX = "[a-zA-Z0-9]{9}", "[0-9]+"
# gpt-oss: each message but the last ends with these tokens, after which the next one begins.
_NEXT_MESSAGE = "<|start|>assistant"
_MESSAGE_END = "<|end|>"
_ANALYSIS, _PREAMBLE, _FINAL = (
    "<|channel|>analysis<|message|>",
    "<|channel|>commentary<|message|>",
    "<|channel|>final<|message|>",
)


class CallableTool(msgspec.Struct, frozen=True):
    """A function that may be called. parameters: schema of its arguments; None: any arguments."""

    name: str
    parameters: Mapping[str, Any] | None = None


def arguments_schema(function: FunctionSchema, name: str) -> Mapping[str, Any]:
    """Return the schema of a function's arguments, which is lenient unless the function is strict.

    A function without parameters takes no arguments.

    Args:
        function: the function.
        name: what errors call the schema.
    """
    given = function.parameters
    if not given:
        return NO_ARGUMENTS
    options = {"lenient": not function.strict, "name": name}
    given = {**given, "type": "object", OPTIONS: options}
    is_empty = given.get("properties") == {} and not given.get("additionalProperties")
    says_more = (
        given.keys() - NOTES - {"type", "properties", "additionalProperties", "required", OPTIONS}
    )
    return NO_ARGUMENTS if is_empty and not given.get("required") and not says_more else given


def only_calls(marks: CallFormat, tools: list[CallableTool], is_parallel: bool) -> Format:
    """Return a text that consists of calls: one, or one or more.

    Raises:
        Inexpressible: the style cannot be made to obey a schema.
    """
    if marks.style is CallStyle.HARMONY:
        return _harmony_message([_call(marks, tool) for tool in tools], [_ANALYSIS, _PREAMBLE])
    if _has_inner_calls(marks):
        calls: Format = _group(marks, marks.open, tools, is_parallel)
        separator = "" if _is_list(marks) or marks.close else marks.separator
    else:
        separator = marks.separator or ("\n" if marks.open.endswith("\n") else "")
        calls = SeparatedTags(
            tags=[_single_call(marks, marks.open, tool) for tool in tools],
            separator=separator,
            at_least_one=True,
            stop_after_first=not is_parallel,
        )
    if not (is_parallel and separator.isspace()):
        return calls
    # Many models write the separator, and only then decide whether another call follows.
    return Sequence(elements=[calls, optional(text(separator))])


def calls_in_text(marks: CallFormat, tools: list[CallableTool], is_parallel: bool) -> Format:
    """Return a text in which calls may stand.

    Raises:
        Inexpressible: the style cannot be made to obey a schema.
    """
    if marks.style is CallStyle.HARMONY:
        final = Tag(begin=_FINAL, content=AnyText(), end="")
        last = [*(_call(marks, tool) for tool in tools), final]
        return _harmony_message(last, [_ANALYSIS, _PREAMBLE])
    if not (marks.open or marks.call_open or marks.name_open):
        return _unmarked(marks, tools, is_parallel)
    tags: list[Tag] = []
    leads: list[str] = []
    for mark in (marks.open, *marks.open_variants):
        if _has_inner_calls(marks) and (mark or _is_list(marks)):
            tags.append(_group(marks, mark, tools, is_parallel))
        else:
            tags += [_single_call(marks, mark, tool) for tool in tools]
        leads.append((mark or marks.call_open + marks.name_open).strip())
    triggers = list(dict.fromkeys(leads))
    return TriggeredTags(triggers=triggers, tags=tags, stop_after_first=not is_parallel)


def calls_or_json(
    marks: CallFormat, tools: list[CallableTool], is_parallel: bool, schema: dict[str, Any]
) -> Format:
    """Return a text that consists of calls, or else is JSON of a schema.

    Where calls are JSON without a mark, there is one call at most.

    Raises:
        Inexpressible: the style cannot be made to obey a schema.
    """
    if marks.style is CallStyle.HARMONY:
        final = Tag(begin=_FINAL, content=JsonValue(json_schema=schema), end="")
        last = [*(_call(marks, tool) for tool in tools), final]
        return _harmony_message(last, [_ANALYSIS, _PREAMBLE])
    if marks.style is CallStyle.JSON and not (marks.open or marks.call_open or marks.is_list):
        own = {**schema, OPTIONS: schema.get(OPTIONS, {"lenient": False})}
        return JsonValue(json_schema={"anyOf": [own, *(_object(marks, tool) for tool in tools)]})
    calls = only_calls(marks, tools, is_parallel)
    return Alternatives(elements=[JsonValue(json_schema=schema), calls])


def _object(marks: CallFormat, tool: CallableTool) -> dict[str, Any]:
    """Return the schema of a call that is a JSON object."""
    properties: dict[str, Any] = {marks.name_key: {"const": tool.name}} if marks.name_key else {}
    properties[marks.arguments_key if marks.name_key else tool.name] = dict(
        tool.parameters or ANY_OBJECT
    )
    closed = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


def _has_inner_calls(marks: CallFormat) -> bool:
    """Return whether several calls stand between one pair of marks."""
    return _is_list(marks) or bool(marks.call_open or marks.separator)


def _is_list(marks: CallFormat) -> bool:
    """Return whether calls stand in square brackets."""
    return marks.is_list or marks.style is CallStyle.PYTHONIC


def _group(marks: CallFormat, mark: str, tools: list[CallableTool], is_parallel: bool) -> Tag:
    """Return calls between a pair of marks."""
    is_list = _is_list(marks)
    calls = SeparatedTags(
        tags=[_call(marks, tool) for tool in tools],
        separator=marks.separator or (", " if is_list else ""),
        at_least_one=True,
        stop_after_first=not is_parallel,
    )
    begin, end = ("[", "]") if is_list else ("", "")
    return Tag(begin=mark + begin, content=calls, end=end + marks.close)


def _single_call(marks: CallFormat, mark: str, tool: CallableTool) -> Tag:
    """Return one call with the marks around calls."""
    call = _call(marks, tool)
    return Tag(begin=mark + call.begin, content=call.content, end=call.end + marks.close)


def _call(marks: CallFormat, tool: CallableTool) -> Tag:
    """Return one call, without the marks around calls."""
    begin = marks.call_open + marks.name_open + tool.name
    any_json = JsonValue(json_schema=dict(tool.parameters or ANY_OBJECT))
    match marks.style:
        case CallStyle.JSON:
            name = json.dumps(tool.name, ensure_ascii=False)
            key = f"{json.dumps(marks.name_key)}: {name}, {json.dumps(marks.arguments_key)}"
            begin = f"{marks.call_open}{{{key if marks.name_key else name}: "
            return Tag(begin=begin, content=any_json, end="}" + marks.call_close)
        case CallStyle.NAMED_JSON:
            parts = [*_call_numbers(marks), text(marks.name_close), any_json]
            return Tag(begin=begin, content=Sequence(elements=parts), end=marks.call_close)
        case CallStyle.TAGGED:
            tagged = tagged_arguments(marks, tool.parameters)
            return Tag(begin=begin + marks.name_close, content=tagged, end=marks.call_close)
        case CallStyle.PYTHONIC:
            pythonic = pythonic_arguments(tool.parameters)
            return Tag(begin=begin + "(", content=pythonic, end=")" + marks.call_close)
        case CallStyle.QUOTED:
            quoted = quoted_arguments(marks, tool.parameters)
            return Tag(begin=begin + marks.name_close, content=quoted, end=marks.call_close)
        case CallStyle.HARMONY:
            begin = marks.open + begin + marks.name_close
            return Tag(begin=begin, content=any_json, end=marks.call_close)


def _call_numbers(marks: CallFormat) -> list[Format]:
    """Return what stands between the name of a call and its arguments."""
    parts: list[Format] = []
    if marks.index_open:
        parts += [text(marks.index_open), RegexMatch(pattern=_CALL_INDEX)]
    if marks.id_open:
        call_id: list[Format] = [text(marks.id_open), RegexMatch(pattern=_CALL_ID)]
        parts.append(optional(Sequence(elements=call_id)))
    return parts


def _unmarked(marks: CallFormat, tools: list[CallableTool], is_parallel: bool) -> Format:
    """Return a text that is calls alone if it begins as a call does, else free."""
    first = "[" if _is_list(marks) else "{"
    free = RegexMatch(pattern=rf"\s{{0,20}}[^\s\{first}](.|\n)*")
    lead: list[Format] = [text(mark) for mark in ("", *marks.open_variants)]
    space = RegexMatch(pattern=r"\s{0,20}")
    calls = only_calls(marks, tools, is_parallel)
    with_lead = Sequence(elements=[Alternatives(elements=lead), space, calls])
    return Alternatives(elements=[text(""), free, with_lead])


def _harmony_message(last: Iterable[Tag], before: list[str]) -> Format:
    """Return messages of gpt-oss, of which the last is one of `last`."""
    messages = [
        Tag(begin=begin, content=AnyText(), end=_MESSAGE_END + _NEXT_MESSAGE) for begin in before
    ]
    others = SeparatedTags(tags=messages, separator="")
    end = Alternatives(elements=list(last))
    return Sequence(elements=[optional(text(_NEXT_MESSAGE)), others, end])


def harmony_answer(content: Format) -> Format:
    """Return an answer of gpt-oss whose final message obeys `content`."""
    final = Tag(begin=_FINAL, content=content, end="")
    return _harmony_message([final], [_ANALYSIS, _PREAMBLE])
