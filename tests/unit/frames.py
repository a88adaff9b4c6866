"""A corpus of encoded frames of every message of the public socket, which must stay as it is.

Frames are kept by link and tag, without the name of a class. Of each message there are some with
every field set, so that each alternative of each field occurs, and one with the required fields
only, together with what it means: the same message with the defaults written out. The names of its
fields are there in order, as two neighbours of one type can change places without another sign.

python -m tests.unit.frames --write     rewrite golden/frames.json from the types of the fields
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from quadriga.wire.client import ClientMessage, ServerMessage
from quadriga.wire.sockets import encode

GOLDEN = Path(__file__).parent / "golden" / "frames.json"
LINKS: dict[str, Any] = {"client to frontend": ClientMessage, "frontend to client": ServerMessage}
FRAMES_OF_A_MESSAGE = 3

# Link, tag, and then `fields`: names, `whole`: frames in hex, `short`: a frame and its meaning.
Corpus = dict[str, dict[str, dict[str, Any]]]


def messages(link: str) -> dict[str, inspect.StructType]:
    """Return the message types of a link, by tag."""
    kind = inspect.type_info(LINKS[link])
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return {str(member.tag): member for member in members if isinstance(member, inspect.StructType)}


def field_names(kind: inspect.Type) -> Iterator[str]:
    """Yield the names of all fields in order, each followed by the fields inside it."""
    match kind:
        case inspect.StructType():
            for field in kind.fields:
                yield field.encode_name
                yield from (f"{field.encode_name}.{name}" for name in field_names(field.type))
        case inspect.UnionType():
            for member in kind.types:
                yield from field_names(member)
        case inspect.ListType():
            yield from field_names(kind.item_type)


def recode(link: str, frame: bytes) -> bytes:
    """Decode a frame as its receiver does and encode the message again."""
    return encode(msgspec.msgpack.decode(frame, type=LINKS[link]))


def expected() -> Corpus:
    """Return the committed corpus."""
    corpus: Corpus = json.loads(GOLDEN.read_text())
    return corpus


# --- making frames --------------------------------------------------------------------------------


def corpus() -> Corpus:
    """Make frames of every message from the types of its fields."""
    return {
        link: {tag: _frames(link, kind) for tag, kind in messages(link).items()} for link in LINKS
    }


def _frames(link: str, kind: inspect.StructType) -> dict[str, Any]:
    whole = {recode(link, encode(Values(turn).of(kind))) for turn in range(FRAMES_OF_A_MESSAGE)}
    short = encode(Values(0).of(kind, only_required=True))
    return {
        "fields": list(field_names(kind)),
        "whole": sorted(frame.hex() for frame in whole),
        "short": [short.hex(), recode(link, short).hex()],
    }


class Values:
    """Draw values of any type; no two numbers or texts of a frame are the same."""

    def __init__(self, turn: int) -> None:
        """Draw the values of one frame.

        Args:
            turn: which alternative of a union is drawn, counted around.
        """
        self._turn = turn
        self._count = itertools.count(1 + turn)

    def of(self, kind: inspect.Type, only_required: bool = False) -> Any:
        """Return a value as msgpack has it."""
        number = next(self._count)
        match kind:
            case inspect.StructType():
                return self._struct(kind, only_required)
            case inspect.UnionType():
                return self.of(kind.types[self._turn % len(kind.types)])
            case inspect.ListType():
                return [self.of(kind.item_type) for _ in range(2)]
            case inspect.DictType():
                return {self.of(kind.key_type): self.of(kind.value_type) for _ in range(2)}
            case inspect.IntType():
                return [number, -number, 1000 * number][self._turn % 3]
            case inspect.FloatType():
                return number + 0.125
            case inspect.StrType():
                return f"text {number} é"
            case inspect.BytesType():
                return number.to_bytes(4, "little") + b"\x00\xff\x80\x7f"
            case inspect.BoolType():
                return self._turn % 2 == 0
            case inspect.EnumType():
                return list(kind.cls)[number % len(kind.cls)].value
            case inspect.NoneType():
                return None
            case inspect.AnyType():
                return [f"any {number}", number, {"map": [number + 0.5, None]}][self._turn % 3]
        raise AssertionError(f"no value is known for {kind}")

    def _struct(self, kind: inspect.StructType, only_required: bool) -> Any:
        fields = {
            field.encode_name: self.of(field.type)
            for field in kind.fields
            if field.required or not only_required
        }
        if kind.array_like:
            return [*([] if kind.tag is None else [kind.tag]), *fields.values()]
        return fields


def listed(corpus: Corpus) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield link, tag and frames of each message."""
    for link, by_tag in corpus.items():
        for tag, frames in by_tag.items():
            yield link, tag, frames


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(corpus(), indent=1) + "\n")


if __name__ == "__main__":
    main()
