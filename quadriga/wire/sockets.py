"""ZeroMQ patterns and the codec.

Inner links are PUSH/PULL without a high-water mark: admission bounds what is under way. Every
socket gets its linger at creation, so that closing never hangs on unsent data.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from quadriga.errors import AddressInUse, ConfigError
from quadriga.wire.messages.public import MAX_FRAME_BYTES

LINGER_MS = 2000
CLIENT_QUEUE_MESSAGES = 4096
"""Messages that wait at a client to be read by it."""
ROUTER_QUEUE_MESSAGES = 64
"""Messages of one client that wait in the ROUTER, in each direction: libzmq bounds their number and
not their bytes. What is more waits in clients.py, where the bytes are known, or at the client."""
RECEIVE_BUDGET_S = 0.005
"""Messages are received for so long before the event loop turns to something else."""
HEARTBEAT_MS = 5000
RECONNECT_MS = 20
POLLIN = int(zmq.POLLIN)
"""As a plain number, which is compared without enum's code."""

SocketError = zmq.ZMQError
"""What ZeroMQ raises, for files that do not import it."""

MessageT = TypeVar("MessageT")
_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


class Inbox(Generic[MessageT]):
    """A bound PULL socket that decodes what it receives."""

    def __init__(self, address: str, message_type: Any) -> None:
        self.socket = _socket(zmq.PULL)
        self.socket.rcvhwm = 0
        _bind(self.socket, address)
        self._decode = msgspec.msgpack.Decoder(message_type).decode

    def receive(self) -> MessageT:
        """Block for the next message."""
        return self._decode(self.socket.recv())

    def drain(self, most: int = 1 << 30) -> Iterator[MessageT]:
        """What has arrived, at most so many messages, without blocking."""
        for _ in range(most):
            if not _has_come(self.socket):
                return
            yield self._decode(self.socket.recv(zmq.NOBLOCK))


class Outbox:
    """A connected PUSH socket. Sending never blocks."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.socket = self._connected()

    def _connected(self) -> "zmq.Socket[bytes]":
        socket = _socket(zmq.PUSH)
        socket.sndhwm = 0
        socket.reconnect_ivl = RECONNECT_MS
        socket.connect(self._address)
        return socket

    def renew(self) -> None:
        """Whoever listens there is another one: what is sent from now on reaches it, and what was
        not sent yet need not."""
        self.socket.close(linger=0)
        self.socket = self._connected()

    def send(self, message: msgspec.Struct) -> None:
        self.socket.send(encode(message))

    def send_frames(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)


def bind_frames(address: str) -> "zmq.Socket[bytes]":
    """A bound PULL socket for multipart messages that nobody needs to decode."""
    socket = _socket(zmq.PULL)
    socket.rcvhwm = 0
    _bind(socket, address)
    return socket


Prepare = Callable[["zmq.Socket[bytes]"], None]
"""What is to be done with a socket before it is bound or connected."""


def _leave_it(socket: "zmq.Socket[bytes]") -> None:
    """Nothing is to be done."""


def bind_public(address: str, prepare: Prepare = _leave_it) -> "zmq.Socket[bytes]":
    """The public ROUTER: an unreachable or a full client is an error, not a silent drop."""
    socket = _socket(zmq.ROUTER)
    prepare(socket)
    socket.router_mandatory = True
    socket.router_handover = True
    socket.sndhwm = ROUTER_QUEUE_MESSAGES
    socket.rcvhwm = ROUTER_QUEUE_MESSAGES
    socket.maxmsgsize = 2 * MAX_FRAME_BYTES
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.heartbeat_timeout = 3 * HEARTBEAT_MS
    socket.handshake_ivl = 2 * HEARTBEAT_MS
    _bind(socket, address)
    return socket


def connect_public(
    address: str, routing_id: bytes, prepare: Prepare = _leave_it
) -> "zmq.Socket[bytes]":
    """A client's DEALER, with an address of its own that survives a reconnect."""
    socket = _socket(zmq.DEALER)
    prepare(socket)
    socket.setsockopt(zmq.ROUTING_ID, routing_id)
    socket.sndhwm = 0
    socket.rcvhwm = CLIENT_QUEUE_MESSAGES
    socket.reconnect_ivl = RECONNECT_MS
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.heartbeat_timeout = 3 * HEARTBEAT_MS
    socket.handshake_ivl = HEARTBEAT_MS  # ZeroMQ's own 30 s are a long time to wait for a dead one
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"endpoint {address!r} is not an address: {error}") from None
    return socket


