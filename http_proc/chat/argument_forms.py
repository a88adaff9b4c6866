"""The arguments of a call as parts of a structural tag, for the styles that do not write JSON."""

from collections.abc import Mapping
from typing import Any

from quadriga.answer_format import CallFormat
from quadriga.sampling.json_schema import OPTIONS
from quadriga.sampling.tag_formats import (
    Alternatives,
    AnyText,
    ConstString,
    Format,
    JsonValue,
    RegexMatch,
    SeparatedTags,
    Sequence,
    Tag,
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


# --- schemas --------------------------------------------------------------------------------------


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
