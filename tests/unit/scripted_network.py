"""A network in this process, on the event loop's clock, in place of ZeroMQ below a client's link.

Like ZeroMQ's DEALER, a socket connects when a frontend listens, keeps unsent messages, and loses
messages in transit when its cable is cut.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Protocol

import pytest

from quadriga.client import connection
from quadriga.wire import sockets

MAX_LATENCY_S = 0.004
MAX_CONNECT_S = 0.06


class Listener(Protocol):
    """The peer of sockets. If it `is_frozen`, it accepts connections and reads nothing."""

    is_frozen: bool

    def take(self, client: bytes, frame: bytes) -> None: ...

    def lost(self, client: bytes) -> None: ...


class Network:
    """Stands for what quadriga.client.connection imports of quadriga.wire."""

    SocketError = OSError
    encode = staticmethod(sockets.encode)

    def __init__(self, chosen: random.Random) -> None:
        self.chosen = chosen
        self.door: Listener | None = None
        self._sockets: list[Socket] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(connection, "sockets", self)
        patch.setattr(connection, "AsyncPort", Port)
        patch.setattr(connection, "ConnectionWatch", Watch)

    def connect_public(
        self, address: str, routing_id: bytes, prepare: Callable[["Socket"], None]
    ) -> "Socket":
        socket = Socket(self, routing_id)
        prepare(socket)
        self._sockets.append(socket)
        socket.connect_soon()
        return socket

    @property
    def open_sockets(self) -> int:
        return sum(not socket.closed for socket in self._sockets)

    def listen(self, door: Listener) -> None:
        self.door = door
        for socket in self._sockets:
            socket.connect_soon()

    def vanish(self) -> None:
        """Remove the frontend and all its connections."""
        self.door = None
        self.cut()

    def cut(self) -> None:
        """Cut all connections; the sockets reconnect."""
        for socket in list(self._sockets):
            if socket.cable is not None:
                socket.cable.cut()

    def jam(self) -> None:
        """Prevent the present sockets from reconnecting once their connections are cut."""
        for socket in self._sockets:
            socket.is_jammed = True

    def thaw(self) -> None:
        """Deliver the messages that a frozen frontend has not read."""
        for socket in self._sockets:
            if socket.cable is not None:
                socket.cable.move()

    def send(self, client: bytes, frame: bytes) -> None:
        """Send a message of the frontend; it is lost if the client is not connected."""
        cable = self.cable_of(client)
        if cable is not None:
            cable.to_client.append(frame)
            cable.move()

    def cable_of(self, client: bytes) -> "Cable | None":
        for socket in self._sockets:
            if socket.identity == client and socket.cable is not None and socket.cable.is_ready:
                return socket.cable
        return None


class Socket:
    def __init__(self, network: Network, identity: bytes) -> None:
        self.network = network
        self.identity = identity
        self.outbound: deque[bytes] = deque()
        self.inbound: deque[bytes] = deque()
        self.cable: Cable | None = None
        self.watch: Watch | None = None
        self.port: Port | None = None
        self.closed = self.is_jammed = False

    def connect_soon(self) -> None:
        delay = self.network.chosen.uniform(0, MAX_CONNECT_S)
        asyncio.get_running_loop().call_later(delay, self._connect)

    def _connect(self) -> None:
        if self.network.door is not None and self.cable is None and self.can_connect:
            self.cable = Cable(self, self.network.door)
            self.happened("connected")

    @property
    def can_connect(self) -> bool:
        return not (self.closed or self.is_jammed)

    def happened(self, event: str) -> None:
        if self.watch is not None:
            self.watch.tell(event)

    def close(self, linger_s: float | None = None) -> None:
        self.closed = True
        if self.cable is not None:
            if linger_s:  # what was sent still arrives
                while self.outbound and self.cable.is_ready and not self.cable.door.is_frozen:
                    self.cable.door.take(self.identity, self.outbound.popleft())
            self.cable.cut()


class Cable:
    """One connection; it carries nothing before its handshake or with a frozen frontend."""

    def __init__(self, socket: Socket, door: Listener) -> None:
        self.socket = socket
        self.door = door
        self.to_client: deque[bytes] = deque()
        self.is_ready = self.is_cut = self._is_moving = False
        self.move()

    def cut(self) -> None:
        """Lose the messages in transit, and perhaps the first unsent one."""
        if self.is_cut:
            return
        self.is_cut = True
        socket = self.socket
        socket.cable = None
        if socket.outbound and self.is_ready and socket.network.chosen.random() < 0.5:
            socket.outbound.popleft()
        socket.happened("disconnected")
        asyncio.get_running_loop().call_later(0.05, self.door.lost, socket.identity)
        if socket.can_connect:
            socket.connect_soon()

    def move(self) -> None:
        if not (self.is_cut or self._is_moving or self.door.is_frozen):
            self._is_moving = True
            delay = self.socket.network.chosen.uniform(0, MAX_LATENCY_S)
            asyncio.get_running_loop().call_later(delay, self._arrive)

    def _arrive(self) -> None:
        self._is_moving = False
        if self.is_cut or self.door.is_frozen:
            return
        self.is_ready = True
        for _ in range(len(self.socket.outbound)):
            self.door.take(self.socket.identity, self.socket.outbound.popleft())
            if self.is_cut or self.door.is_frozen:
                return
        while self.to_client:
            self.socket.inbound.append(self.to_client.popleft())
        if self.socket.port is not None:
            self.socket.port.wake()


class Port:
    """Stands for AsyncPort."""

    def __init__(
        self,
        socket: Socket,
        on_frames: Callable[[list[bytes]], None],
        before_receive: Callable[[], None],
    ) -> None:
        self.socket = socket
        socket.port = self
        self._on_frames = on_frames
        self._before_receive = before_receive

    def send(self, frame: bytes) -> bool:
        socket = self.socket
        if socket.is_jammed and socket.cable is None:
            return False
        socket.outbound.append(frame)
        if socket.cable is not None:
            socket.cable.move()
        return True

    def close(self, linger_s: float | None = None) -> None:
        if not self.socket.closed:
            self.socket.close(linger_s)

    def wake(self) -> None:
        asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._before_receive()
        self.receive()

    def receive(self, max_messages: int = 64) -> None:
        for _ in range(max_messages):
            if self.socket.closed or not self.socket.inbound:
                return
            self._on_frames([self.socket.inbound.popleft()])
        self.wake()


class Watch:
    """Stands for ConnectionWatch."""

    def __init__(
        self,
        socket: Socket,
        on_disconnect: Callable[[], None],
        on_connect: Callable[[], None],
        on_refusal: Callable[[str], None],
    ) -> None:
        socket.watch = self
        self._call = {"disconnected": on_disconnect, "connected": on_connect}
        self._events: deque[str] = deque()
        self._closed = False

    def tell(self, event: str) -> None:
        self._events.append(event)
        asyncio.get_running_loop().call_soon(self.process)

    def process(self) -> None:
        while self._events and not self._closed:
            self._call[self._events.popleft()]()

    def close(self) -> None:
        self._closed = True
