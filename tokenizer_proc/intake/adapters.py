"""The adapters that requests name: found by name, loaded from --lora-dir at the first use."""

import asyncio
import logging
from collections.abc import Callable

from quadriga.errors import ConfigError, InvalidRequest
from quadriga.server.models.adapters.store import AdapterEntry, AdapterStore
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.client import InfoValues
from quadriga.wire.to_scheduler import DropAdapters
from tokenizer_proc.replicas.replicas import Replicas

# Copies that nothing needs any more are looked for at this interval.
SWEEP_INTERVAL_S = 30.0


def salted(adapter: AdapterRef | None, salt: str) -> str:
    """Return a salt that keeps the cached pages of an adapter apart."""
    return salt if adapter is None else f"{adapter.id}\0{salt}"


class Adapters:
    """The adapters of the model.

    Args:
        store: their list and files; None: the server serves none.
        replicas: have the requests that use them.
        num_kept: adapters of --lora-dir that stay loaded without a request.
    """

    def __init__(self, store: AdapterStore | None, replicas: Replicas, num_kept: int = 0) -> None:
        self._store = store
        self._replicas = replicas
        self._num_kept = num_kept
        self._shown: dict[str, AdapterEntry] | None = None  # by which the pins were sent
        self._pinned: list[AdapterRef] | None = None

    def start(self) -> None:
        """Send which adapters are pinned. What follows sends it again where it has changed."""
        if self._store is not None:
            self._send_pins(self._store)

    def _send_pins(self, store: AdapterStore) -> None:
        entries = store.entries
        if entries is self._shown:
            return
        self._shown = entries
        pinned = [entry.ref for entry in entries.values() if entry.pinned]
        if pinned != self._pinned:
            self._pinned = pinned
            self._replicas.pin_adapters(pinned)

    def is_loaded(self, name: str) -> bool:
        """Return whether `find` knows at once what a name says. "": no adapter."""
        entry = self._store.find(name) if self._store is not None and name else None
        return entry is None or bool(entry.id)

    async def load(self, name: str) -> None:
        """Load an adapter of --lora-dir, if it is one and is not loaded. Raise InvalidRequest."""
        if not self.is_loaded(name):
            assert self._store is not None
            await asyncio.to_thread(self._store.load_found, name)

    def find(self, name: str) -> AdapterRef | None:
        """Return the present version of an adapter; None for "". Raise InvalidRequest."""
        if not name:
            return None
        if self._store is None:
            raise InvalidRequest(
                f"there is no adapter {name[:200]!r}: start the server with --lora-modules"
                " NAME=PATH, --lora-dir or --enable-lora",
                "adapter",
            )
        self._send_pins(self._store)
        return self._store.require(name).ref

    def info(self) -> InfoValues:
        """Return what the server info says of the adapters."""
        return {} if self._store is None else self._store.info()

    async def sweep(self, used_ids: Callable[[], set[str] | None]) -> None:
        """Remove, from time to time, what neither a name nor an open request needs.

        Args:
            used_ids: returns the ids of the adapters of open requests; None: it is not known yet.
        """
        store = self._store
        while store is not None:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            if (used := used_ids()) is None:
                continue
            try:
                self._send_pins(store)
                removed = await asyncio.to_thread(store.sweep, used, self._num_kept)
            except (OSError, ConfigError) as error:
                logging.warning("adapters without requests are not removed: %s", error)
                continue
            if removed:
                self._replicas.send(DropAdapters(removed))
