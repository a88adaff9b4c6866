"""TenantFile: the tenants of a key file, which is read again when it changes."""

import hashlib
import hmac
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from quadriga.clock import now
from quadriga.errors import ConfigError
from quadriga.tenants.parsing import parse_tenants, read_tenants, read_text
from quadriga.tenants.tenant import Tenant, parent_name

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
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        directory: Path | None = None,
    ) -> None:
        self._path = path
        self._clock = clock
        self._copy = None if directory is None else directory / LAST_GOOD_NAME
        self._lock = threading.Lock()
        self._stamp = _stamp(path)
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
        return _stamp(self._path) != self._stamp

    def reload(self, settles: bool = True) -> None:
        """Read the file, unless another thread has read it meanwhile.

        Args:
            settles: wait until the file has not been written for SETTLE_S.
        """
        with self._lock:
            stamp = _stamp(self._path)
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

    def _settled_stamp(self) -> tuple[int, ...]:
        """Wait until the file is as it was for SETTLE_S, and return its stamp."""
        deadline = time.monotonic() + MAX_SETTLE_S
        while True:
            stamp = _stamp(self._path)
            age_s = now() - stamp[-1] / 1e9 if stamp else SETTLE_S
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
        fresh = self._copy.with_name(f"{self._copy.name}.{os.getpid()}")
        with suppress(OSError):  # a full disk; the copy is as it was
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(text)
            os.replace(fresh, self._copy)


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
