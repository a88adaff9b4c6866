"""A client's connection: finds the server, notices when it is gone, and when it is back."""

import asyncio
import uuid
from collections.abc import Callable

import msgspec

from quadriga import errors, sockets
from quadriga.errors import InvalidRequest, ServerUnreachable
from quadriga.messages.public import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    ErrorInfo,
    Ping,
    Pong,
    ServerMessage,
)

RECONNECT_GRACE = 1.0
"""Seconds after a lost connection until the open requests are given up."""


class Connection:
    """Sends messages to a server and hands over what comes back.

    on_message: called with everything but a Pong. on_lost: called with the reason when the server
    that had the open requests is gone.
    """

    def __init__(
        self,
        endpoint: str,
        identity: uuid.UUID,
        on_message: Callable[[ServerMessage], None],
        on_lost: Callable[[ErrorInfo], None],
    ) -> None:
        self.endpoint = endpoint
        self.lost: ErrorInfo | None = None
        self._identity = identity
        self._on_message = on_message
        self._on_lost = on_lost
        self._decode = msgspec.msgpack.Decoder(ServerMessage).decode
        self._port: sockets.AsyncPort | None = None
        self._watch: sockets.ConnectionWatch | None = None
        self._pong: asyncio.Future[Pong] | None = None
        self._instance = ""
        self._max_frame_bytes = MAX_FRAME_BYTES
        self._check: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._port is not None

    async def open(self, timeout: float) -> None:
        """Connect, and wait for the server's first answer. ServerUnreachable after the timeout."""
        socket = sockets.connect_front_door(self.endpoint, self._identity.bytes)
        self._port = sockets.AsyncPort(socket, self._on_frames)
        self._watch = sockets.ConnectionWatch(socket, self._check_server, self._find_server_again)
        try:
            self._instance = (await self._ping(timeout)).instance
        except asyncio.TimeoutError:
            await self.close(linger=0)
            raise ServerUnreachable(
                f"no answer from {self.endpoint} within {timeout} s;"
                " is the server running there?  python launcher.py"
            ) from None

    async def close(self, linger: float) -> None:
        """linger: seconds that unsent messages may take."""
        if self._check is not None:
            self._check.cancel()
        if self._watch is not None:
            self._watch.close()
        if self._port is not None:
            self._port.close(linger)
        self._port = self._watch = None

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
        if self.lost is not None:
            raise errors.from_code(self.lost.code, self.lost.message)

    async def _ping(self, timeout: float) -> Pong:
        self._pong = asyncio.get_running_loop().create_future()
        self.send(Ping(PROTOCOL_VERSION))
        pong = await asyncio.wait_for(self._pong, timeout)
        self._max_frame_bytes = pong.max_frame_bytes
        return pong

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            message: ServerMessage = self._decode(frames[0])
        except msgspec.DecodeError as error:
            self._on_lost(ErrorInfo("error", f"unreadable answer from {self.endpoint}: {error}"))
            return
        if not isinstance(message, Pong):
            self._on_message(message)
        elif self._pong is not None and not self._pong.done():
            self._pong.set_result(message)

    def _check_server(self) -> None:
        """The connection broke: the server is back within the grace, or it is lost."""
        if self._check is None or self._check.done():
            self._check = asyncio.get_running_loop().create_task(self._wait_for_server())

    def _find_server_again(self) -> None:
        """A connection came up after the server had been given up: is it there again?"""
        if self.lost is not None:
            self._check_server()

    async def _wait_for_server(self) -> None:
        reason = f"lost the connection to {self.endpoint}: its tokenizer process is gone"
        lost = self.lost or ErrorInfo(ServerUnreachable.code, reason)
        try:
            pong = await self._ping(RECONNECT_GRACE)
        except asyncio.TimeoutError:
            self.lost = lost
            self._on_lost(lost)
            return
        self.lost = None
        if pong.instance != self._instance:
            self._instance = pong.instance
            self._on_lost(lost)
