"""Grammars of tool calls: for calls that are forced, and for calls within free text.

A structural tag is made of the marks with which a model writes calls, and of the forms of their
arguments: JSON, or those of the styles that do not write JSON.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from http_proc.core.errors import invalid
from http_proc.generation.chat_call import ChatCall
from http_proc.generation.sampling import ANY_OBJECT
from http_proc.generation.schema import FunctionSchema
from quadriga.sampling.params import SamplingParams
from quadriga.server.answer_format import CallFormat, CallStyle
from quadriga.server.grammars.json_schema import OPTIONS
from quadriga.server.grammars.structural_tag import (
    Alternatives,
    AnyText,
    ConstString,
    Format,
    JsonValue,
    RegexMatch,
    SeparatedTags,
    Sequence,
    Tag,
    TriggeredTags,
)

Schema = Mapping[str, Any]

# Keywords of a string's schema that free text between marks cannot be made to obey.
_OF_STRINGS = {"pattern", "format", "minLength", "maxLength"}
# Keywords that an object and an array of QUOTED calls are made to obey, or that say nothing.
NOTES = {
    "title", "description", "default", "examples", "$defs", "definitions", "$comment", "$schema",
    OPTIONS,
}  # fmt: skip
_OF_OBJECTS = NOTES | {"type", "properties", "required", "additionalProperties", "strict"}
_OF_ARRAYS = NOTES | {"type", "items"}
# Keywords through which an object without properties of its own has some.
_COMBINING = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}
_MAX_REFERENCES, _MAX_LEVELS = 8, 8
# Each of them is a way to begin the arguments, which repeats the arguments behind it.
MAX_LEADING_OPTIONAL_ARGUMENTS = 16
_KEY = r"[A-Za-z_][A-Za-z0-9_.\-]*"


class Inexpressible(Exception):
    """A style of calls cannot be made to obey a schema. An argument, if it has one: a keyword."""


def text(value: str) -> Format:
    """Return the part that is this text."""
    return ConstString(value=value)


def optional(part: Format) -> Format:
    """Return a part that may be missing."""
    return Alternatives(elements=[text(""), part])


def tagged_arguments(marks: CallFormat, parameters: Schema | None) -> Format:
    """Return arguments between marks, in the order of the schema; None: any arguments.

    Raises:
        Inexpressible: a string has to match a pattern or to have a length.
    """
    if parameters is None or _takes_any(parameters):
        return SeparatedTags(tags=_any_tagged(marks), separator="")
    parts = []
    for name, schema, is_required in _properties(parameters):
        value, key_close, end = _tagged_value(marks, schema, parameters)
        argument = Tag(begin=f"{marks.key_open}{name}{key_close}", content=value, end=end)
        parts.append(argument if is_required else optional(argument))
    return Sequence(elements=parts)


def _any_tagged(marks: CallFormat) -> list[Tag]:
    """Return the ways to write an argument of any name and value."""
    closes = dict.fromkeys((marks.string_key_close or marks.key_close, marks.key_close))
    values = [
        Sequence(elements=[RegexMatch(pattern=_KEY), text(close), AnyText()]) for close in closes
    ]
    return [Tag(begin=marks.key_open, content=value, end=_end_of_text(marks)) for value in values]


def _tagged_value(marks: CallFormat, schema: Any, root: Schema) -> tuple[Format, str, str]:
    """Return the value of an argument, the mark before it and the mark after it."""
    resolved = _resolve(schema, root)
    if (choices := _choices(resolved)) is not None and all(isinstance(c, str) for c in choices):
        value: Format = Alternatives(elements=[text(choice) for choice in choices])
        return value, marks.string_key_close or marks.key_close, marks.value_close
    if choices is None and _may_be_string(resolved, root):
        if keywords := _OF_STRINGS & resolved.keys():
            raise Inexpressible(min(keywords))
        return AnyText(), marks.string_key_close or marks.key_close, _end_of_text(marks)
    return _json(resolved, root), marks.key_close, marks.value_close


def _end_of_text(marks: CallFormat) -> str:
    """Return the mark after a text. The parser also ends a text at a mark without its newline."""
    return marks.value_close.lstrip() or marks.value_close


def pythonic_arguments(parameters: Schema | None) -> Format:
    """Return keyword arguments whose values are JSON, apart from True, False and None.

    Raises:
        Inexpressible: too many arguments are optional.
    """
    if parameters is None or _takes_any(parameters):
        value = Alternatives(elements=[text("True"), text("False"), text("None"), JsonValue()])
        argument = Sequence(elements=[RegexMatch(pattern=_KEY), text("="), value])
        return SeparatedTags(tags=[Tag(begin="", content=argument, end="")], separator=", ")
    return _comma_separated(
        [
            (Sequence(elements=[text(f"{name}="), _python_value(schema, parameters)]), is_required)
            for name, schema, is_required in _properties(parameters)
        ],
        ", ",
    )


def _python_value(schema: Any, root: Schema) -> Format:
    resolved = _resolve(schema, root)
    literals = {"boolean": ["True", "False"], "null": ["None"]}.get(str(resolved.get("type")))
    if literals is None or _choices(resolved) is not None:
        return _json(resolved, root)
    return Alternatives(elements=[text(literal) for literal in literals])


def quoted_arguments(marks: CallFormat, parameters: Schema | None) -> Format:
    """Return an object with bare keys, whose strings stand between marks; None: any object.

    Raises:
        Inexpressible: a schema has a keyword that this form cannot be made to obey.
    """
    if parameters is None or _takes_any(parameters):
        return Sequence(elements=[text("{"), _any_quoted(marks), AnyText()])
    return _quoted_object(marks, parameters, parameters, 0)


def _any_quoted(marks: CallFormat) -> Format:
    """Return text that has strings between marks, which may be special tokens."""
    quote = text(marks.quote)
    strings = Sequence(elements=[AnyText(), quote, AnyText(), quote])
    return SeparatedTags(tags=[Tag(begin="", content=strings, end="")], separator="")


def _quoted_object(marks: CallFormat, schema: Schema, root: Schema, level: int) -> Format:
    if keywords := schema.keys() - _OF_OBJECTS:
        raise Inexpressible(min(keywords))
    if level == _MAX_LEVELS:
        raise Inexpressible
    if not schema.get("properties") and schema.get("additionalProperties") is not False and level:
        raise Inexpressible
    items: list[tuple[Format, bool]] = [
        (Sequence(elements=[text(f"{name}:"), _quoted_value(marks, value, root, level + 1)]), need)
        for name, value, need in _properties(schema)
    ]
    return Sequence(elements=[text("{"), _comma_separated(items, ","), text("}")])


def _quoted_value(marks: CallFormat, schema: Any, root: Schema, level: int) -> Format:
    resolved, quote = _resolve(schema, root), marks.quote
    if (choices := _choices(resolved)) is not None:
        return Alternatives(elements=[
            text(f"{quote}{choice}{quote}") if isinstance(choice, str)
            else JsonValue(json_schema={"const": choice})
            for choice in choices
        ])  # fmt: skip
    match resolved.get("type"):
        case "string" if not _OF_STRINGS & resolved.keys():
            return Tag(begin=quote, content=AnyText(), end=quote)
        case "integer" | "number" | "boolean" | "null":
            return _json(resolved, root)
        case "object":
            return _quoted_object(marks, resolved, root, level)
        case "array" if "items" in resolved and not resolved.keys() - _OF_ARRAYS:
            item = _quoted_value(marks, resolved["items"], root, level + 1)
            items = SeparatedTags(tags=[Tag(begin="", content=item, end="")], separator=",")
            return Sequence(elements=[text("["), items, text("]")])
    raise Inexpressible(min(resolved.keys() - NOTES - {"type", "items"}, default="type"))


def _comma_separated(items: list[tuple[Format, bool]], separator: str) -> Format:
    """Return parts, each required or not, with a separator between those that are written."""
    ways: list[Format] = []
    for index, (first, is_required) in enumerate(items):
        if index == MAX_LEADING_OPTIONAL_ARGUMENTS:
            raise Inexpressible("required")
        rest = [
            part if needed else optional(part)
            for part, needed in (
                (Sequence(elements=[text(separator), part]), needed)
                for part, needed in items[index + 1 :]
            )
        ]
        ways.append(Sequence(elements=[first, *rest]))
        if is_required:
            break
    else:
        ways.append(text(""))
    return Alternatives(elements=ways)


def _properties(schema: Schema) -> list[tuple[str, Any, bool]]:
    """Return the name, schema and necessity of each property."""
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
        raise Inexpressible
    return [(name, value, name in required) for name, value in properties.items()]


def _takes_any(parameters: Schema) -> bool:
    """Return whether arguments of any name are allowed, and none has a schema."""
    has_names = parameters.get("properties") or parameters.get("additionalProperties") is False
    if not has_names and parameters.keys() & _COMBINING:
        raise Inexpressible
    return not has_names


def _resolve(schema: Any, root: Schema) -> Schema:
    """Return a schema without references at its top."""
    for _ in range(_MAX_REFERENCES):
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            break
        if "$ref" not in schema:
            return schema
        schema = _referred(str(schema["$ref"]), root)
    raise Inexpressible


def _referred(reference: str, root: Schema) -> Any:
    where, _, name = reference.removeprefix("#/").partition("/")
    if not reference.startswith("#/") or where not in ("$defs", "definitions") or "/" in name:
        raise Inexpressible
    definitions = root.get(where)
    return definitions.get(name) if isinstance(definitions, Mapping) else None


def _choices(schema: Schema) -> list[Any] | None:
    """Return the values that a schema lists, or None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    choices = schema.get("enum")
    return choices if isinstance(choices, list) and choices else None


