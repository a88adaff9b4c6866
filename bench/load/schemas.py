"""Generate JSON schemas as programs use them, and validate answers.

Schemas are objects of a few fields. Texts and lists are bounded, so that a model with random
weights comes to an end, too.
"""

import json
import random
from collections.abc import Callable
from typing import Any

from quadriga.client import Completion

# Makes the schema of one field.
Draw = Callable[[random.Random], dict[str, Any]]
WORDS = (
    "name", "title", "city", "status", "color", "category", "owner", "summary", "country", "unit",
    "priority", "language", "currency", "material", "season", "level", "reason", "source", "topic",
    "amount", "quantity", "year", "score", "rating", "weight", "height", "duration", "version",
)  # fmt: skip
VALUES = (
    "new", "open", "closed", "red", "green", "blue", "small", "medium", "large", "low", "high",
    "north", "south", "paper", "steel", "spring", "autumn", "daily", "weekly", "draft", "final",
)  # fmt: skip
MIN_FIELDS, MAX_FIELDS = 3, 8
NESTED_SHARE = 0.25


def schemas(count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` different schemas, the same for the same seed."""
    source = random.Random(f"{seed}/schemas")
    made: dict[str, dict[str, Any]] = {}
    while len(made) < count:
        schema = _object(source, MAX_FIELDS, source.random() < NESTED_SHARE)
        made.setdefault(repr(schema), schema)
    return list(made.values())


def complaint(schema: dict[str, Any], answer: Completion) -> str:
    """Return why the answer does not obey the schema, or ""."""
    from jsonschema import Draft202012Validator, ValidationError

    if answer.finish_reason != "stop":
        return f"{answer.usage.completion_tokens} tokens, ended by {answer.finish_reason}"
    try:
        Draft202012Validator(schema).validate(json.loads(answer.text))
    except (ValueError, ValidationError) as error:
        return f"{answer.text!r}: {error}"
    return ""


def _object(source: random.Random, max_fields: int, nested: bool) -> dict[str, Any]:
    names = source.sample(WORDS, source.randint(MIN_FIELDS, max_fields))
    properties = {name: source.choice(FIELDS)(source) for name in names}
    if nested:
        properties["details"] = _object(source, MIN_FIELDS + 1, nested=False)
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(source: random.Random) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": source.choice((8, 16, 24))}


def _enum(source: random.Random) -> dict[str, Any]:
    return {"enum": source.sample(VALUES, source.randint(2, 6))}


def _integer(source: random.Random) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "maximum": source.choice((9, 100, 2100))}


def _boolean(_: random.Random) -> dict[str, Any]:
    return {"type": "boolean"}


def _date(_: random.Random) -> dict[str, Any]:
    return {"type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$"}


def _list(source: random.Random) -> dict[str, Any]:
    items = source.choice((_text, _enum, _integer))(source)
    return {"type": "array", "items": items, "minItems": 1, "maxItems": source.randint(2, 4)}


FIELDS: tuple[Draw, ...] = (_text, _text, _enum, _integer, _boolean, _date, _list)
