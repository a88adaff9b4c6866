"""Add entries to a key file, and remove them, without touching the rest of its text."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quadriga import disk
from quadriga.errors import ConfigError
from quadriga.tenants.key_file import hash_of_key
from quadriga.tenants.parsing import parse_tenants, read_tenants, read_text

KEY_PREFIX = "qk-"
NUM_KEY_BYTES = 32


def add_tenant(path: Path, name: str, values: Mapping[str, Any]) -> str:
    """Add a tenant with a new API key to a key file, and return the key, which is kept nowhere.

    Args:
        path: the file; it is made if there is none.
        name: name of the tenant.
        values: its further fields.

    Raises:
        ConfigError: the file or the new entry is wrong, or the name is taken.
    """
    key = KEY_PREFIX + secrets.token_urlsafe(NUM_KEY_BYTES)
    text = read_text(path) if path.exists() else ""
    tenants = parse_tenants(text, path)
    if any(tenant.name == name for tenant in tenants):
        raise ConfigError(f"{path} has a tenant {name!r}: choose another name, or remove it first")
    entry = {"name": name, "key": hash_of_key(key.encode()), **values}
    if not tenants:
        text = "".join(line for line in text.splitlines(True) if line.strip() != "[]")
    _write(path, text + ("\n" if text and not text.endswith("\n") else "") + _as_yaml(entry))
    return key


def remove_tenant(path: Path, name: str) -> None:
    """Remove a tenant from a key file. Raise ConfigError if it has none of this name."""
    import yaml

    tenants = read_tenants(path)
    names = [tenant.name for tenant in tenants]
    if name not in names:
        raise ConfigError(f"{path} has no tenant {name!r}: it has {', '.join(names) or 'none'}")
    text = read_text(path)
    root = yaml.compose(text, yaml.SafeLoader)
    if root.flow_style:
        raise ConfigError(f"{path} is a list in brackets: remove {name!r} with an editor")
    number, lines = names.index(name), text.splitlines(True)
    starts = [node.start_mark.line for node in root.value]
    end = starts[number + 1] if number + 1 < len(starts) else root.end_mark.line
    # A server takes a file without any text for one that is being written.
    rest = "[]\n" if len(names) == 1 else ""
    _write(path, "".join(lines[: starts[number]] + lines[end:]) + rest)


def _as_yaml(entry: Mapping[str, Any]) -> str:
    first, *others = (f"{name}: {_inline(value)}" for name, value in entry.items())
    return "".join([f"- {first}\n", *(f"  {line}\n" for line in others)])


def _inline(value: Any) -> str:
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.removesuffix("...\n").strip()


def _write(path: Path, text: str) -> None:
    """Replace a file at once; a new one is readable by its owner only."""
    parse_tenants(text, path)
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(new, mode)
        os.replace(new, path)
        disk.sync_directory(path.parent)
    finally:
        new.unlink(missing_ok=True)
