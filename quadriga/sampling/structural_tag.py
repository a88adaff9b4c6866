"""Free text in which, after a trigger, one of some structures must follow: a structural tag, as
SGLang and vLLM call it. Here it becomes a grammar in llguidance's Lark.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from llguidance import LLTokenizer

ANY_TEXT = r"/(.|\n)*/"


class Structure(msgspec.Struct, forbid_unknown_fields=True):
    """begin: its first characters, of which a trigger is the beginning; schema: of the JSON after
    them; end: what comes after that."""

    begin: str
    end: str
    schema: dict[str, Any] = msgspec.field(default_factory=dict)


class StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    """triggers: texts after which one of the structures that begin so must go on."""

    structures: list[Structure]
    triggers: list[str]
    type: Literal["structural_tag"] = "structural_tag"


def read_structural_tag(text: str) -> StructuralTag:
    """ValueError that says what is wrong with it."""
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
        if not _of(trigger, tag.structures):
            raise ValueError(f"no structure begins with the trigger {trigger!r}")
    return tag


def to_lark(tag: StructuralTag, vocabulary: "LLTokenizer", json_options: dict[str, Any]) -> str:
    """json_options: llguidance's, for each schema. What stands in a text where the vocabulary has a
    special token is that token, and no text that looks like it."""
    calls = " | ".join(f"call_{number}" for number in range(len(tag.triggers)))
    lines = ["%llguidance {}", f"start: ({calls} | other)* TEXT", f"TEXT: {ANY_TEXT}"]
    lines.append(f"other: TEXT {_other_special_tokens(tag, vocabulary)}")
    for number, trigger in enumerate(tag.triggers):
        lead, *rest = _pieces(trigger, vocabulary)
        ways = []
        for way, structure in enumerate(_of(trigger, tag.structures)):
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


def _of(trigger: str, structures: list[Structure]) -> list[Structure]:
    return [structure for structure in structures if structure.begin.startswith(trigger)]


def _pieces(text: str, vocabulary: "LLTokenizer") -> list[str]:
    """A text as Lark: strings, and special tokens by their ids."""
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
    """Free text may have all but those that begin a structure or end the text."""
    barred = set(vocabulary.eos_tokens)
    for trigger in tag.triggers:
        barred.add(vocabulary.tokenize_str(trigger, parse_special=True)[0])
    ids = [i for i in range(vocabulary.vocab_size) if vocabulary.is_special_token(i)]
    free = ",".join(str(i) for i in ids if i not in barred)
    return f"<[{free}]>" if free else ""