def _may_be_string(schema: Schema, root: Schema) -> bool:
    kinds = schema.get("type")
    if kinds is not None:
        return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
    ways = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(ways, list):
        return "allOf" not in schema
    return any(_may_be_string(_resolve(way, root), root) for way in ways)


def _json(schema: Schema, root: Schema) -> Format:
    """Return JSON of a schema, to which the definitions of the root are added."""
    definitions = {key: root[key] for key in ("$defs", "definitions", OPTIONS) if key in root}
    return JsonValue(json_schema={**schema, **definitions})


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
        return _harmony_message([_call(marks, tool) for tool in tools])
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
        return _harmony_message(last)
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
        return _harmony_message(last)
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


def _harmony_message(last: Iterable[Tag]) -> Format:
    """Return messages of gpt-oss, of which the last is one of `last`."""
    messages = [
        Tag(begin=begin, content=AnyText(), end=_MESSAGE_END + _NEXT_MESSAGE)
        for begin in (_ANALYSIS, _PREAMBLE)
    ]
    others = SeparatedTags(tags=messages, separator="")
    end = Alternatives(elements=list(last))
    return Sequence(elements=[optional(text(_NEXT_MESSAGE)), others, end])


# The form of a forced call where the model's own cannot be made to obey the tools: one JSON object.
PLAIN_CALL = CallFormat(style=CallStyle.JSON)


