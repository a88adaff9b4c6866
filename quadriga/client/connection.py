"""A client's connection: finds the server, notices when it is gone, and when it is back.

    CLOSED ---open---> CONNECTING ---pong---> OPEN ---break---> RECONNECTING ---pong---> OPEN
       ^                   |                   |                     |
       +-----timeout-------+                   +----server gone---+  | timeout
                                                                  v  v
    close() leads to CLOSED from everywhere                       LOST ---pong---> OPEN

A search (search.py) repeats the ping until a Pong comes or the time is over. Every Pong counts that
comes over a connection which is up: no ping waits for its own answer, since a server that dies
takes pings along.
"""

import asyncio
import enum
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from quadriga.client.link import LinkEvents, ServerLink
from quadriga.client.search import Search
from quadriga.errors import InvalidRequest, QuadrigaError, RequestAborted, ServerUnreachable
from quadriga.wire import sockets
from quadriga.wire.messages.public import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    ErrorInfo,
    Ping,
    Pong,
    ServerMessage,
)

MAX_SOCKET_SILENCE_S = 5.0
"""A search that hears nothing for so long goes on through a new socket: one whose reconnecting has
got stuck does not keep a client from a server that is there."""

CLOSED_BY_CALLER = ErrorInfo(RequestAborted.code, "the client was closed")
_SILENT = (
    "somebody is there but says nothing: does one side use keys and the other not?"
    " see docs/security.md"
)


class State(enum.Enum):
    """What a connection is doing; the module's docstring has the transitions."""

    CLOSED = enum.auto()
    CONNECTING = enum.auto()
    OPEN = enum.auto()
    RECONNECTING = enum.auto()
    LOST = enum.auto()


class Events(NamedTuple):
    """What a connection calls back.

    message: everything but a Pong came. interrupted: the connection broke, and what was under way
    may be lost. back: the server answers again. lost: it does not, for this reason.
    """

    message: Callable[[ServerMessage], None]
    interrupted: Callable[[], None]
    back: Callable[[], None]
    lost: Callable[[ErrorInfo], None]


