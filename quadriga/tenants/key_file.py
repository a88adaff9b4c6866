"""TenantFile: the tenants of a key file, which is read again when it changes."""

import hashlib
import hmac
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from quadriga.errors import ConfigError
from quadriga.tenants.parsing import read_tenants
from quadriga.tenants.tenant import Tenant, parent_name

CHECK_INTERVAL_S = 1.0
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
    tenants as they were, and is logged once.

    Args:
        path: the file.
        clock: seconds of a steady clock.

    Attributes:
        index: the tenants that were read last.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp = _stamp(path)
        self._checked_at = clock()
        self.index = TenantIndex(read_tenants(path))

    def has_changed(self) -> bool:
        """Return whether the file is another one than was read last."""
        now = self._clock()
        if now - self._checked_at < CHECK_INTERVAL_S:
            return False
        self._checked_at = now
        return _stamp(self._path) != self._stamp

    def reload(self) -> None:
        """Read the file, unless another thread has read it meanwhile."""
        with self._lock:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            try:
                self.index = TenantIndex(read_tenants(self._path))
            except ConfigError as error:
                logging.error("the tenants stay as they were: %s", error)

    def reload_in_thread(self) -> None:
        """Read the file without waiting for it."""
        threading.Thread(target=self.reload, daemon=True).start()


def check_key_file(path: Path) -> str:
    """Return a warning about a key file that other users may read or change, else "".

    Raises:
        ConfigError: the file cannot be read, or has an error.
    """
    read_tenants(path)
    is_open = path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return f"{path} can be read by other users of this machine: chmod 600 {path}" if is_open else ""


def _stamp(path: Path) -> tuple[int, ...]:
    """Return values that change when a file is overwritten or replaced; () without a file."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns
