"""A client's socket, and whether its connection to the server is up."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from quadriga.client.connection_watch import ConnectionWatch
from quadriga.errors import QuadrigaError, ServerUnreachable
from quadriga.wire import sockets

ALL_THAT_CAME = 1 << 30


class LinkEvents(NamedTuple):
    """What a link calls back: frames came; the connection came up, broke, or was refused with this
    reason."""

    frames: Callable[[list[bytes]], None]
    up: Callable[[], None]
    broke: Callable[[], None]
    refused: Callable[[str], None]


class ServerLink:
    """One socket at a time. ZeroMQ connects it again by itself when its connection breaks.

    Attributes:
        is_up: whether the TCP connection stands; False without a socket.
    """

    def __init__(
        self, endpoint: str, identity: uuid.UUID, curve_dir: Path | None, events: LinkEvents
    ) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._curve_dir = curve_dir
        self._events = events
        self._port: sockets.AsyncPort | None = None
        self._watch: ConnectionWatch | None = None
        self.is_up = False

    def open(self) -> None:
        """Make a socket, which begins to connect. Does nothing where there is one.

        Raises:
            ConfigError: the endpoint is not an address, or the keys cannot be read.
            ServerUnreachable: the system has no room for another socket.
        """
        if self._port is not None:
            return
        try:
            socket = sockets.connect_public(self._endpoint, self._identity.bytes, self._prepare)
        except sockets.SocketError as error:
            self.close(linger=0)
            raise ServerUnreachable(f"cannot open a socket to {self._endpoint}: {error}") from None
        except QuadrigaError:
            self.close(linger=0)
            raise
        self._port = sockets.AsyncPort(socket, self._events.frames, first=self.look)

    def close(self, linger: float) -> None:
        """linger: seconds that unsent messages may take."""
        self.is_up = False
        if self._watch is not None:
            self._watch.close()
        if self._port is not None:
            self._port.close(linger)
        self._port = self._watch = None

    def send(self, frame: bytes) -> bool:
        """False where this socket can send nothing (any more)."""
        return self._port is not None and self._port.send(frame)

    def receive(self) -> None:
        """Take in all that has come."""
        if self._port is not None:
            self._port.receive(most=ALL_THAT_CAME)

    def look(self) -> None:
        """Take in what has happened to the connection."""
        if self._watch is not None:
            self._watch.look()

    def _prepare(self, socket: Any) -> None:
        """Watch the socket before it connects, so that no event is missed."""
        self._watch = ConnectionWatch(socket, self._broke, self._up, self._events.refused)
        if self._curve_dir is not None:
            from quadriga.wire.curve import secure_client

            secure_client(socket, self._curve_dir)

    def _up(self) -> None:
        self.is_up = True
        self._events.up()

    def _broke(self) -> None:
        self.is_up = False
        self._events.broke()
