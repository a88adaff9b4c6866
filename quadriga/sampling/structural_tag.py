"""Structural tags, as SGLang and vLLM call them, converted to grammars in llguidance's Lark.

A structural tag is free text in which each trigger must be continued by one of some structures.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from llguidance import LLTokenizer

ANY_TEXT = r"/(.|\n)*/"


class Structure(msgspec.Struct, forbid_unknown_fields=True):
    """A text that starts with a trigger and holds JSON.

    Attributes:
        begin: first characters; they start with a trigger.
        end: characters after the JSON.
        schema: schema of the JSON between `begin` and `end`.
    """

    begin: str
    end: str
    schema: dict[str, Any] = msgspec.field(default_factory=dict)


class StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    """Structures, and the triggers after which one of them must continue."""

    structures: list[Structure]
    triggers: list[str]
    type: Literal["structural_tag"] = "structural_tag"


def read_structural_tag(text: str) -> StructuralTag:
    """Parse a structural tag. Raise ValueError that says what is wrong with it."""
    try:
        tag = msgspec.json.decode(text, type=StructuralTag)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    if not tag.structures:
        raise ValueError("at least one structure must be there")
    for structure in tag.structures:
        if not any(trigger and structure.begin.startswith(trigger) for trigger in tag.triggers):
            raise ValueError(f"no trigger is the beginning of {structure.begin!r}")
    for trigger in tag.triggers:
        if not _structures_after(trigger, tag.structures):
            raise ValueError(f"no structure begins with the trigger {trigger!r}")
    return tag


def to_lark(tag: StructuralTag, vocabulary: "LLTokenizer", json_options: dict[str, Any]) -> str:
    """Return the tag as a Lark grammar.

    Text for which the vocabulary has a special token becomes that token.

    Args:
        tag: the structural tag.
        vocabulary: llguidance's tokenizer.
        json_options: llguidance's options for each schema.
    """
    calls = " | ".join(f"call_{number}" for number in range(len(tag.triggers)))
    lines = ["%llguidance {}", f"start: ({calls} | other)* TEXT", f"TEXT: {ANY_TEXT}"]
    lines.append(f"other: TEXT {_other_special_tokens(tag, vocabulary)}")
    for number, trigger in enumerate(tag.triggers):
        lead, *rest = _pieces(trigger, vocabulary)
        ways = []
        for way, structure in enumerate(_structures_after(trigger, tag.structures)):
            begin = " ".join(_pieces(structure.begin[len(trigger) :], vocabulary))
            end = " ".join(_pieces(structure.end, vocabulary))
            schema = json.dumps(structure.schema | {"x-guidance": json_options})
            lines.append(f"way_{number}_{way}: {begin} %json {schema} {end}")
            ways.append(f"way_{number}_{way}")
        # Only a lazy rule ends at the first place where it can.
        lazy = "" if lead.startswith("<") else "[lazy]"
        lines.append(f"lead_{number}{lazy}: TEXT {lead}")
        lines.append(f"call_{number}: lead_{number} {' '.join(rest)} ({' | '.join(ways)})")
    return "\n".join(lines) + "\n"


def _structures_after(trigger: str, structures: list[Structure]) -> list[Structure]:
    return [structure for structure in structures if structure.begin.startswith(trigger)]


def _pieces(text: str, vocabulary: "LLTokenizer") -> list[str]:
    """Return a text as Lark terms: strings, and special tokens by their ids."""
    pieces, plain = [], b""
    for token in vocabulary.tokenize_str(text, parse_special=True):
        if vocabulary.is_special_token(token):
            pieces += [*_string(plain), f"<[{token}]>"]
            plain = b""
        else:
            plain += vocabulary.decode_bytes([token])
    return [*pieces, *_string(plain)]


def _string(plain: bytes) -> Iterator[str]:
    if plain:
        yield json.dumps(plain.decode(), ensure_ascii=False)


def _other_special_tokens(tag: StructuralTag, vocabulary: "LLTokenizer") -> str:
    """Return the special tokens that free text may have: none that starts a structure or ends."""
    masked = set(vocabulary.eos_tokens)
    for trigger in tag.triggers:
        masked.add(vocabulary.tokenize_str(trigger, parse_special=True)[0])
    ids = filter(vocabulary.is_special_token, range(vocabulary.vocab_size))
    free = ",".join(str(token_id) for token_id in ids if token_id not in masked)
    return f"<[{free}]>" if free else ""
