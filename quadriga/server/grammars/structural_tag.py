"""Structural tags, as SGLang and vLLM call them, converted to grammars in llguidance's Lark.

First the parts of a tag by the names of vLLM's and SGLang's grammar library, then the conversion.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from quadriga.server.grammars.exact_integers import exact_rule, holds_exact

if TYPE_CHECKING:
    from llguidance import LLTokenizer


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


# A structural tag describes a text of several parts: strings, JSON of a schema, free text, and
# free text in which each trigger must be continued by one of some tags.

# Returns a schema as the library takes it. Raises ValueError if it cannot be obeyed.
PrepareSchema = Callable[[Any], dict[str, Any]]
ANY_TEXT = r"/(.|\n)*/"
_TO_ESCAPE = re.compile(r"\\.|/")


def read_structural_tag(text: str) -> Format:
    """Parse a structural tag. Raise ValueError that says what is wrong with it."""
    try:
        tag = msgspec.json.decode(text, type=StructuralTag)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("its parts are nested too deeply") from None
    older = (tag.structures, tag.triggers)
    if tag.format is not None:
        if older != (None, None):
            raise ValueError("give either format, or structures and triggers")
        return tag.format
    if tag.structures is None or tag.triggers is None:
        missing = "structures" if tag.structures is None else "triggers"
        raise ValueError(f"{missing} is missing: give format, or structures and triggers")
    if not tag.structures:
        raise ValueError("at least one structure must be there")
    return TriggeredTags(triggers=tag.triggers, tags=[_tag(part) for part in tag.structures])


def _tag(structure: Structure) -> Tag:
    content = JsonValue(json_schema=structure.schema)
    return Tag(begin=structure.begin, content=content, end=structure.end)


def to_lark(
    tag_format: Format,
    vocabulary: "LLTokenizer",
    prepared: PrepareSchema,
    json_options: dict[str, Any],
) -> str:
    """Return a format as a Lark grammar.

    Text for which the vocabulary has a special token becomes that token. A special token that ends
    the text is left out: the text may end there.

    Args:
        tag_format: the format of a structural tag.
        vocabulary: llguidance's tokenizer.
        prepared: returns a schema as llguidance takes it.
        json_options: llguidance's options for each schema.

    Raises:
        ValueError: the format contradicts itself.
    """
    rules = _Rules(vocabulary, prepared, json_options)
    try:
        start = rules.name_of(tag_format)
    except RecursionError:
        raise ValueError("its parts are nested too deeply") from None
    return (
        "\n".join(["%llguidance {}", f"start: {start}", f"TEXT: {ANY_TEXT}", *rules.lines]) + "\n"
    )


class _Rules:
    """The rules of a grammar. Equal parts share a rule."""

    def __init__(
        self, vocabulary: "LLTokenizer", prepared: PrepareSchema, json_options: dict[str, Any]
    ) -> None:
        self.lines: list[str] = []
        self._prepared = prepared
        self._vocabulary = vocabulary
        self._json_options = json_options
        self._names: dict[str, str] = {}

    def name_of(self, part: Format) -> str:
        """Return the name of the rule of a part."""
        return self._rule(self._body(part))

    def _rule(self, body: str, attributes: str = "") -> str:
        """Return the name of a rule with this body."""
        name = self._names.get(attributes + body)
        if name is None:
            # Only terminals, whose names are in capitals, may be intersected.
            kind = "T" if " & ~" in body else "r"
            name = self._names[attributes + body] = f"{kind}{len(self._names)}"
            self.lines.append(f"{name}{attributes}: {body}")
        return name

    def _body(self, part: Format) -> str:
        match part:
            case Sequence():
                return self._sequence(part.elements)
            case Tag():
                return self._sequence(_parts_of(part))
            case Alternatives():
                return self._any_of(part.elements)
            case SeparatedTags():
                return self._separated(part)
            case TriggeredTags():
                return self._triggered(part)
        return self._leaf(part)

    def _leaf(self, part: ConstString | JsonValue | RegexMatch | AnyText) -> str:
        match part:
            case ConstString():
                return " ".join(self._pieces(part.value)) or '""'
            case RegexMatch():
                return f"/{escape_slashes(part.pattern)}/"
            case AnyText():
                return "TEXT"
        schema = self._prepared(part.json_schema)
        if holds_exact(schema):
            return exact_rule(schema, self._json_options, self._rule)
        return "%json " + json.dumps(schema | {"x-guidance": self._json_options})

    def _sequence(self, elements: Iterable[Format]) -> str:
        """Return parts one after the other. Free text ends where the string after it begins."""
        terms: list[str] = []
        for part in _flat(elements):
            if isinstance(part, ConstString):
                pieces = list(self._pieces(part.value))
                if pieces and terms and terms[-1] == "TEXT":
                    terms[-1:] = self._text_until(pieces.pop(0))
                terms += pieces
            else:
                terms.append("TEXT" if isinstance(part, AnyText) else self.name_of(part))
        return " ".join(terms) or '""'

    def _text_until(self, piece: str) -> list[str]:
        """Return terms of text and the string at its end; a rule that is lazy ends at the first."""
        if piece.startswith("<"):
            return ["TEXT", piece]
        return [self._rule(f"TEXT {piece}", "[lazy]")]

    def _any_of(self, parts: Iterable[Format]) -> str:
        names = [self.name_of(part) for part in parts]
        if not names:
            raise ValueError("at least one alternative must be there")
        return " | ".join(names)

    def _separated(self, part: SeparatedTags) -> str:
        tag = self._rule(self._any_of(part.tags))
        separator = " ".join(self._pieces(part.separator))
        tags = tag if part.stop_after_first else f"{tag} ({separator} {tag})*"
        return tags if part.at_least_one else f"({tags})?"

    def _triggered(self, part: TriggeredTags) -> str:
        _check_triggers(part)
        calls = " | ".join(self._call(trigger, part) for trigger in part.triggers)
        free = self._free_special_tokens(part.triggers)
        other = self._rule(f"TEXT {free}") if free else ""
        before = f"({other})*" if other else ""
        if part.stop_after_first:
            end = f"({calls})" if part.at_least_one else f"({calls} | TEXT)"
            return f"{before} {end}"
        part_of_text = f"({calls} | {other})*" if other else f"({calls})*"
        first = f"{before} ({calls})" if part.at_least_one else ""
        return f"{first} {part_of_text} TEXT"

    def _call(self, trigger: str, part: TriggeredTags) -> str:
        """Return the rule of free text and a tag that begins with the trigger."""
        ways = []
        for tag in _tags_after(trigger, part.tags):
            rest = ConstString(value=tag.begin[len(trigger) :])
            ways.append(self._rule(self._sequence([rest, tag.content, ConstString(value=tag.end)])))
        lead, *rest_of_trigger = self._pieces(trigger)
        # Only a lazy rule ends at the first place where it can.
        lead = self._rule(f"TEXT {lead}", "" if lead.startswith("<") else "[lazy]")
        return self._rule(f"{lead} {' '.join(rest_of_trigger)} ({' | '.join(ways)})")

    def _pieces(self, text: str) -> Iterator[str]:
        """Yield a text as Lark terms: strings, and special tokens by their ids."""
        vocabulary, plain = self._vocabulary, b""
        for token in vocabulary.tokenize_str(text, parse_special=True):
            if vocabulary.is_special_token(token):
                yield from _string(plain)
                plain = b""
                if token not in vocabulary.eos_tokens:
                    yield f"<[{token}]>"
            else:
                plain += vocabulary.decode_bytes([token])
        yield from _string(plain)

    def _free_special_tokens(self, triggers: list[str]) -> str:
        """Return the special tokens that free text may have: none that begins a tag or ends."""
        vocabulary = self._vocabulary
        masked = set(vocabulary.eos_tokens)
        for trigger in triggers:
            masked.add(vocabulary.tokenize_str(trigger, parse_special=True)[0])
        ids = filter(vocabulary.is_special_token, range(vocabulary.vocab_size))
        free = ",".join(str(token_id) for token_id in ids if token_id not in masked)
        return f"<[{free}]>" if free else ""


def _check_triggers(part: TriggeredTags) -> None:
    if not part.tags:
        raise ValueError("at least one tag must be there")
    for tag in part.tags:
        if not any(trigger and tag.begin.startswith(trigger) for trigger in part.triggers):
            raise ValueError(f"no trigger is the beginning of {tag.begin!r}")
    for trigger in part.triggers:
        if not _tags_after(trigger, part.tags):
            raise ValueError(f"no structure begins with the trigger {trigger!r}")


def _tags_after(trigger: str, tags: list[Tag]) -> list[Tag]:
    return [tag for tag in tags if tag.begin.startswith(trigger)]


def _flat(elements: Iterable[Format]) -> Iterator[Format]:
    """Yield the parts of sequences and tags within sequences, too."""
    for part in elements:
        if isinstance(part, Sequence):
            yield from _flat(part.elements)
        elif isinstance(part, Tag):
            yield from _flat(_parts_of(part))
        else:
            yield part


def _parts_of(tag: Tag) -> list[Format]:
    return [ConstString(value=tag.begin), tag.content, ConstString(value=tag.end)]


def _string(plain: bytes) -> Iterator[str]:
    if plain:
        yield json.dumps(plain.decode(), ensure_ascii=False)


def escape_slashes(pattern: str) -> str:
    """Return the inside of a Lark regex.

    The library's own conversion writes a line break as an escape, which ends no comment of (?x),
    and drops a backslash at the end.
    """
    return _TO_ESCAPE.sub(lambda match: "\\/" if match[0] == "/" else match[0], pattern)
