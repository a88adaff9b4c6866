"""--config FILE: the flags of a server as a YAML map."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quadriga.config.flags import flag_name, value_type
from quadriga.errors import ConfigError

SHOWN_NEAR = 3


def read_config(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Values by field name. A key is a flag without its dashes: `max-batch-size` or
    `max_batch_size`; a list stands for the words of a flag that takes several. Keys without a value
    are as if absent.

    fields: every flag's dataclass field. ConfigError names the file, the key and what may stand
    there.
    """
    found = {}
    for key, value in _map(path).items():
        name = str(key).replace("-", "_")
        if name not in fields:
            raise ConfigError(f"{path}: there is no flag {key!r}{_near(name, fields)}")
        if value is not None:
            found[name] = _converted(f"{path}: {key}", value, fields[name])
    return found


def _map(path: Path) -> dict[Any, Any]:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            "--config needs PyYAML, which is not installed: pip install PyYAML"
        ) from None
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a map of flags, such as `max-batch-size: 32`")
    return content


def _near(name: str, fields: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, fields, SHOWN_NEAR)
    return f"; near it: {', '.join(flag_name(n)[2:] for n in near)}" if near else ""


def _converted(where: str, value: Any, field: Any) -> Any:
    """The value as the command line would have made it."""
    kind, choices = value_type(field.type), field.metadata["choices"]
    if isinstance(value, list) and kind is str and all(isinstance(v, str | int) for v in value):
        value = ",".join(map(str, value))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and kind in (float, str):
        value = kind(value)
    if type(value) is not kind:
        raise ConfigError(f"{where} is {value!r}: it must be {_named(kind)}")
    if choices and value not in choices:
        raise ConfigError(f"{where} is {value!r}: it must be one of {', '.join(choices)}")
    return value


def _named(kind: type) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[kind]
