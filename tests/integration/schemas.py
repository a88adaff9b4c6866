"""A JSON schema for tests of grammars, and a check of texts that must obey it."""

import json

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"enum": ["small", "größer"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "size", "count", "tags"],
    "additionalProperties": False,
}


def check_schema(text: str) -> None:
    found = json.loads(text)
    assert list(found) == SCHEMA["required"]
    assert len(found["name"]) <= 8 and found["size"] in ("small", "größer")
    assert 0 <= found["count"] <= 999 and {type(tag) for tag in found["tags"]} <= {bool}
