"""Look up the types of arguments that a model does not write as JSON, in the tools' schemas."""

from collections.abc import Iterable, Mapping
from typing import Any

MAX_REFERENCES = 8

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class ToolSchemas(dict[str, Mapping[str, Any]]):
    """The JSON schema of the arguments of each tool of a request, by the tool's name."""

    def types(self, tool: str, argument: str) -> frozenset[str]:
        """Return the JSON types that an argument may have; empty if the schema does not say."""
        schema = self.get(tool, {})
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return frozenset()
        return frozenset(_types(properties.get(argument), schema, MAX_REFERENCES))


def _types(schema: Any, root: Mapping[str, Any], references: int) -> Iterable[str]:
    """Return the types of a schema.

    Args:
        schema: the schema; one of another type than an object has no types.
        root: the schema that references point into.
        references: how many further references and alternatives are followed.
    """
    if not isinstance(schema, Mapping) or references == 0:
        return ()
    named = schema.get("type")
    if isinstance(named, str):
        return (named,)
    if isinstance(named, list):
        return [name for name in named if isinstance(name, str)]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return [
            _TYPES.get(type(value), "array" if isinstance(value, list) else "object")
            for value in values
        ]
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            return [name for part in schema[key] for name in _types(part, root, references - 1)]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return _types(target, root, references - 1)
    return ()
