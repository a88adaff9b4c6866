"""The clients of the public socket: messages to them, and the loss of those that leave or stall."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import msgspec

from quadriga.errors import QuadrigaError, SlowReader
from quadriga.server.processes.logs import MAX_REASON_CHARS, in_a_line, log_fields
from quadriga.wire.async_sockets import AsyncPort, Unreachable
from quadriga.wire.client import ErrorInfo, Probe, Refused, ServerGone, is_gateway, short_address
from quadriga.wire.sockets import encode

# The bounds of one client, beside the few messages that its socket takes. A single message may be
# larger.
MAX_UNREAD_MESSAGES = 4096
MAX_UNREAD_BYTES = 64 * 1024 * 1024
MIN_RETRY_S, MAX_RETRY_S = 0.001, 1.0
FLUSH_POLL_S = 0.01
# After a lost connection all clients are probed: the first probe is nearly always enough, the
# second covers a connection that libzmq had not yet taken down.
PROBE_DELAYS_S = (0.05, 0.5)
CUT_OFF_RETRY_S = 1.0

_PROBE = encode(Probe())


class Backlog:
    """Messages, in order, for a client whose socket takes no more at the moment.

    Attributes:
        retry_s: seconds until the next attempt; it doubles while the client reads nothing.
    """

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._num_bytes = 0
        self.retry_s = MIN_RETRY_S

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: bytes) -> bool:
        """Append a message. Return False, and leave it out, where too much is unread."""
        num_bytes = self._num_bytes + len(message)
        if len(self._messages) >= MAX_UNREAD_MESSAGES or (
            self._messages and num_bytes > MAX_UNREAD_BYTES
        ):
            return False
        self._messages.append(message)
        self._num_bytes = num_bytes
        return True

    def send(self, send: Callable[[bytes], bool]) -> None:
        """Send messages until `send` returns False. Exceptions of `send` pass through."""
        num_before = len(self._messages)
        while self._messages and send(self._messages[0]):
            self._num_bytes -= len(self._messages.popleft())
        has_progress = len(self._messages) < num_before
        self.retry_s = MIN_RETRY_S if has_progress else min(2 * self.retry_s, MAX_RETRY_S)


class Clients:
    """Deliver messages to the clients that have sent something, and notice which are lost.

    A client is lost when it disconnects, does not read, or has its key revoked.

    Args:
        on_lost: called with the address of a lost client, whose requests must be aborted. It is a
            callback because most losses are noticed by a timer.
        logs_refusals: log each refusal, but for those of the gateway, which logs them itself.

    Attributes:
        num_refused: messages that were answered by an error.
    """

    def __init__(self, on_lost: Callable[[bytes], None], logs_refusals: bool = False) -> None:
        self._logs_refusals = logs_refusals
        self._on_lost = on_lost
        self._port: AsyncPort | None = None
        self._present: set[bytes] = set()
        self._backlogs: dict[bytes, Backlog] = {}
        self._cut_off: set[bytes] = set()
        self._blocked: set[bytes] = set()
        self._probes: dict[float, asyncio.TimerHandle] = {}
        self.num_refused = 0

    def open(self, port: AsyncPort) -> None:
        """Send through this port from now on."""
        self._port = port

    def mark_seen(self, client: bytes) -> None:
        """Remember a client that has sent something."""
        self._present.add(client)

    def deliver(self, client: bytes, payload: bytes) -> None:
        """Send an encoded message, now or when the client's socket takes it.

        A message to an unreachable client is dropped. If the client has sent something here, it is
        lost. If not, it belongs to a frontend that died: it may still come back, and then asks for
        everything that it missed, so its requests go on.
        """
        if client in self._cut_off or client in self._blocked:
            return
        backlog = self._backlogs.get(client)
        if backlog is not None:
            if not backlog.add(payload):
                self._cut_off_slow_reader(client)
        elif not self._try_to_send(client, payload):
            self._backlogs[client] = backlog = Backlog()
            backlog.add(payload)
            self._retry_later(client, backlog)

    def offer(self, client: bytes, payload: bytes) -> bool:
        """Send an encoded message that may be lost, if the client's socket takes it now.

        Return whether it was sent.
        """
        if client in self._cut_off or client in self._blocked or client in self._backlogs:
            return False
        return self._try_to_send(client, payload)

    def answer(self, client: bytes, message: msgspec.Struct) -> None:
        """Deliver a public message."""
        self.deliver(client, encode(message))

    def refuse(self, client: bytes, request_id: str, error: QuadrigaError) -> None:
        """Answer a message or a request with an error."""
        self.num_refused += 1
        if self._logs_refusals and not is_gateway(client):
            reason = in_a_line(str(error), MAX_REASON_CHARS)
            address = short_address(client)
            log_fields(
                logging.INFO,
                f"{in_a_line(request_id)} · client {address} · refused · {error.code}: {reason}",
                event="refused",
                request_id=request_id,
                client=address,
                code=error.code,
                error=str(error)[:MAX_REASON_CHARS],
            )
        self.answer(client, Refused.of(request_id, error))

    def broadcast(self, error: QuadrigaError) -> None:
        """End the open requests of every client with an error, because the server ends."""
        for client in list(self._present):
            self.deliver(client, _server_gone(error))

    async def flush(self, stall_timeout_s: float) -> None:
        """Wait until the clients' sockets have taken every message.

        Messages that no client takes for `stall_timeout_s` are dropped.
        """
        loop = asyncio.get_running_loop()
        num_left, deadline = -1, 0.0
        while self._backlogs:
            num_before, num_left = num_left, sum(map(len, self._backlogs.values()))
            if num_left != num_before:
                deadline = loop.time() + stall_timeout_s
            elif loop.time() >= deadline:
                break
            await asyncio.sleep(FLUSH_POLL_S)
        self._backlogs.clear()

    def close(self) -> None:
        """Send nothing more by a timer, because the socket is about to be closed."""
        for probe in self._probes.values():
            probe.cancel()
        self._backlogs.clear()

    def _try_to_send(self, client: bytes, payload: bytes) -> bool:
        """Return False if the client's socket takes nothing now; True if no retry is needed."""
        assert self._port is not None
        try:
            return self._port.send(client, payload)
        except Unreachable:
            if client in self._present:
                self._drop(client)
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

    # --- clients that are gone --------------------------------------------------------------------

    def block(self, client: bytes) -> None:
        """Drop a client whose key was revoked; it cannot connect again."""
        if client not in self._blocked:
            self._blocked.add(client)
            self._drop(client)

    def on_disconnect(self) -> None:
        """Probe all clients soon, to find out which of them lost its connection."""
        loop = asyncio.get_running_loop()
        for delay_s in PROBE_DELAYS_S:
            if (pending := self._probes.get(delay_s)) is not None:
                pending.cancel()
            self._probes[delay_s] = loop.call_later(delay_s, self._probe)

    def _probe(self) -> None:
        for client in list(self._present - self._cut_off):
            if client not in self._backlogs:
                self.deliver(client, _PROBE)

    def _drop(self, client: bytes) -> None:
        self._present.discard(client)
        self._cut_off.discard(client)
        self._backlogs.pop(client, None)
        self._on_lost(client)

    # --- clients that do not read -----------------------------------------------------------------

    def _cut_off_slow_reader(self, client: bytes) -> None:
        logging.warning("cut off a client that does not read its results")
        self._cut_off.add(client)
        self._backlogs.pop(client, None)
        self._on_lost(client)
        self._announce_cut_off(client)

    def _announce_cut_off(self, client: bytes) -> None:
        """Send the reason, again and again until it is taken: the loss must not look like silence.

        The client may send new requests afterwards.
        """
        if client not in self._cut_off:
            return
        error = SlowReader("results were not read fast enough; all open requests were aborted")
        if self._try_to_send(client, _server_gone(error)):
            self._cut_off.discard(client)
        else:
            asyncio.get_running_loop().call_later(CUT_OFF_RETRY_S, self._announce_cut_off, client)


def _server_gone(error: QuadrigaError) -> bytes:
    return encode(ServerGone(ErrorInfo.of(error)))
