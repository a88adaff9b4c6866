"""Who is connected to the public socket: messages go out to them, and it is noticed who is gone."""

import asyncio
import logging
from collections.abc import Callable

from quadriga.errors import QuadrigaError, SlowReader
from quadriga.messages.public import ErrorInfo, Probe, ServerGone
from quadriga.sockets import AsyncPort, Unreachable, encode

PROBE_DELAYS = (0.05, 0.5)
"""Seconds after a lost connection at which the clients are probed: the first is nearly always
enough, the second covers a connection that libzmq had not yet taken down."""
CUT_OFF_RETRY = 1.0
"""Seconds between attempts to tell a client that it was cut off."""

_PROBE = encode(Probe())


class Clients:
    """The clients that have sent something. on_lost: called with one that is gone or is cut off:
    nothing that it asked for is wanted any more."""

    def __init__(self, on_lost: Callable[[bytes], None]) -> None:
        self._on_lost = on_lost
        self._port: AsyncPort | None = None
        self._present: set[bytes] = set()
        self._cut_off: set[bytes] = set()
        self._barred: set[bytes] = set()

    def open(self, port: AsyncPort) -> None:
        self._port = port

    def saw(self, client: bytes) -> None:
        """It sent something."""
        self._present.add(client)

    def deliver(self, client: bytes, payload: bytes) -> None:
        """Send, as far as the client is there and reads.

        One that was never here belongs to a front door before this one. It may still come back, and
        then asks for all that it missed: until then its requests go on.
        """
        assert self._port is not None
        if client in self._cut_off or client in self._barred:
            return
        try:
            if not self._port.send(client, payload):
                self._cut_slow_reader_off(client)
        except Unreachable:
            if client in self._present:
                self._lose(client)

    def bar(self, client: bytes) -> None:
        """Its key was revoked. It gets nothing more, and cannot connect again."""
        if client not in self._barred:
            self._barred.add(client)
            self._lose(client)

    def tell_all(self, error: QuadrigaError) -> None:
        """The server ends: each client's open requests end with this error."""
        for client in list(self._present):
            self.deliver(client, _server_gone(error))

    # --- who is gone ------------------------------------------------------------------------------

    def on_disconnect(self) -> None:
        """Some connection was lost: find out whose."""
        for delay in PROBE_DELAYS:
            asyncio.get_running_loop().call_later(delay, self._probe)

    def _probe(self) -> None:
        for client in list(self._present - self._cut_off):
            self.deliver(client, _PROBE)

    def _lose(self, client: bytes) -> None:
        self._present.discard(client)
        self._cut_off.discard(client)
        self._on_lost(client)

    # --- who does not read ------------------------------------------------------------------------

    def _cut_slow_reader_off(self, client: bytes) -> None:
        logging.warning("a client does not read its results: cut off")
        self._cut_off.add(client)
        self._on_lost(client)
        self._tell_cut_off(client)

    def _tell_cut_off(self, client: bytes) -> None:
        """Try until the client reads again: what was lost must not look like silence."""
        assert self._port is not None
        if client not in self._cut_off:
            return
        error = SlowReader("results were not read fast enough; all open requests were aborted")
        try:
            told = self._port.send(client, _server_gone(error))
        except Unreachable:
            self._lose(client)
            return
        if told:
            self._cut_off.discard(client)
        else:
            asyncio.get_running_loop().call_later(CUT_OFF_RETRY, self._tell_cut_off, client)


def _server_gone(error: QuadrigaError) -> bytes:
    return encode(ServerGone(ErrorInfo.of(error)))
