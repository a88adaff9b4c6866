"""Command line flags as dataclass fields."""

import dataclasses
import types
import typing
from typing import Any

from quadriga.errors import ConfigError

TYPE_METAVARS: dict[Any, str] = {int: "N", float: "FACTOR", str: "NAME"}


def flag(
    default: Any,
    text: str,
    choices: tuple[str, ...] = (),
    *,
    unit: str = "",
    basic: bool = False,
    alias: str = "",
    alias_value: str = "",
    secures: bool = False,
) -> Any:
    """Make a dataclass field that is also a command line flag.

    Args:
        default: value of a flag that is not given.
        text: help text, without the default.
        choices: values that the flag may have; empty: any.
        unit: unit or kind of the value, which --help shows in its place, such as SECONDS; "": by
            the flag's type.
        basic: shown by --help; the other flags are shown by --help-all only.
        alias: another name of the flag, as a field name.
        alias_value: value that the alias, which then takes none itself, gives the flag.
        secures: the flag protects the server, so that an empty value, such as that of an unset
            variable, is refused and not taken for the default.
    """
    metadata: dict[str, Any] = {"help": text, "choices": choices, "basic": basic, "unit": unit}
    metadata |= {"alias": alias, "alias_value": alias_value, "secures": secures}
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(field_name: str) -> str:
    """Return the flag of a field."""
    return "--" + field_name.replace("_", "-")


def value_type(annotation: Any) -> Any:
    """Return the type of a flag's value; for `X | None`, X."""
    if isinstance(annotation, types.UnionType):
        return next(t for t in typing.get_args(annotation) if t is not types.NoneType)
    return annotation


def metavar(field: "dataclasses.Field[Any]") -> str:
    """Return the word that stands for a flag's value in the help: its unit, or its type's word."""
    unit: str = field.metadata["unit"]
    return unit or TYPE_METAVARS.get(value_type(field.type), "")


def check_positive(flags: Any, *names: str) -> None:
    """Raise ConfigError unless each of these attributes of `flags` is positive or None."""
    for name in names:
        value = getattr(flags, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name} must be positive (it is {value})")


# Far above every useful value, and far below what counters and the C library hold.
MAX_NUMBER = 2**48


def check_numbers(flags: Any) -> None:
    """Raise ConfigError for the first number of a group of flags that nothing can be sized by."""
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        if isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
            raise ConfigError(
                f"{field.name} is {value}: it must be a number of at most {MAX_NUMBER}; leave"
                f" {flag_name(field.name)} out for the default"
            )
