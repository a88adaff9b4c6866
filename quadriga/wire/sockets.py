"""ZeroMQ sockets of the links, and the codec.

Inner links are PUSH/PULL without a high-water mark: admission bounds the messages on them. Every
socket gets its linger at creation, so that closing never hangs on unsent data.
"""

import fcntl
import math
import os
import socket as plain_socket
import stat
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Generic, NoReturn, Protocol, TypeAlias, TypeVar

import msgspec
import zmq

from quadriga.errors import AddressInUse, ConfigError
from quadriga.wire.client import MAX_FRAME_BYTES

LINGER_MS = 2000
MAX_CLIENT_MESSAGES = 4096
# Messages of one client in the ROUTER, in each direction. libzmq bounds their number, not their
# bytes: further ones wait at the client, or in tokenizer_proc/deliver/clients.py, which bounds the
# bytes.
MAX_ROUTER_MESSAGES = 64
HEARTBEAT_MS = 5000
RECONNECT_MS = 20
NO_LIMIT = 1 << 30
IPC = "ipc://"
BACKLOG = 1024  # connections that wait to be accepted at a socket that is a file
# A plain int: comparing with the enum member runs Python code.
POLLIN = int(zmq.POLLIN)

# ZeroMQ's socket and exception, for modules that do not import zmq.
LinkSocket: TypeAlias = "zmq.Socket[bytes]"
SocketError = zmq.ZMQError
Prepare = Callable[[LinkSocket], None]

MessageT = TypeVar("MessageT")
_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


class Inbox(Generic[MessageT]):
    """A bound PULL socket that decodes what it receives.

    Args:
        address: its address.
        message_type: type of the messages.
        prepare: called with the socket before it is bound.
    """

    def __init__(self, address: str, message_type: Any, prepare: Prepare = lambda _: None) -> None:
        self.socket = bind_frames(address, prepare)
        self._decode = msgspec.msgpack.Decoder(message_type).decode

    def receive(self) -> MessageT:
        """Block for the next message."""
        message: MessageT = self._decode(self.socket.recv())
        return message

    def drain(self, max_messages: int = NO_LIMIT) -> Iterator[MessageT]:
        """Yield the messages that have arrived, without blocking."""
        for _ in range(max_messages):
            if not is_readable(self.socket):
                return
            yield self._decode(self.socket.recv(zmq.NOBLOCK))