class Connection:
    """Sends messages to a server and hands over what comes back.

    reconnect_timeout: seconds that a server whose connection broke may take to answer again.
    curve_dir: where the keys are (curve.py); None: there are none.
    """

    def __init__(
        self,
        endpoint: str,
        identity: uuid.UUID,
        events: Events,
        reconnect_timeout: float,
        curve_dir: Path | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._events = events
        self._reconnect_timeout = reconnect_timeout
        self._decode = msgspec.msgpack.Decoder(ServerMessage).decode
        self._max_frame_bytes = MAX_FRAME_BYTES
        self._state = State.CLOSED
        self._lost: ErrorInfo | None = None  # the reason, in LOST
        self._waiters: list[asyncio.Future[ErrorInfo | None]] = []  # of CONNECTING
        link_events = LinkEvents(self._on_frames, self._came_up, self._broke, self._was_refused)
        self._link = ServerLink(endpoint, identity, curve_dir, link_events)
        self._refusal = ""
        self._search = Search(self._ping, self._not_found)
        self._connect_timeout = self._renew_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether `open` returns or raises at once."""
        return self._state not in (State.CLOSED, State.CONNECTING)

    # --- what callers ask for ---------------------------------------------------------------------

    async def open(self, timeout: float) -> None:
        """Return when the server has answered once, or raise why nothing can be sent.

        Calls at the same time share one attempt and its outcome. The attempt ends early when no
        call waits for it any more.

        Args:
            timeout: seconds of the attempt that this call starts, if it starts one.

        Raises:
            ServerUnreachable: no answer within the timeout, or the connection was lost.
            RequestAborted: the client was closed meanwhile.
            ConfigError: the endpoint is not an address, or the keys cannot be read.
        """
        if self._state is State.CLOSED:
            self._link.open()
            self._state, self._connect_timeout = State.CONNECTING, timeout
            self._start_search(timeout)
        elif self._state is State.LOST and not self._search.is_running:
            self._start_search(self._reconnect_timeout)
        while self._state is State.CONNECTING:
            await self._wait_for_attempt()
        self.check()

    async def _wait_for_attempt(self) -> None:
        waiter: asyncio.Future[ErrorInfo | None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            failure = await waiter
        finally:
            self._waiters.remove(waiter)
            if self._state is State.CONNECTING and not self._waiters:
                self._shut(linger=0)
        if failure is None and self._state is State.CLOSED:
            failure = CLOSED_BY_CALLER
        if failure is not None:
            raise failure.exception()

    async def close(self, linger: float) -> None:
        """linger: seconds that unsent messages may take."""
        self._shut(linger)
        self._end_attempt(CLOSED_BY_CALLER)

    def check(self) -> None:
        """Raise why nothing can be sent: not connected, or lost until the server is back."""
        if self._lost is not None:
            raise self._lost.exception()
        if not self.is_open:
            raise ServerUnreachable(f"not connected to {self.endpoint}; call connect() first")

    def send(self, message: msgspec.Struct) -> bool:
        """Send now, or return False: it is to be sent when the server is back, if it ever is.

        Raises InvalidRequest for a message that the server would not take."""
        try:
            frame = sockets.encode(message)
        except (OverflowError, TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the request cannot be encoded: {error}") from None
        if len(frame) > self._max_frame_bytes:
            raise InvalidRequest(
                f"the request is {len(frame)} bytes: the server takes at most"
                f" {self._max_frame_bytes}; shorten the prompt",
                "prompt",
            )
        return self._state is State.OPEN and self._link.send(frame)

    def give_up(self, reason: ErrorInfo) -> None:
        """The server said that it ends. An attempt to connect goes on: another one may come."""
        if self._state is State.CONNECTING:
            self._refusal = reason.message
        else:
            self._state, self._lost = State.LOST, reason
        self._link.is_up = False  # a Pong of the one that ends says nothing

    def _shut(self, linger: float) -> None:
        self._state, self._lost = State.CLOSED, None
        self._search.stop()
        self._link.close(linger)

    def _end_attempt(self, failure: ErrorInfo | None) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(failure)

    # --- what happens to it -----------------------------------------------------------------------

    def _came_up(self) -> None:
        self._refusal = self._refusal or _SILENT
        if self._search.is_running:
            self._search.hurry()
        elif self._state is State.LOST:
            self._start_search(self._reconnect_timeout)

    def _was_refused(self, reason: str) -> None:
        self._refusal = f"{reason}; see docs/security.md"

    def _broke(self) -> None:
        """What had come by then is whole: a server that ends says its last words and leaves."""
        self._link.receive()
        if self._state is State.OPEN:
            self._state = State.RECONNECTING
            self._events.interrupted()
        if self._state in (State.RECONNECTING, State.LOST) and not self._search.is_running:
            self._start_search(self._reconnect_timeout)

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            message: ServerMessage = self._decode(frames[0])
        except msgspec.DecodeError as error:
            self._refusal = f"unreadable answer from {self.endpoint}: {error}"
            self._events.lost(ErrorInfo(QuadrigaError.code, self._refusal))
            return
        if not isinstance(message, Pong):
            self._events.message(message)
        elif self._link.is_up:
            self._found(message)

    def _found(self, pong: Pong) -> None:
        self._max_frame_bytes = pong.max_frame_bytes
        if self._state is State.OPEN:
            return
        before, self._state = self._state, State.OPEN
        self._lost, self._refusal = None, ""
        self._search.stop()
        if before is State.CONNECTING:
            self._end_attempt(None)
        else:
            self._events.back()

    # --- the search -------------------------------------------------------------------------------

    def _start_search(self, timeout: float) -> None:
        self._renew_at = _now() + MAX_SOCKET_SILENCE_S
        self._search.start(timeout)

    def _ping(self) -> None:
        if _now() >= self._renew_at:
            self._link.close(linger=0)
            self._renew_at = _now() + MAX_SOCKET_SILENCE_S
        try:
            self._link.open()
            if not self._link.send(sockets.encode(Ping(PROTOCOL_VERSION))):
                self._link.close(linger=0)  # the next ping has another socket
        except QuadrigaError as error:
            self._refusal = str(error)

    def _not_found(self) -> None:
        """The time is over. What came while the event loop was busy with something else counts."""
        self._link.look()
        self._link.receive()
        if self._state is State.CONNECTING:
            why = self._refusal or "is the server running there?  python launcher.py"
            self._shut(linger=0)
            self._end_attempt(
                _unreachable(
                    f"no answer from {self.endpoint} within {self._connect_timeout:g} s; {why}"
                )
            )
        elif self._state is State.RECONNECTING:
            self._state = State.LOST
            self._lost = _unreachable(
                f"lost the connection to {self.endpoint}: its tokenizer process is gone, and"
                f" nothing has answered there for {self._reconnect_timeout:g} s"
                f"{self._refusal and f' ({self._refusal})'}; whether the requests were run is not"
                " known"
            )
            self._events.lost(self._lost)


def _unreachable(why: str) -> ErrorInfo:
    return ErrorInfo(ServerUnreachable.code, why)


def _now() -> float:
    return asyncio.get_running_loop().time()
