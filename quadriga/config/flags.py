"""What a dataclass field needs to be a command line flag, and what its value must keep."""

import dataclasses
import types
import typing
from typing import Any

from quadriga.errors import ConfigError


def flag(default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field that is also a command line flag."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def value_type(annotation: Any) -> Any:
    """What a flag's text becomes: of a field that may be None, the other type."""
    if isinstance(annotation, types.UnionType):
        return next(t for t in typing.get_args(annotation) if t is not types.NoneType)
    return annotation


def positive(name: str, value: float | None) -> None:
    """ConfigError unless the value of a flag is positive, or was left out."""
    if value is not None and not value > 0:
        raise ConfigError(f"{name} must be positive (it is {value})")