class Sender(Protocol):
    """The sending side of a link to another process: a socket, or a list in a test."""

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; never block."""


class Outbox:
    """A connected PUSH socket. Sending never blocks.

    ZeroMQ gives a connection up for good where one side has keys and the other none, or a key that
    may not connect; a blocking send would then wait for ever.

    Args:
        address: address of the peer.
        prepare: called with the socket before it connects.
    """

    def __init__(self, address: str, prepare: Prepare = lambda _: None) -> None:
        self._address = address
        self._prepare = prepare
        self.socket = self._connected()

    def _connected(self) -> "zmq.Socket[bytes]":
        socket = _socket(zmq.PUSH)
        self._prepare(socket)
        socket.sndhwm = 0
        socket.reconnect_ivl = RECONNECT_MS
        socket.connect(self._address)
        return socket

    def renew(self) -> None:
        """Reconnect after the peer was restarted; unsent messages are discarded."""
        self.socket.close(linger=0)
        self.socket = self._connected()

    def close(self) -> None:
        """Close the socket; what is unsent is discarded."""
        self.socket.close(linger=0)

    def send(self, message: msgspec.Struct) -> None:
        """Encode a message and send it. Raise ConfigError where the peer refuses the connection."""
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._refuse()

    def send_frames(self, *frames: bytes) -> None:
        """Send a multipart message. Raise ConfigError as in `send`."""
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._refuse()

    def _refuse(self) -> None:
        raise ConfigError(
            f"{self._address} refuses the keys of this machine: copy the server's --curve-dir, with"
            " its inner key, to every machine"
        )


def bind_frames(address: str, prepare: Prepare = lambda _: None) -> "zmq.Socket[bytes]":
    """Bind a PULL socket for multipart messages that are passed on without decoding.

    Args:
        address: its address.
        prepare: called with the socket before it is bound.
    """
    socket = _socket(zmq.PULL)
    prepare(socket)
    socket.rcvhwm = 0
    _bind(socket, address)
    return socket


def bind_public(address: str, prepare: Prepare = lambda _: None) -> "zmq.Socket[bytes]":
    """Bind the public ROUTER. Sending to an unreachable or full client is an error.

    Args:
        address: the endpoint.
        prepare: called with the socket before it is bound.
    """
    socket = _socket(zmq.ROUTER)
    prepare(socket)
    socket.router_mandatory = True
    socket.router_handover = True
    socket.sndhwm = MAX_ROUTER_MESSAGES
    socket.rcvhwm = MAX_ROUTER_MESSAGES
    socket.maxmsgsize = 2 * MAX_FRAME_BYTES
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.heartbeat_timeout = 3 * HEARTBEAT_MS
    socket.handshake_ivl = 2 * HEARTBEAT_MS
    _bind(socket, address)
    return socket


class SocketFile:
    """A public socket that is a file: only its owner may open it, and no second server takes it.

    ZeroMQ would remove whatever lies at the path that it binds, and would remove the file of its
    successor where it closes late. So the path is claimed by a lock on a file beside it, which ends
    with the process, and ZeroMQ is given a socket that is bound already.

    Args:
        address: ipc:///PATH.

    Raises:
        AddressInUse: another server has the path.
        ConfigError: the path is of something else than a socket, or its directory cannot be used.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._path = address.removeprefix(IPC)
        self._lock_path = f"{self._path}.lock"
        try:
            self._lock = self._locked()
        except BlockingIOError:
            raise AddressInUse(
                f"{address} is the socket of another server; stop it, or choose another path with"
                " --endpoint"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"endpoint is {address}, and its directory cannot be used: {error.strerror}; make"
                " it, owned by the server's user"
            ) from None
        try:
            self._remove_socket()
        except ConfigError:
            self._unlock()
            raise

    def _locked(self) -> int:
        """Return the descriptor of the lock file, which only the process with the lock removes."""
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(self._lock_path, flags, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(self._lock_path)):
                    return fd
            except FileNotFoundError:  # removed by the process that had the lock
                pass
            except OSError:
                os.close(fd)
                raise
            os.close(fd)

    def _remove_socket(self) -> None:
        """Remove the socket of a server that was killed. Raise ConfigError for another file."""
        if not os.path.lexists(self._path):
            return
        if not stat.S_ISSOCK(os.lstat(self._path).st_mode):
            raise ConfigError(
                f"endpoint is {self._address}, where something else than a socket lies: remove it,"
                " or choose another path"
            )
        os.unlink(self._path)

    def bind(self, prepare: Prepare = lambda _: None) -> "zmq.Socket[bytes]":
        """Bind the public ROUTER to the path, with mode 0600; `prepare` as in `bind_public`."""
        listener = plain_socket.socket(plain_socket.AF_UNIX)
        mask = os.umask(0o177)
        try:
            listener.bind(self._path)
        except OSError as error:  # its text for a path that is too long has no number
            listener.close()
            _refuse_address(self._address, str(error))
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
        listener.setblocking(False)

        def prepare_both(socket: LinkSocket) -> None:
            prepare(socket)
            socket.use_fd = listener.detach()

        return bind_public(self._address, prepare_both)

    def close(self) -> None:
        """Remove the socket and the lock, and end the claim. Close the ROUTER before."""
        self._remove_socket()
        self._unlock()

    def _unlock(self) -> None:
        os.unlink(self._lock_path)
        os.close(self._lock)


