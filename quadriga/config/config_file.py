"""--config FILE: the flags of a server as a YAML map."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from quadriga import disk
from quadriga.config.flags import flag_name, value_type
from quadriga.config.foreign_flags import foreign_flag_advice
from quadriga.errors import ConfigError
from quadriga.keywords import similar
from quadriga.programs import install_command


def read_config(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read a file of flags.

    A key is a flag without its dashes, `max-batch-size` or `max_batch_size`. A list stands for the
    comma-separated items of a flag. Keys without a value are
    ignored, but for flags that protect the server.

    Args:
        path: the file.
        fields: dataclass fields of the flags, by their names and aliases.

    Returns:
        Values by field name.

    Raises:
        ConfigError: the file cannot be read, or has a key or a value that no flag can have.
    """
    values = {}
    for key, value in _read_map(path).items():
        name = str(key).replace("-", "_")
        if name not in fields:
            raise ConfigError(f"{path}: there is no flag {key!r}{_suggestions(name, fields)}")
        field = fields[name]
        if value is None:
            if field.metadata["secures"]:
                values[field.name] = ""  # which is refused
            continue
        if name == field.metadata["alias"] and field.metadata["alias_value"]:
            if _converted(f"{path}: {key}", value, bool):
                values[field.name] = field.metadata["alias_value"]
        else:
            values[field.name] = _converted(f"{path}: {key}", value, field.type)
            _check_choice(f"{path}: {key}", values[field.name], field.metadata["choices"])
    return values


def _read_map(path: Path) -> dict[Any, Any]:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"--config needs PyYAML, which is not installed: {install_command('serve')}"
        ) from None
    try:
        content = yaml.safe_load(disk.read_text(path))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a map of flags, such as `max-batch-size: 32`")
    return content


def _suggestions(name: str, fields: Mapping[str, Any]) -> str:
    if (advice := foreign_flag_advice(flag_name(name))) is not None:
        return f"; {advice}"
    near = similar(name, fields)
    return f"; near it: {', '.join(flag_name(n)[2:] for n in near)}" if near else ""


def _converted(where: str, value: Any, annotation: Any) -> Any:
    """Return a YAML value as the command line would give it."""
    if value_type(annotation) is str:
        items = value if isinstance(value, list) else [value]
        if all(isinstance(item, str | int | float) for item in items):
            value = ",".join(map(str, items))
    try:
        return msgspec.convert(value, annotation)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where} is {value!r}: {error}") from None


def _check_choice(where: str, value: Any, choices: tuple[str, ...]) -> None:
    if choices and value not in choices:
        raise ConfigError(f"{where} is {value!r}: it must be one of {', '.join(choices)}")
