"""A client's connection: finds the server, notices when it is gone, and when it is back."""

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quadriga import sockets
from quadriga.clock import Countdown
from quadriga.errors import InvalidRequest, ServerUnreachable
from quadriga.messages.public import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    ErrorInfo,
    Ping,
    Pong,
    ServerMessage,
)

ALL_THAT_CAME = 1 << 30
PING_EVERY = 1.0
"""Seconds between attempts to hear something of a server whose connection was lost."""
PINGS_PER_SOCKET = 5
"""So many attempts without an answer, and the next is made through a socket of its own: one whose
reconnecting has got stuck does not keep a client from a server that is there."""

_SILENT = (
    "somebody is there but says nothing: does one side use keys and the other not?"
    " see docs/security.md"
)


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
        self._lost: ErrorInfo | None = None
        self._identity = identity
        self._events = events
        self._reconnect_timeout = reconnect_timeout
        self._decode = msgspec.msgpack.Decoder(ServerMessage).decode
        self._port: sockets.AsyncPort | None = None
        self._watch: sockets.ConnectionWatch | None = None
        self._pong: asyncio.Future[Pong] | None = None
        self._max_frame_bytes = MAX_FRAME_BYTES
        self._search: asyncio.Task[None] | None = None
        self._breaks = 0
        self._curve_dir = curve_dir
        self._refusal = ""

    @property
    def is_open(self) -> bool:
        return self._port is not None

    async def open(self, timeout: float) -> None:
        """Connect, and wait for the server's first answer. ServerUnreachable after the timeout."""
        self._connect()
        try:
            await self._ping(timeout)
        except asyncio.TimeoutError:
            await self.close(linger=0)
            why = self._refusal or "is the server running there?  python launcher.py"
            raise ServerUnreachable(
                f"no answer from {self.endpoint} within {timeout} s; {why}"
            ) from None

    def _connect(self) -> None:
        socket = sockets.connect_front_door(self.endpoint, self._identity.bytes, self._prepare)
        self._watch = sockets.ConnectionWatch(
            socket, self._broke, self._find_again, self._was_refused
        )
        self._port = sockets.AsyncPort(socket, self._on_frames, first=self._watch.look)

    def _disconnect(self, linger: float) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._port is not None:
            self._port.close(linger)
        self._port = self._watch = None

    def _prepare(self, socket: Any) -> None:
        if self._curve_dir is not None:
            from quadriga.curve import secure_client

            secure_client(socket, self._curve_dir)

    def _was_refused(self, reason: str) -> None:
        self._refusal = f"{reason}; see docs/security.md"

    async def close(self, linger: float) -> None:
        """linger: seconds that unsent messages may take."""
        if self._search is not None:
            self._search.cancel()
        self._disconnect(linger)

    def send(self, message: msgspec.Struct) -> None:
        """Raises InvalidRequest for a message that the server would not take."""
        if self._port is None:
            raise ServerUnreachable(f"not connected to {self.endpoint}; call connect() first")
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
        self._port.send(frame)

    def raise_if_lost(self) -> None:
        """The reason, until the server is back."""
        if self._lost is not None:
            raise self._lost.exception()

    def give_up(self, reason: ErrorInfo) -> None:
        """The server said that it ends."""
        self._lost = reason

    async def _ping(self, timeout: float) -> None:
        self._pong = asyncio.get_running_loop().create_future()
        self.send(Ping(PROTOCOL_VERSION))
        self._max_frame_bytes = (await asyncio.wait_for(self._pong, timeout)).max_frame_bytes
        self._refusal = ""

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            message: ServerMessage = self._decode(frames[0])
        except msgspec.DecodeError as error:
            reason = f"unreadable answer from {self.endpoint}: {error}"
            self._events.lost(ErrorInfo("error", reason))
            return
        if not isinstance(message, Pong):
            self._events.message(message)
        elif self._pong is not None and not self._pong.done():
            self._pong.set_result(message)

    # --- a server that is gone, perhaps for a moment ----------------------------------------------

    def _broke(self) -> None:
        """What had come by then is whole: a server that ends says its last words and leaves."""
        self._breaks += 1
        if self._port is not None:
            self._port.receive(most=ALL_THAT_CAME)
        self._events.interrupted()
        self._look_for_it()

    def _find_again(self) -> None:
        """A connection came up: of a server that had been given up?"""
        self._refusal = self._refusal or _SILENT
        if self._lost is not None:
            self._look_for_it()

    def _look_for_it(self) -> None:
        if self._search is None or self._search.done():
            self._search = asyncio.get_running_loop().create_task(self._until_it_answers())

    async def _until_it_answers(self) -> None:
        """ZeroMQ connects again by itself; but a server that dies may have taken the ping along."""
        countdown = Countdown(self._reconnect_timeout, 2 * PING_EVERY)
        unanswered = 0
        while (left := countdown.left()) > 0:
            breaks = self._breaks
            try:
                await self._ping(min(left, PING_EVERY))
            except asyncio.TimeoutError:
                unanswered += 1
                if unanswered % PINGS_PER_SOCKET == 0:
                    self._disconnect(linger=0)
                    self._connect()
                continue
            if breaks != self._breaks:
                continue
            self._lost = None
            self._events.back()
            return
        if self._lost is None:
            self._lost = ErrorInfo(
                ServerUnreachable.code,
                f"lost the connection to {self.endpoint}: its tokenizer process is gone, and"
                f" nothing has answered there for {self._reconnect_timeout:g} s"
                f"{self._refusal and f' ({self._refusal})'}; whether the requests were run is not"
                " known",
            )
            self._events.lost(self._lost)
