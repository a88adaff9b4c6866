"""Read a key file: a YAML list with one map for each tenant."""

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from quadriga import disk
from quadriga.errors import ConfigError
from quadriga.programs import install_command
from quadriga.tenants.tenant import CACHE_KINDS, MAX_PRIORITY, MIN_PRIORITY, Tenant, is_name

MAX_WEIGHT = 1e6
MAX_SHOWN_CHARS = 60
KEY_FORM = re.compile(r"sha256:[0-9a-f]{64}")

KNOWN_FIELDS = tuple(field.name for field in fields(Tenant))


def read_tenants(path: Path) -> list[Tenant]:
    """Return the tenants of a key file.

    Raises:
        ConfigError: the file cannot be read, or an entry is wrong; one line names the file, the
            entry, the field, its value and the remedy.
    """
    return parse_tenants(read_text(path), path)


def read_text(path: Path) -> str:
    """Return the text of a key file. Raise ConfigError if it cannot be read."""
    try:
        return disk.read_text(path)
    except OSError as error:
        raise ConfigError(f"--keys {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8: {error.reason}") from None


def parse_tenants(text: str, path: Path) -> list[Tenant]:
    """Return the tenants of the text of a key file. Raise ConfigError as `read_tenants`."""
    content = _load(text, path)
    if content is None:
        return []
    if not isinstance(content, list):
        raise ConfigError(
            f"{path} must be a list of tenants, such as `- name: alice`; make entries with:"
            " quadriga keys add NAME --keys FILE"
        )
    tenants = [_tenant(entry, f"{path}: entry {n}") for n, entry in enumerate(content, start=1)]
    for field in ("name", "key", "curve"):
        _check_unique(tenants, field, path)
    return tenants


def _load(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"--keys needs PyYAML, which is not installed: {install_command('serve')}"
        ) from None
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(text, loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from None


def _check_unique(tenants: list[Tenant], field: str, path: Path) -> None:
    seen: dict[str, int] = {}
    for number, tenant in enumerate(tenants, start=1):
        value = getattr(tenant, field)
        if value and (first := seen.setdefault(value, number)) != number:
            shown = f"{field} {value!r}" if field != "key" else f"key of {tenant.name!r}"
            raise ConfigError(
                f"{path}: entries {first} and {number} have the same {shown}: change one of them"
            )


def _tenant(entry: Any, where: str) -> Tenant:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is {_shown(entry)}: it must be a map, such as `name: alice`")
    if isinstance(entry.get("name"), str):
        where += f" ({_shown(entry['name'])})"
    values: dict[str, Any] = {}
    for field, value in entry.items():
        rule = RULES.get(field)
        if rule is None:
            raise ConfigError(
                f"{where}: there is no field {_shown(field)}: the fields are"
                f" {', '.join(KNOWN_FIELDS)}"
            )
        if not rule.holds(value):
            # A key that stands in the file by mistake must not get into a log.
            shown = "not a hash" if field == "key" else _shown(value)
            raise ConfigError(f"{where}: {field} is {shown}: {rule.remedy}")
        values[field] = tuple(value) if isinstance(value, list) else value
    if "name" not in values:
        raise ConfigError(f"{where} has no name: add `name: NAME`")
    if not values.get("key") and not values.get("curve"):
        raise ConfigError(
            f"{where} has neither key nor curve: make a key with quadriga keys add, or name its"
            " CURVE key with `curve: NAME`"
        )
    return Tenant(**values)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"


# --- the fields -----------------------------------------------------------------------------------


class FieldRule(NamedTuple):
    """What a field's value must satisfy, and the remedy where it does not."""

    holds: Callable[[Any], bool]
    remedy: str


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_limit(value: Any) -> bool:
    return value is None or (_is_int(value) and value >= 1)


def _is_weight(value: Any) -> bool:
    is_number = _is_int(value) or isinstance(value, float)
    return is_number and 1 / MAX_WEIGHT <= value <= MAX_WEIGHT


def _is_range(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(map(_is_int, value))
        and MIN_PRIORITY <= value[0] <= value[1] <= MAX_PRIORITY
    )


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_LIMIT = FieldRule(_is_limit, "it must be a number from 1, or be left out for no limit")
RULES = {
    "name": FieldRule(
        lambda value: isinstance(value, str) and is_name(value),
        "it must be 1 to 64 letters, digits and ._:@-, in quotes if YAML reads it as a number",
    ),
    "key": FieldRule(
        lambda value: isinstance(value, str) and KEY_FORM.fullmatch(value) is not None,
        "it must be sha256: and 64 hex digits; make one with quadriga keys add NAME --keys FILE",
    ),
    "curve": FieldRule(
        lambda value: isinstance(value, str) and bool(value),
        "it must be the name of a file in clients/ of --curve-dir, without .key",
    ),
    "weight": FieldRule(
        _is_weight, f"it must be a number from {1 / MAX_WEIGHT:g} to {MAX_WEIGHT:g}"
    ),
    "priority": FieldRule(
        _is_range,
        f"it must be [smallest, largest], two numbers from {MIN_PRIORITY} to {MAX_PRIORITY}",
    ),
    "max_open_requests": _LIMIT,
    "requests_per_minute": _LIMIT,
    "tokens_per_minute": _LIMIT,
    "max_files_bytes": _LIMIT,
    "models": FieldRule(_is_list_of_texts, "it must be a list of names, such as [smollm2-135m]"),
    "sub_tenants": FieldRule(lambda value: isinstance(value, bool), "it must be true or false"),
    "cache": FieldRule(
        lambda value: value in CACHE_KINDS, f"it must be {' or '.join(CACHE_KINDS)}"
    ),
}
