"""A client's connection: finds the server, and notices when it is gone and when it is back.

In order: the error for the address of a web gateway, the socket and its state, the schedule of the
pings while the client searches, and Connection, which uses them.
"""

import asyncio
import enum
import json
import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quadriga.client.types import check_integers
from quadriga.errors import (
    ConfigError,
    InvalidRequest,
    QuadrigaError,
    RequestAborted,
    ServerUnreachable,
)
from quadriga.wire import sockets
from quadriga.wire.async_sockets import AsyncPort, ConnectionWatch
from quadriga.wire.client import (
    DEFAULT_ENDPOINT,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    ErrorInfo,
    Ping,
    Pong,
    ServerMessage,
)
from quadriga.wire.packing import with_large_integers
from quadriga.wire.sockets import NO_LIMIT

# A listener that does not answer a first ping for so long is asked whether it is a web server.
PROBE_DELAY_S = 0.5
PROBE_TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 1 << 20
_REQUEST = b"GET /server_info HTTP/1.0\r\nHost: localhost\r\n\r\n"


def check_endpoint(endpoint: str) -> None:
    """Raise ConfigError for the address of a web server."""
    if any(part.strip().startswith(("http://", "https://")) for part in endpoint.split(",")):
        raise ConfigError(
            f"endpoint is {endpoint!r}, a web address, which OpenAI clients use: this client needs"
            f" the ZeroMQ endpoint, the `zmq` address of the server's start line"
            f" ({DEFAULT_ENDPOINT} by default)"
        )


class HttpProbe:
    """Asks the listener of a first connection whether it is a web server.

    Args:
        found: called with what to say, if it is one.
    """

    def __init__(self, found: Callable[[str], None]) -> None:
        self._found = found
        self._task: asyncio.Task[None] | None = None

    def start(self, endpoint: str) -> None:
        """Ask after PROBE_DELAY_S, once until `stop`."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._ask_later(endpoint))

    def stop(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _ask_later(self, endpoint: str) -> None:
        await asyncio.sleep(PROBE_DELAY_S)
        if reason := await _describe_http_port(endpoint):
            self._found(reason)


async def _describe_http_port(endpoint: str) -> str:
    """Ask an endpoint for a web page, and return what to say if it answers; else ""."""
    address = re.fullmatch(r"tcp://(.+):(\d+)", endpoint)
    if address is None:
        return ""
    answer = b""
    with suppress(OSError, asyncio.TimeoutError):
        answer = await asyncio.wait_for(
            _ask(address[1].strip("[]"), int(address[2])), PROBE_TIMEOUT_S
        )
    if not answer.startswith(b"HTTP/"):
        return ""
    known = _endpoint_in(answer)
    place = f"is {known}" if known else f"is {DEFAULT_ENDPOINT} by default"
    return f"{endpoint} is an HTTP port: the ZMQ endpoint of the server {place}"


async def _ask(host: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(_REQUEST)
        answer = b""
        while len(answer) < MAX_ANSWER_BYTES and (data := await reader.read(65536)):
            answer += data
        return answer
    finally:
        writer.close()


def _endpoint_in(answer: bytes) -> str:
    """Return the endpoint that a /server_info has; "" if it is another server's or needs a key."""
    try:
        info = json.loads(answer.partition(b"\r\n\r\n")[2])
    except ValueError:
        return ""
    endpoint = info.get("endpoint", "") if isinstance(info, dict) else ""
    return endpoint if isinstance(endpoint, str) else ""


class LinkEvents(NamedTuple):
    """Callbacks of a link; `on_refusal` is called with the reason."""

    on_frames: Callable[[list[bytes]], None]
    on_connect: Callable[[], None]
    on_disconnect: Callable[[], None]
    on_refusal: Callable[[str], None]


