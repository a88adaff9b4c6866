"""A client's connection: finds the server, and notices when it is gone and when it is back.

    CLOSED ---open---> CONNECTING ---pong---> OPEN ---break---> RECONNECTING ---pong---> OPEN
       ^                   |                   |                     |
       +-----timeout-------+                   +----server gone---+  | timeout
                                                                  v  v
    close() leads to CLOSED from everywhere                       LOST ---pong---> OPEN

A search (search.py) repeats the ping until a Pong comes or the time is over. Any Pong counts that
comes over an established connection: pings are not matched to answers, since a server that dies
loses pings.
"""

import asyncio
import enum
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from quadriga.client.arguments import check_integers
from quadriga.client.connection.http_port import HttpProbe
from quadriga.client.connection.link import LinkEvents, ServerLink
from quadriga.client.connection.search import Search
from quadriga.errors import InvalidRequest, QuadrigaError, RequestAborted, ServerUnreachable
from quadriga.wire import sockets
from quadriga.wire.messages.from_client import MAX_FRAME_BYTES, PROTOCOL_VERSION, Ping
from quadriga.wire.messages.large_integers import with_large_integers
from quadriga.wire.messages.to_client import ErrorInfo, Pong, ServerMessage

# A search without an answer for so long continues through a new socket, in case the reconnecting of
# the old one is stuck.
MAX_SOCKET_SILENCE_S = 5.0
# The same where there are several endpoints: the search continues at the next one.
MAX_ENDPOINT_SILENCE_S = 1.0

CLOSED_BY_CALLER = ErrorInfo(RequestAborted.code, "the client was closed")
_SILENT = (
    "something listens there but does not answer: does one side use keys and the other not?"
    " see docs/security.md"
)


class ConnectionState(enum.Enum):
    """State of a connection; the module's docstring has the transitions."""

    CLOSED = enum.auto()
    CONNECTING = enum.auto()
    OPEN = enum.auto()
    RECONNECTING = enum.auto()
    LOST = enum.auto()


class ConnectionEvents(NamedTuple):
    """Callbacks of a connection.

    Attributes:
        on_message: a message other than a Pong came.
        on_interrupt: the connection broke, and messages may be lost.
        on_reconnect: the server answers again.
        on_lost: the server does not answer again, for this reason.
    """

    on_message: Callable[[ServerMessage], None]
    on_interrupt: Callable[[], None]
    on_reconnect: Callable[[], None]
    on_lost: Callable[[ErrorInfo], None]