def _has_come(socket: "zmq.Socket[bytes]") -> bool:
    """Whether there is something to receive. To find out by receiving is an exception, and that of
    a process that runs once in a step, whose code is out of the caches by then, takes 100 us."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & POLLIN)


def _socket(kind: int) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.linger = LINGER_MS
    return socket


def _bind(socket: "zmq.Socket[bytes]", address: str) -> None:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        if error.errno == zmq.EADDRINUSE:
            raise AddressInUse(
                f"{address} is taken by another process; stop it, or choose another address"
                " with --endpoint, for example tcp://127.0.0.1:5556"
            ) from None
        raise ConfigError(f"cannot bind {address}: {error}") from None


class Poller:
    """Blocks until one of several inboxes or plain file descriptors has something to read."""

    def __init__(self, *sources: Any) -> None:
        self._poller = zmq.Poller()
        for source in sources:
            self._poller.register(getattr(source, "socket", source), zmq.POLLIN)

    def wait(self, timeout: float | None = None) -> bool:
        """timeout: seconds, rounded up to milliseconds; None waits for ever. False where nothing
        came."""
        return bool(self._poller.poll(None if timeout is None else math.ceil(timeout * 1000)))


class AsyncPort:
    """Multipart send and receive of one socket on an asyncio loop, without a task per message.

    ZeroMQ's file descriptor is edge-triggered and shared by both directions, so whoever sends
    must look for received messages again afterwards; `_pump` is scheduled for that.

    first: called before messages are received.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        on_frames: Callable[[list[bytes]], None],
        first: Callable[[], None] = lambda: None,
    ) -> None:
        self.socket = socket
        self._on_frames = on_frames
        self._first = first
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._file_descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._file_descriptor, self._pump)
        self._schedule()

    def send(self, *frames: bytes) -> bool:
        """False where the peer does not read (its queue is full). Unreachable where it is gone."""
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
            return True
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise Unreachable from None
            raise
        finally:
            self._schedule()

    def close(self, linger: float | None = None) -> None:
        """linger: seconds that unsent messages may take."""
        if not self.socket.closed:
            self._loop.remove_reader(self._file_descriptor)
            self.socket.close(linger=None if linger is None else int(linger * 1000))

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._scheduled = False
        self._first()
        self.receive(budget_s=RECEIVE_BUDGET_S)

    def receive(self, most: int = 64, budget_s: float = math.inf) -> None:
        """Take in what has come, for at most so many messages and seconds; the rest of it a little
        later."""
        began = time.monotonic()
        for _ in range(most):
            if time.monotonic() - began > budget_s:
                break
            if self.socket.closed or not _has_come(self.socket):
                return
            if frames := self._next():
                self._take(frames)
        self._schedule()

    def _take(self, frames: list[bytes]) -> None:
        try:
            self._on_frames(frames)
        except BaseException:
            self._schedule()  # what has come behind it raises no other event
            raise

    def _next(self) -> list[bytes]:
        """The frames of a message that has come; none where it is to be dropped."""
        return self.socket.recv_multipart(zmq.NOBLOCK)


class Unreachable(Exception):
    """The peer of a ROUTER's send is not connected."""


def close_all() -> None:
    """Close every socket of this process, waiting at most each one's linger for unsent data."""
    zmq.Context.instance().destroy(linger=LINGER_MS)
