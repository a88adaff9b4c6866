"""The parts of a structural tag, by the names of vLLM's and SGLang's grammar library."""

from typing import Any, Literal

import msgspec


class _Format(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of all parts."""


class ConstString(_Format, tag="const_string"):
    """This text."""

    value: str


class JsonValue(_Format, tag="json_schema"):
    """JSON of a schema."""

    json_schema: dict[str, Any] | bool = True


class RegexMatch(_Format, tag="regex"):
    """A match of a regular expression, in the dialect of Rust's regex crate."""

    pattern: str


class AnyText(_Format, tag="any_text"):
    """Text without special tokens, which ends where the string that follows it first occurs."""


class Sequence(_Format, tag="sequence"):
    """Parts, one after the other."""

    elements: list["Format"]


class Alternatives(_Format, tag="or"):
    """One of these parts."""

    elements: list["Format"]


class Tag(_Format, tag="tag"):
    """A part between two strings."""

    begin: str
    content: "Format"
    end: str


class TriggeredTags(_Format, tag="triggered_tags"):
    """Text in which each trigger begins one of the tags.

    Attributes:
        triggers: beginnings of the tags' `begin`.
        at_least_one: the text has a tag.
        stop_after_first: the text ends with its first tag.
    """

    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    stop_after_first: bool = False


class SeparatedTags(_Format, tag="tags_with_separator"):
    """Tags with a string between each two of them.

    Attributes:
        at_least_one: there is a tag.
        stop_after_first: there is one tag at most.
    """

    tags: list[Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstString
    | JsonValue
    | RegexMatch
    | AnyText
    | Sequence
    | Alternatives
    | Tag
    | TriggeredTags
    | SeparatedTags
)


class Structure(msgspec.Struct, forbid_unknown_fields=True):
    """A text that starts with a trigger and holds JSON, in the older form.

    Attributes:
        begin: first characters; they start with a trigger.
        end: characters after the JSON.
        schema: schema of the JSON between `begin` and `end`.
    """

    begin: str
    end: str
    schema: dict[str, Any] = msgspec.field(default_factory=dict)


class StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    """A format; or, in the older form, structures and the triggers that begin them."""

    format: Format | None = None
    structures: list[Structure] | None = None
    triggers: list[str] | None = None
    type: Literal["structural_tag"] = "structural_tag"