def forced_calls(
    call: ChatCall, calls: CallFormat | None, is_trained: bool = True
) -> tuple[dict[str, Any], CallFormat]:
    """Return the grammar of calls, and no text, that obey their tools, and the calls' form.

    The grammar is given as fields of SamplingParams.

    What no grammar can enforce of a tool that is not strict is left out.

    Args:
        call: the chat. A tool that it names is called once.
        calls: the model's own form; None: it has none.
        is_trained: the model has learned to call tools. Otherwise it calls one, as it may not know
            when to stop.
    """
    name = call.tool_choice.name
    tools = [
        CallableTool(tool.function.name, arguments_schema(tool.function, _title(call, index)))
        for index, tool in enumerate(call.tools)
        if not name or tool.function.name == name
    ]
    is_parallel = call.is_parallel and is_trained and not name
    marks = calls or PLAIN_CALL
    try:
        form = only_calls(marks, tools, is_parallel)
    except Inexpressible:
        marks = PLAIN_CALL
        form = only_calls(marks, tools, is_parallel=False)
    return _fields(form), marks


def strict_calls(call: ChatCall, calls: CallFormat) -> dict[str, Any]:
    """Return the grammar of text with calls that obey their tools, as fields of SamplingParams.

    Calls of tools that are not strict may have any arguments.

    Raises:
        ApiError: the model's form cannot be made to obey a strict tool.
    """
    with _inexpressible(call, calls):
        return _fields(calls_in_text(calls, _callable_tools(call), call.is_parallel))