class Connection:
    """Sends messages to a server and passes on its messages.

    Args:
        endpoint: the server's public socket, or several with commas between them.
        identity: name of this client at the server.
        events: callbacks.
        reconnect_timeout: seconds within which a server must answer after its connection broke.
        curve_dir: directory of the keys (curve.py); None: no keys.
    """

    def __init__(
        self,
        endpoint: str,
        identity: uuid.UUID,
        events: ConnectionEvents,
        reconnect_timeout: float,
        curve_dir: Path | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._events = events
        self._reconnect_timeout = reconnect_timeout
        self._decode = msgspec.msgpack.Decoder(ServerMessage).decode
        self._max_frame_bytes = MAX_FRAME_BYTES
        self._state = ConnectionState.CLOSED
        self._lost: ErrorInfo | None = None  # the reason, in LOST
        self._waiters: list[asyncio.Future[ErrorInfo | None]] = []  # of CONNECTING
        link_events = LinkEvents(
            self._on_frames, self._on_connect, self._on_disconnect, self._on_refusal
        )
        self._link = ServerLink(endpoint, identity, curve_dir, link_events)
        self._refusal = ""
        self._http_probe = HttpProbe(self._on_web_server)
        self._search = Search(self._ping, self._not_found)
        self._connect_timeout = self._renew_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether `open` returns or raises without waiting."""
        return self._state not in (ConnectionState.CLOSED, ConnectionState.CONNECTING)

    @property
    def is_lost(self) -> bool:
        """Whether the server has ended or does not answer again."""
        return self._state is ConnectionState.LOST

    # --- calls ------------------------------------------------------------------------------------

    async def open(self, timeout: float) -> None:
        """Wait until the server has answered once.

        Concurrent calls share one attempt and its outcome. The attempt ends early when no call
        waits for it any more.

        Args:
            timeout: seconds of the attempt that this call starts, if it starts one.

        Raises:
            ServerUnreachable: no answer within the timeout, or the connection was lost.
            RequestAborted: the client was closed meanwhile.
            ConfigError: the endpoint is not an address, or the keys cannot be read.
        """
        if self._state is ConnectionState.CLOSED:
            self._link.open()
            self._state, self._connect_timeout = ConnectionState.CONNECTING, timeout
            self._start_search(timeout)
        elif self._state is ConnectionState.LOST and not self._search.is_running:
            self._start_search(self._reconnect_timeout)
        while self._state is ConnectionState.CONNECTING:
            await self._wait_for_attempt()
        self.check()

    async def _wait_for_attempt(self) -> None:
        waiter: asyncio.Future[ErrorInfo | None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            failure = await waiter
        finally:
            self._waiters.remove(waiter)
            if self._state is ConnectionState.CONNECTING and not self._waiters:
                self._shut(linger_s=0)
        if failure is None and self._state is ConnectionState.CLOSED:
            failure = CLOSED_BY_CALLER
        if failure is not None:
            raise failure.exception()

    async def close(self, linger_s: float) -> None:
        """Disconnect; unsent messages have `linger_s` seconds."""
        self._shut(linger_s)
        self._end_attempt(CLOSED_BY_CALLER)

    def check(self) -> None:
        """Raise the reason why nothing can be sent: not connected, or the connection is lost."""
        if self._lost is not None:
            raise self._lost.exception()
        if not self.is_open:
            raise ServerUnreachable(f"not connected to {self.endpoint}; call connect() first")

    def send(self, message: msgspec.Struct) -> bool:
        """Send a message; return False if it must be sent again when the server is back.

        Raises:
            InvalidRequest: the message is too large or cannot be encoded.
        """
        try:
            frame = _encode(message)
        except (OverflowError, TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the request cannot be encoded: {error}") from None
        if len(frame) > self._max_frame_bytes:
            raise InvalidRequest(
                f"the request is {len(frame)} bytes: the server takes at most"
                f" {self._max_frame_bytes}; shorten the prompt",
                "prompt",
            )
        return self._state is ConnectionState.OPEN and self._link.send(frame)

    def give_up(self, reason: ErrorInfo) -> None:
        """Handle the end of the server. An attempt to connect goes on: a new server may start."""
        if self._state is ConnectionState.CONNECTING:
            self._refusal = reason.message
        else:
            self._state, self._lost = ConnectionState.LOST, reason
        self._link.is_up = False  # a Pong of the server that ends does not count

    def _shut(self, linger_s: float) -> None:
        self._state, self._lost = ConnectionState.CLOSED, None
        self._search.stop()
        self._link.close(linger_s)
        self._http_probe.stop()

    def _end_attempt(self, failure: ErrorInfo | None) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(failure)

    # --- events -----------------------------------------------------------------------------------

    def _on_connect(self) -> None:
        self._refusal = self._refusal or _SILENT
        if self._state is ConnectionState.CONNECTING:
            self._http_probe.start(self._link.endpoint)
        if self._search.is_running:
            self._search.hurry()
        elif self._state is ConnectionState.LOST:
            self._start_search(self._reconnect_timeout)

    def _on_refusal(self, reason: str) -> None:
        self._refusal = f"{reason}; see docs/security.md"

    def _on_web_server(self, reason: str) -> None:
        """End the attempt: the endpoint is that of a web server, and has not answered."""
        if self._state is ConnectionState.CONNECTING:
            self._shut(linger_s=0)
            self._end_attempt(_unreachable(reason))

    def _on_disconnect(self) -> None:
        """Process messages received before the disconnect first.

        A server that stops sends its final messages just before it closes.
        """
        self._link.receive()
        if self._state is ConnectionState.OPEN:
            self._state = ConnectionState.RECONNECTING
            self._events.on_interrupt()
        if (
            self._state in (ConnectionState.RECONNECTING, ConnectionState.LOST)
            and not self._search.is_running
        ):
            self._start_search(self._reconnect_timeout)

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            message: ServerMessage = self._decode(frames[0])
        except msgspec.DecodeError as error:
            self._refusal = f"unreadable answer from {self.endpoint}: {error}"
            self._events.on_lost(ErrorInfo(QuadrigaError.code, self._refusal))
            return
        if not isinstance(message, Pong):
            self._events.on_message(message)
        elif self._link.is_up:
            self._on_pong(message)

    def _on_pong(self, pong: Pong) -> None:
        self._max_frame_bytes = pong.max_frame_bytes
        if self._state is ConnectionState.OPEN:
            return
        before, self._state = self._state, ConnectionState.OPEN
        self._lost, self._refusal = None, ""
        self._search.stop()
        self._http_probe.stop()
        if before is ConnectionState.CONNECTING:
            self._end_attempt(None)
        else:
            self._events.on_reconnect()

    # --- the search -------------------------------------------------------------------------------

    def _start_search(self, timeout: float) -> None:
        self._renew_at = _now() + self._max_silence_s
        self._search.start(timeout)

    @property
    def _max_silence_s(self) -> float:
        return MAX_ENDPOINT_SILENCE_S if self._link.has_others else MAX_SOCKET_SILENCE_S

    def _ping(self) -> None:
        if _now() >= self._renew_at:
            self._link.try_next()
            self._renew_at = _now() + self._max_silence_s
        try:
            self._link.open()
            if not self._link.send(sockets.encode(Ping(PROTOCOL_VERSION))):
                self._link.close(linger_s=0)  # the next ping has another socket
        except QuadrigaError as error:
            self._refusal = str(error)

    def _not_found(self) -> None:
        """Handle the end of a search. Messages that came while the event loop was busy count."""
        self._link.process_events()
        self._link.receive()
        if self._state is ConnectionState.CONNECTING:
            reason = self._refusal or "is the server running there?  quadriga serve"
            self._shut(linger_s=0)
            self._end_attempt(
                _unreachable(
                    f"no answer from {self.endpoint} within {self._connect_timeout:g} s; {reason}"
                )
            )
        elif self._state is ConnectionState.RECONNECTING:
            self._state = ConnectionState.LOST
            self._lost = _unreachable(
                f"lost the connection to {self.endpoint}: its tokenizer process is gone, and"
                f" nothing has answered there for {self._reconnect_timeout:g} s"
                f"{self._refusal and f' ({self._refusal})'}; whether the requests were run is not"
                " known"
            )
            self._events.on_lost(self._lost)


def _unreachable(reason: str) -> ErrorInfo:
    return ErrorInfo(ServerUnreachable.code, reason)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _encode(message: msgspec.Struct) -> bytes:
    try:
        return sockets.encode(message)
    except OverflowError:
        check_integers(message)
        return sockets.encode(with_large_integers(message))
