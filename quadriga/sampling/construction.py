"""Checks of SamplingParams where a program makes them: names, types and the alias max_tokens.

Messages on the wire are decoded without these checks; the decoder has its own.
"""

from typing import Any, TypeVar

import msgspec
from msgspec import StructMeta

from quadriga.errors import InvalidRequest
from quadriga.keywords import check_keywords

MAX_TOKENS_ALIAS = "max_tokens"

T = TypeVar("T")


class CheckedConstruction(StructMeta):
    """Metaclass of SamplingParams: calling the class checks its keyword arguments."""

    def __call__(cls: type[T], *values: Any, **fields: Any) -> Any:  # noqa: N805 - a metaclass
        """Make an instance.

        Raises:
            TypeError: a keyword is not the name of a field.
            InvalidRequest: a value has the wrong type, or the two names of one field differ.
        """
        if values:
            raise TypeError(
                f"{cls.__name__}() takes keywords only: {cls.__name__}(max_tokens=64, …)"
            )
        names = cls.__struct_fields__  # type: ignore[attr-defined]
        check_keywords(cls.__name__, fields, (*names, MAX_TOKENS_ALIAS))
        try:
            return msgspec.convert(_without_alias(fields), cls)
        except msgspec.ValidationError:
            raise _wrong_type(cls, fields) from None


def _without_alias(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with max_new_tokens in place of max_tokens."""
    if MAX_TOKENS_ALIAS not in fields:
        return fields
    fields = dict(fields)
    alias = fields.pop(MAX_TOKENS_ALIAS)
    if alias is None:
        return fields
    if fields.get("max_new_tokens") not in (None, alias):
        raise InvalidRequest(
            f"max_tokens is {alias} and max_new_tokens is {fields['max_new_tokens']}: they are two"
            " names of one limit; give one of them",
            MAX_TOKENS_ALIAS,
        )
    return fields | {"max_new_tokens": alias}


def _wrong_type(cls: type, fields: dict[str, Any]) -> InvalidRequest:
    """Return the error for the first field whose value has the wrong type."""
    types = {field.name: field.type for field in msgspec.structs.fields(cls)}
    types[MAX_TOKENS_ALIAS] = types["max_new_tokens"]
    for name, value in fields.items():
        try:
            msgspec.convert(value, types[name])
        except msgspec.ValidationError as error:
            reason = str(error).replace("`", "").replace("null", "None").replace(" | ", " or ")
            reason = reason[0].lower() + reason[1:].replace(" - at $", ", at ")
            return InvalidRequest(f"{name} is {value!r}: {reason}", name)
    raise AssertionError("msgspec refused the fields together, but accepts each of them")
