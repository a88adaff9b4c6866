"""Tenants: who a request belongs to, what each may use, and the key file that lists them.

In order: a tenant and its limits, what it sees of the server's info, the fields of a key file and
their checks, TenantFile, which reads the file again when it changes, and the edits of `quadriga
keys`.
"""

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from quadriga import disk
from quadriga.clock import now
from quadriga.errors import ConfigError, quoted
from quadriga.programs import install_command

MAX_NAME_CHARS = 64
MIN_PRIORITY, MAX_PRIORITY = -1000, 1000
NAME_FORM = r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,63}"
SEPARATOR = "/"
CACHE_KINDS = ("shared", "own")

_NAME = re.compile(NAME_FORM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """An owner of requests. Limits of None do not limit.

    Attributes:
        name: 1 to 64 letters, digits and `._:@-`.
        key: `sha256:` and the hash of its API key in hex; "" without one.
        curve: name of its key in --curve-dir; "" without one.
        weight: its share of the server, in proportion to the weights of the others.
        priority: smallest and largest priority of its requests.
        max_open_requests: requests that have not ended.
        requests_per_minute: requests in any 60 seconds.
        tokens_per_minute: prompt and generated tokens in any 60 seconds.
        models: names of the models that it may use; empty for all.
        sub_tenants: its requests may name a user, who then shares fairly with its other users.
        max_files_bytes: bytes of its files; output of its batches counts.
        cache: "own" keeps its cached prefixes apart from those of other tenants.
    """

    name: str
    key: str = ""
    curve: str = ""
    weight: float = 1.0
    priority: tuple[int, int] = (MIN_PRIORITY, MAX_PRIORITY)
    max_open_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    models: tuple[str, ...] = ()
    sub_tenants: bool = False
    max_files_bytes: int | None = None
    cache: str = "shared"


def is_name(text: str) -> bool:
    """Return whether a text can be the name of a tenant, or of a user of one."""
    return _NAME.fullmatch(text) is not None


def full_name(tenant: str, user: str) -> str:
    """Return the name of a user of a tenant, or the tenant's own without a user."""
    return f"{tenant}{SEPARATOR}{user}" if user else tenant


def parent_name(name: str) -> str:
    """Return the tenant of a name that may have a user."""
    return name.partition(SEPARATOR)[0]


# What a tenant sees of the server's info: what is served, and what itself has used.

# All other values say what others do, or how the server is run.
SHOWN_TO_TENANTS = frozenset(
    {
        "answer_format",
        "attention_backend",
        "chat",
        "chunked_prefill_size",
        "context_length",
        "cuda_graph",
        "default_max_tokens",
        "device",
        "dtype",
        "endpoint",
        "fill_format",
        "kernels",
        "max_batch_size",
        "max_frame_bytes",
        "max_queued_requests",
        "max_running_requests",
        "model",
        "model_details",
        "page_size",
        "prefix_cache",
        "protocol",
        "ready",
        "released_pins",
        "stream_interval",
        "vocab_size",
    }
)


def own_info(info: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    """Return the values of the server's info that a tenant may see.

    Args:
        info: that of the server.
        tenant: name of the tenant.
    """
    shown = {name: value for name, value in info.items() if name in SHOWN_TO_TENANTS}
    usage = info.get("tenants") or {}
    return {**shown, "tenants": {tenant: usage[tenant]} if tenant in usage else {}}


MAX_WEIGHT = 1e6
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
    except PermissionError as error:
        raise ConfigError(
            f"--keys {path} cannot be read by this process's user, number {os.geteuid()}:"
            f" {error.strerror}; chown the file to that user, and run `quadriga keys` as it"
            " (runuser -u USER -- quadriga keys …)"
        ) from None
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
        raise ConfigError(f"{where} is {quoted(entry)}: it must be a map, such as `name: alice`")
    if isinstance(entry.get("name"), str):
        where += f" ({quoted(entry['name'])})"
    values: dict[str, Any] = {}
    for field, value in entry.items():
        rule = RULES.get(field)
        if rule is None:
            raise ConfigError(
                f"{where}: there is no field {quoted(field)}: the fields are"
                f" {', '.join(KNOWN_FIELDS)}"
            )
        if not rule.holds(value):
            # A key that is in the file by mistake must not get into a log.
            shown = "not a hash" if field == "key" else quoted(value)
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


# A removed key is refused within a second: the file is looked at once in CHECK_INTERVAL_S, and is
# read when it has been the same for SETTLE_S, or after MAX_SETTLE_S. So a file that is being
# written in place is not taken for one that has lost its last tenants.
CHECK_INTERVAL_S = 0.4
SETTLE_S = 0.2
MAX_SETTLE_S = 0.4
LAST_GOOD_NAME = "keys.last-good.yaml"
PREFIX = "sha256:"


def hash_of_key(key: bytes) -> str:
    """Return the hash of an API key in the form of a key file."""
    return PREFIX + hashlib.sha256(key).hexdigest()


class TenantIndex:
    """Tenants by their names, API keys and CURVE keys."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        self.by_name = {tenant.name: tenant for tenant in tenants}
        self.by_curve = {tenant.curve: tenant for tenant in self.by_name.values() if tenant.curve}
        self._by_key = {tenant.key: tenant for tenant in self.by_name.values() if tenant.key}

    def with_key(self, key: bytes) -> Tenant | None:
        """Return the tenant of an API key; None for an unknown one.

        Only hashes are compared, so that the time of a lookup says nothing about a key that is
        nearly right.
        """
        given = hash_of_key(key)
        tenant = self._by_key.get(given)
        return tenant if tenant and hmac.compare_digest(given, tenant.key) else None

    def named(self, name: str) -> Tenant | None:
        """Return the tenant of a name that may have a user; None for an unknown one."""
        return self.by_name.get(parent_name(name))


class TenantFile:
    """The tenants of a key file.

    A caller asks `has_changed`, which costs a call of stat at most once in CHECK_INTERVAL_S, and
    then calls `reload`, off its event loop, or `reload_in_thread`. A file with an error leaves the
    tenants as they were, and is logged once; so does an empty one, as an editor or `>` leaves it
    for a moment. A process that starts while the file has an error takes the copy of the last good
    one.

    Args:
        path: the file.
        clock: seconds of a steady clock.
        directory: private directory for the copy of the last good file; None: no copy is kept.

    Attributes:
        index: the tenants that were read last.
        has_failed: the file has an error, and `index` is that of an earlier file.

    Raises:
        ConfigError: the file cannot be used, and there is no copy.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.monotonic, directory: Path | None = None
    ) -> None:
        self._path = path
        self._clock = clock
        self._copy = None if directory is None else directory / LAST_GOOD_NAME
        self._lock = threading.Lock()
        self._stamp = disk.file_stamp(path)
        self._checked_at = clock()
        self.has_failed = False
        self.index = self._first_index()

    def _first_index(self) -> TenantIndex:
        try:
            text = read_text(self._path)
            index = TenantIndex(parse_tenants(text, self._path))
        except ConfigError as error:
            if self._copy is None or not self._copy.exists():
                raise
            index = TenantIndex(read_tenants(self._copy))
            self._note_error(error)
            return index
        self._keep(text)
        return index

    def has_changed(self) -> bool:
        """Return whether the file is another one than was read last."""
        read_at = self._clock()
        if read_at - self._checked_at < CHECK_INTERVAL_S:
            return False
        self._checked_at = read_at
        return disk.file_stamp(self._path) != self._stamp

    def reload(self, settles: bool = True) -> None:
        """Read the file, unless another thread has read it meanwhile.

        Args:
            settles: wait until the file has not been written for SETTLE_S.
        """
        with self._lock:
            stamp = disk.file_stamp(self._path)
            if stamp == self._stamp:
                return
            if settles:
                stamp = self._settled_stamp()
            self._stamp = stamp
            try:
                text = read_text(self._path)
                if not text.strip():
                    raise ConfigError(f"{self._path} is empty: to remove all tenants, write []")
                self.index = TenantIndex(parse_tenants(text, self._path))
            except ConfigError as error:
                self._note_error(error)
                return
            self._keep(text)
            if self.has_failed:
                self.has_failed = False
                logging.info("the tenants are those of %s again", self._path)

    def reload_in_thread(self) -> None:
        """Read the file without waiting for it."""
        threading.Thread(target=self.reload, daemon=True).start()

    def _settled_stamp(self) -> disk.FileStamp | None:
        """Wait until the file is as it was for SETTLE_S, and return its stamp."""
        deadline = time.monotonic() + MAX_SETTLE_S
        while True:
            stamp = disk.file_stamp(self._path)
            age_s = now() - stamp.mtime_ns / 1e9 if stamp else SETTLE_S
            rest_s = min(SETTLE_S - age_s, SETTLE_S, deadline - time.monotonic())
            if rest_s <= 0:
                return stamp
            time.sleep(rest_s)

    def _note_error(self, error: ConfigError) -> None:
        self.has_failed = True
        logging.error("the tenants stay as they were: %s", error)

    def _keep(self, text: str) -> None:
        """Keep a copy of a good file, for processes that start while the file has an error."""
        if self._copy is None:
            return
        with suppress(OSError):  # a full disk; the copy is as it was
            disk.replace(self._copy, text.encode())


def check_key_file(path: Path) -> str:
    """Return a warning about a key file that other users may read or change, else "".

    Raises:
        ConfigError: the file cannot be read, or has an error.
    """
    read_tenants(path)
    is_open = path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return f"{path} can be read by other users of this machine: chmod 600 {path}" if is_open else ""


# Add entries to a key file, and remove them, without touching the rest of its text.

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
    mode = path.stat().st_mode & 0o777 if path.exists() else disk.FILE_MODE
    disk.replace(path, text.encode(), mode)