def strict_calls_or_json(
    call: ChatCall, calls: CallFormat, schema: dict[str, Any]
) -> dict[str, Any]:
    """Return the grammar of an answer of calls, as in `strict_calls`, or of JSON of a schema.

    Raises:
        ApiError: the model's form cannot be made to obey a strict tool.
    """
    with _inexpressible(call, calls):
        return _fields(calls_or_json(calls, _callable_tools(call), call.is_parallel, schema))


def _callable_tools(call: ChatCall) -> list[CallableTool]:
    """Return the tools; calls of those that are not strict may have any arguments."""
    return [
        CallableTool(
            tool.function.name,
            arguments_schema(tool.function, _title(call, index)) if tool.function.strict else None,
        )
        for index, tool in enumerate(call.tools)
    ]


def _title(call: ChatCall, index: int) -> str:
    """Return what errors call the parameters of a tool."""
    return f"{call.name('tools')}[{index}] ({call.tools[index].function.name})"


@contextmanager
def _inexpressible(call: ChatCall, calls: CallFormat) -> Iterator[None]:
    """Convert the error of a strict tool that the form of calls cannot be made to obey."""
    try:
        yield
    except Inexpressible:
        field = call.name("tools")
        raise invalid(
            f"{_inexpressible_tool(call, calls)}, which this model's form of calls cannot be made"
            " to obey; leave strict out, or require the call",
            field,
        ) from None


def _inexpressible_tool(call: ChatCall, calls: CallFormat) -> str:
    """Return the first strict tool that the form cannot be made to obey, and the keyword."""
    for index, tool in enumerate(_callable_tools(call)):
        try:
            calls_in_text(calls, [tool], call.is_parallel)
        except Inexpressible as error:
            keyword = f"the keyword {error.args[0]}" if error.args else "parameters"
            return f"{_title(call, index)} has {keyword}"
    return f"{call.name('tools')} have parameters"


def in_final_message(params: SamplingParams) -> SamplingParams:
    """Return the parameters for a model that writes messages to channels, as gpt-oss does.

    A grammar holds for the message to the user. One in EBNF is left as it is.
    """
    content: Format
    if params.json_schema is not None:
        schema = json_schema_of(params)
        if schema is None:
            return params  # the server refuses it
        content = JsonValue(json_schema=schema)
    elif params.regex is not None:
        content = RegexMatch(pattern=params.regex)
    elif params.choice is not None:
        content = Alternatives(elements=[ConstString(value=text) for text in params.choice])
    else:
        return params
    fields = {"json_schema": None, "regex": None, "choice": None}
    final = Tag(begin=_FINAL, content=content, end="")
    message = _harmony_message([final])
    return msgspec.structs.replace(params, **{**fields, **_fields(message)})


def json_schema_of(params: SamplingParams) -> dict[str, Any] | None:
    """Return the JSON schema that the text must obey; None if there is none that can be read."""
    schema: Any = params.json_schema
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            return None
    return schema if isinstance(schema, dict) else None


def _fields(form: Format) -> dict[str, Any]:
    return {"structural_tag": {"format": msgspec.to_builtins(form)}}