def connect_public(
    address: str, routing_id: bytes, prepare: Prepare = lambda _: None
) -> "zmq.Socket[bytes]":
    """Connect a client's DEALER.

    Args:
        address: the endpoint.
        routing_id: address of the client at the server; it survives a reconnect.
        prepare: called with the socket before it connects.

    Raises:
        ConfigError: the endpoint is not an address.
    """
    socket = _socket(zmq.DEALER)
    prepare(socket)
    socket.setsockopt(zmq.ROUTING_ID, routing_id)
    socket.sndhwm = 0
    socket.rcvhwm = MAX_CLIENT_MESSAGES
    socket.reconnect_ivl = RECONNECT_MS
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.heartbeat_timeout = 3 * HEARTBEAT_MS
    socket.handshake_ivl = HEARTBEAT_MS  # ZeroMQ's default is 30 s
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"endpoint {address!r} is not an address: {error}") from None
    return socket


# Of a link on which one side asks and the other answers.
MAX_ANSWERS, MAX_QUESTIONS = 1024, 64  # messages in the socket of each
QUESTIONS_RECONNECT_MS = 1000  # at most, to a peer that is gone


@cache
def _bulk_context() -> "zmq.Context[zmq.Socket[bytes]]":
    """Return the context of links with many bytes.

    It has a thread of its own, so that what is encrypted there delays no message of a step, and its
    sockets may be in use while `close_all` closes the others.
    """
    return zmq.Context()


def _bulk_socket(kind: int, prepare: Prepare, max_message_bytes: int) -> "zmq.Socket[bytes]":
    socket = _bulk_context().socket(kind)
    socket.linger = LINGER_MS
    prepare(socket)
    socket.maxmsgsize = max_message_bytes
    return socket


def bind_answers(address: str, prepare: Prepare, max_message_bytes: int) -> "zmq.Socket[bytes]":
    """Bind a ROUTER that answers questions. What it sends to a peer that has gone is dropped.

    Args:
        address: its address.
        prepare: called with the socket before it is bound.
        max_message_bytes: of a question; a connection with a longer one is closed.
    """
    socket = _bulk_socket(zmq.ROUTER, prepare, max_message_bytes)
    socket.sndhwm = MAX_ANSWERS
    socket.rcvhwm = MAX_QUESTIONS
    _bind(socket, address)
    return socket


def connect_questions(
    address: str, prepare: Prepare, max_message_bytes: int
) -> "zmq.Socket[bytes]":
    """Connect a DEALER that asks questions; without a connection, it takes none to send.

    Args:
        address: of the peer.
        prepare: called with the socket before it connects.
        max_message_bytes: of an answer.
    """
    socket = _bulk_socket(zmq.DEALER, prepare, max_message_bytes)
    socket.immediate = True
    socket.sndhwm = MAX_QUESTIONS
    socket.rcvhwm = MAX_ANSWERS
    socket.reconnect_ivl = RECONNECT_MS
    socket.reconnect_ivl_max = QUESTIONS_RECONNECT_MS
    socket.connect(address)
    return socket


def is_readable(socket: "zmq.Socket[bytes]") -> bool:
    """Return whether a message can be received.

    Trying to receive raises an exception instead, which takes 100 us in a process that runs once
    per step, since its code has left the caches.
    """
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
        _refuse_address(address, str(error))


def _refuse_address(address: str, reason: str) -> NoReturn:
    """Raise ConfigError for an address that cannot be bound."""
    if address.startswith(IPC) and len(address) > len(IPC) + zmq.IPC_PATH_MAX_LEN:
        raise ConfigError(
            f"{address} is too long: the path of a socket has at most {zmq.IPC_PATH_MAX_LEN}"
            " characters; set TMPDIR to a shorter directory, for example /tmp, or choose"
            " another --endpoint"
        ) from None
    raise ConfigError(f"cannot bind {address}: {reason}") from None


class Poller:
    """Blocks until one of several inboxes or plain file descriptors has something to read."""

    def __init__(self, *sources: Any) -> None:
        self._poller = zmq.Poller()
        for source in sources:
            self._poller.register(getattr(source, "socket", source), zmq.POLLIN)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until a source is readable; return False at the timeout.

        Args:
            timeout: seconds, rounded up to milliseconds; None: no timeout.
        """
        return bool(self._poller.poll(None if timeout is None else math.ceil(timeout * 1000)))


def close_all() -> None:
    """Close every socket of this process, waiting at most each one's linger for unsent data."""
    zmq.Context.instance().destroy(linger=LINGER_MS)
