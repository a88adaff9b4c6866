"""A client's socket, and the state of its connection to the server."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from quadriga.errors import QuadrigaError, ServerUnreachable
from quadriga.wire import sockets
from quadriga.wire.async_port import AsyncPort
from quadriga.wire.connection_watch import ConnectionWatch
from quadriga.wire.sockets import NO_LIMIT


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