class ServerLink:
    """One socket to the server, which ZeroMQ reconnects when its connection breaks.

    Args:
        endpoint: address of the server, or several with commas between them.
        identity: name of this client at the server.
        curve_dir: directory of the keys; None: no keys.
        events: callbacks.

    Attributes:
        has_others: whether there are several addresses.
        is_up: whether the TCP connection is established.
    """

    def __init__(
        self, endpoint: str, identity: uuid.UUID, curve_dir: Path | None, events: LinkEvents
    ) -> None:
        self._endpoints = [part.strip() for part in endpoint.split(",")]
        self._turn = 0
        self.has_others = len(self._endpoints) > 1
        self._identity = identity
        self._curve_dir = curve_dir
        self._events = events
        self._port: AsyncPort | None = None
        self._watch: ConnectionWatch | None = None
        self.is_up = False

    @property
    def endpoint(self) -> str:
        """The address that it connects to."""
        return self._endpoints[self._turn]

    def try_next(self) -> None:
        """Close the socket; the next one connects to the next address."""
        self.close(linger_s=0)
        self._turn = (self._turn + 1) % len(self._endpoints)

    def open(self) -> None:
        """Make a socket and start to connect, unless there is one.

        Raises:
            ConfigError: the endpoint is not an address, or the keys cannot be read.
            ServerUnreachable: the system has no room for another socket.
        """
        if self._port is not None:
            return
        try:
            socket = sockets.connect_public(self.endpoint, self._identity.bytes, self._prepare)
        except sockets.SocketError as error:
            self.close(linger_s=0)
            raise ServerUnreachable(f"cannot open a socket to {self.endpoint}: {error}") from None
        except QuadrigaError:
            self.close(linger_s=0)
            raise
        self._port = AsyncPort(socket, self._events.on_frames, before_receive=self.process_events)

    def close(self, linger_s: float) -> None:
        """Close the socket; unsent messages have `linger_s` seconds."""
        self.is_up = False
        if self._watch is not None:
            self._watch.close()
        if self._port is not None:
            self._port.close(linger_s)
        self._port = self._watch = None

    def send(self, frame: bytes) -> bool:
        """Send a frame; return False if the socket cannot send."""
        return self._port is not None and self._port.send(frame)

    def receive(self) -> None:
        """Process all received messages."""
        if self._port is not None:
            self._port.receive(max_messages=NO_LIMIT)

    def process_events(self) -> None:
        """Process what has happened to the connection."""
        if self._watch is not None:
            self._watch.process()

    def _prepare(self, socket: Any) -> None:
        """Watch the socket before it connects, so that no event is missed."""
        self._watch = ConnectionWatch(
            socket, self._on_disconnect, self._on_connect, self._events.on_refusal
        )
        if self._curve_dir is not None:
            from quadriga.wire.curve import secure_client

            secure_client(socket, self._curve_dir)

    def _on_connect(self) -> None:
        self.is_up = True
        self._events.on_connect()

    def _on_disconnect(self) -> None:
        self.is_up = False
        self._events.on_disconnect()


# Pause between the first two pings of a search; each further pause is twice as long.
MIN_PAUSE_S = 0.1
MAX_PAUSE_S = 1.0
# Event loops may call a timer about a millisecond too early.
CLOCK_RESOLUTION_S = 0.002


class Search:
    """Calls `ping` repeatedly until `stop` is called or the time is over.

    Owns the only timer of a connection, so that a search cannot be started twice or forgotten.

    Args:
        ping: called at once when a search starts, and then after growing pauses.
        not_found: called once when the time of a search is over; the search has stopped by then.
    """

    def __init__(self, ping: Callable[[], None], not_found: Callable[[], None]) -> None:
        self._ping = ping
        self._not_found = not_found
        self._timer: asyncio.Handle | None = None
        self._pause = MIN_PAUSE_S
        self._pinged_at = self._next_at = self._deadline_at = 0.0

    @property
    def is_running(self) -> bool:
        """Whether a search is under way."""
        return self._timer is not None

    def start(self, timeout: float) -> None:
        """Search for at most `timeout` seconds from now, in place of a search under way."""
        self._pause = MIN_PAUSE_S
        self._deadline_at = asyncio.get_running_loop().time() + timeout
        self._ping_and_wait()

    def stop(self) -> None:
        """Stop pinging, if a search is running."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def hurry(self) -> None:
        """Ping soon, since a connection was established, but not more often than at the start."""
        self._pause = MIN_PAUSE_S
        soon = max(asyncio.get_running_loop().time(), self._pinged_at + MIN_PAUSE_S)
        if self.is_running and soon < self._next_at:
            self._wait_until(soon)

    def _wait_until(self, when: float) -> None:
        self.stop()
        self._next_at = when
        self._timer = asyncio.get_running_loop().call_at(when, self._next)

    def _next(self) -> None:
        now = asyncio.get_running_loop().time()
        delay_s = now - self._next_at
        if delay_s > MAX_PAUSE_S:  # a suspension of this process does not use up the timeout
            self._deadline_at += delay_s
        if self._deadline_at - now < CLOCK_RESOLUTION_S:
            self.stop()
            self._not_found()
        else:
            self._ping_and_wait()

    def _ping_and_wait(self) -> None:
        self._pinged_at = asyncio.get_running_loop().time()
        self._wait_until(min(self._pinged_at + self._pause, self._deadline_at))
        self._pause = min(2 * self._pause, MAX_PAUSE_S)
        self._ping()


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
    """State of a connection.

    CLOSED ---open---> CONNECTING ---pong---> OPEN ---break---> RECONNECTING ---pong---> OPEN
       ^                   |                   |                     |
       +-----timeout-------+                   +----server gone---+  | timeout
                                                                  v  v
    close() leads to CLOSED from everywhere                       LOST ---pong---> OPEN

    A Search repeats the ping until a Pong comes or the time is over. Any Pong counts that comes
    over an established connection: pings are not matched to answers, since a server that dies
    loses pings.
    """

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
