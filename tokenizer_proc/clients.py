"""Who is connected to the public socket: messages go out to them, and it is noticed who is gone."""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from quadriga.errors import QuadrigaError, SlowReader
from quadriga.wire.messages.public import ErrorInfo, Probe, Refused, ServerGone
from quadriga.wire.sockets import AsyncPort, Unreachable, encode
from tokenizer_proc.backlog import Backlog

PROBE_DELAYS = (0.05, 0.5)
"""Seconds after a lost connection at which the clients are probed: the first is nearly always
enough, the second covers a connection that libzmq had not yet taken down."""
CUT_OFF_RETRY_S = 1.0
"""Between attempts to tell a client that it was cut off."""

_PROBE = encode(Probe())


class Clients:
    """The clients that have sent something.

    on_lost: called with one that is gone or is cut off: nothing that it asked for is wanted any
    more. num_refused: messages that were answered by an error.
    """

    def __init__(self, on_lost: Callable[[bytes], None]) -> None:
        self._on_lost = on_lost
        self._port: AsyncPort | None = None
        self._present: set[bytes] = set()
        self._backlogs: dict[bytes, Backlog] = {}
        self._cut_off: set[bytes] = set()
        self._barred: set[bytes] = set()
        self._probes: dict[float, asyncio.TimerHandle] = {}
        self.num_refused = 0

    def open(self, port: AsyncPort) -> None:
        self._port = port

    def saw(self, client: bytes) -> None:
        """Remember a client that has sent something."""
        self._present.add(client)

    def deliver(self, client: bytes, payload: bytes) -> None:
        """Send a message, now or when the client's socket takes it, if the client is there.

        One that was never here belongs to a front door before this one. It may still come back, and
        then asks for all that it missed: until then its requests go on.
        """
        if client in self._cut_off or client in self._barred:
            return
        backlog = self._backlogs.get(client)
        if backlog is not None:
            if not backlog.add(payload):
                self._cut_slow_reader_off(client)
        elif not self._try_to_send(client, payload):
            self._backlogs[client] = backlog = Backlog()
            backlog.add(payload)
            self._retry_later(client, backlog)

    def answer(self, client: bytes, message: msgspec.Struct) -> None:
        """Deliver a public message."""
        self.deliver(client, encode(message))

    def refuse(self, client: bytes, request_id: str, error: QuadrigaError) -> None:
        """Answer a message, or a request, by an error."""
        self.num_refused += 1
        self.answer(client, Refused(request_id, ErrorInfo.of(error)))

    def _try_to_send(self, client: bytes, payload: bytes) -> bool:
        """Return False where the client's socket takes nothing now. One that is gone is lost, and
        needs no message."""
        assert self._port is not None
        try:
            return self._port.send(client, payload)
        except Unreachable:
            if client in self._present:
                self._lose(client)
            return True

    def _retry_later(self, client: bytes, backlog: Backlog) -> None:
        asyncio.get_running_loop().call_later(backlog.retry_s, self._retry, client, backlog)

    def _retry(self, client: bytes, backlog: Backlog) -> None:
        if self._backlogs.get(client) is not backlog:
            return
        backlog.send(lambda payload: self._try_to_send(client, payload))
        if backlog:
            self._retry_later(client, backlog)
        else:
            self._backlogs.pop(client, None)

    def bar(self, client: bytes) -> None:
        """Send no more to a client whose key was revoked. It cannot connect again."""
        if client not in self._barred:
            self._barred.add(client)
            self._lose(client)

    def tell_all(self, error: QuadrigaError) -> None:
        """End each client's open requests with an error: the server ends."""
        for client in list(self._present):
            self.deliver(client, _server_gone(error))

    # --- who is gone ------------------------------------------------------------------------------

    def on_disconnect(self) -> None:
        """Find out whose connection was lost."""
        loop = asyncio.get_running_loop()
        for delay in PROBE_DELAYS:
            if (pending := self._probes.get(delay)) is not None:
                pending.cancel()
            self._probes[delay] = loop.call_later(delay, self._probe)

    def _probe(self) -> None:
        for client in list(self._present - self._cut_off):
            if client not in self._backlogs:
                self.deliver(client, _PROBE)

    def _lose(self, client: bytes) -> None:
        self._present.discard(client)
        self._cut_off.discard(client)
        self._backlogs.pop(client, None)
        self._on_lost(client)

    # --- who does not read ------------------------------------------------------------------------

    def _cut_slow_reader_off(self, client: bytes) -> None:
        logging.warning("a client does not read its results: cut off")
        self._cut_off.add(client)
        self._backlogs.pop(client, None)
        self._on_lost(client)
        self._tell_cut_off(client)

    def _tell_cut_off(self, client: bytes) -> None:
        """Try until the client reads again: what was lost must not look like silence."""
        if client not in self._cut_off:
            return
        error = SlowReader("results were not read fast enough; all open requests were aborted")
        if self._try_to_send(client, _server_gone(error)):
            self._cut_off.discard(client)
        else:
            asyncio.get_running_loop().call_later(CUT_OFF_RETRY_S, self._tell_cut_off, client)


def _server_gone(error: QuadrigaError) -> bytes:
    return encode(ServerGone(ErrorInfo.of(error)))
