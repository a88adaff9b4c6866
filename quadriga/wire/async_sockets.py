"""ZeroMQ sockets on an asyncio loop, and the events of their connections."""

import asyncio
import functools
import math
import operator
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from quadriga.wire.sockets import is_readable

# Time for receiving before the event loop runs its other callbacks.
RECEIVE_BUDGET_S = 0.005


class AsyncPort:
    """Multipart send and receive of one socket on an asyncio loop, without a task per message.

    ZeroMQ's file descriptor is edge-triggered and shared by both directions, so that every send
    must be followed by a check for received messages; `_pump` is scheduled for that.

    Args:
        socket: the socket.
        on_frames: called with the frames of each message.
        before_receive: called before messages are received.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        on_frames: Callable[[list[bytes]], None],
        before_receive: Callable[[], None] = lambda: None,
    ) -> None:
        self.socket = socket
        self._on_frames = on_frames
        self._before_receive = before_receive
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._file_descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._file_descriptor, self._pump)
        self._schedule()

    def send(self, *frames: bytes) -> bool:
        """Send a message; return False if the peer's queue is full.

        Raises:
            Unreachable: the peer of a ROUTER is not connected.
        """
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

    def close(self, linger_s: float | None = None) -> None:
        """Close the socket; unsent messages have `linger_s` seconds, or LINGER_MS if None."""
        if not self.socket.closed:
            self._loop.remove_reader(self._file_descriptor)
            self.socket.close(linger=None if linger_s is None else int(linger_s * 1000))

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._scheduled = False
        self._before_receive()
        self.receive(budget_s=RECEIVE_BUDGET_S)

    def receive(self, max_messages: int = 64, budget_s: float = math.inf) -> None:
        """Process received messages within these bounds; the rest follows in the next iteration."""
        started_at = time.monotonic()
        for _ in range(max_messages):
            if time.monotonic() - started_at > budget_s:
                break
            if self.socket.closed or not is_readable(self.socket):
                return
            if frames := self._next():
                self._process(frames)
        self._schedule()

    def _process(self, frames: list[bytes]) -> None:
        try:
            self._on_frames(frames)
        except BaseException:
            self._schedule()  # further messages trigger no event of their own
            raise

    def _next(self) -> list[bytes]:
        """Receive a message; return no frames if it must be dropped."""
        return self.socket.recv_multipart(zmq.NOBLOCK)


class Unreachable(Exception):
    """The peer of a ROUTER's send is not connected."""


_REFUSALS = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the server does not know this client's key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "one side uses keys and the other does not, or others",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the other side ended the handshake: does one side"
    " use keys and the other not, or another server's?",
}


class ConnectionWatch:
    """Calls back on the events of a socket's connections.

    Args:
        socket: the socket; a ROUTER has many connections.
        on_disconnect: called when a connection is lost.
        on_connect: called when a connection is established.
        on_refusal: called with the reason when the other side refuses a connection.
        on_accept: called with the file descriptor of an accepted connection.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        on_disconnect: Callable[[], None],
        on_connect: Callable[[], None] = lambda: None,
        on_refusal: Callable[[str], None] = lambda _: None,
        on_accept: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._watched = socket
        callbacks: dict[int, Callable[[int], None]] = {
            zmq.EVENT_DISCONNECTED: lambda _: on_disconnect(),
            zmq.EVENT_CONNECTED: lambda _: on_connect(),
            zmq.EVENT_ACCEPTED: on_accept,
        }
        for event, reason in _REFUSALS.items():
            callbacks[event] = lambda _, reason=reason: on_refusal(reason)  # type: ignore[misc]
        monitor = socket.get_monitor_socket(functools.reduce(operator.or_, callbacks))

        def on_frames(frames: list[bytes]) -> None:
            event = parse_monitor_message(frames)
            callbacks[event["event"]](event["value"])

        self._port = AsyncPort(monitor, on_frames)

    def process(self) -> None:
        """Call back now for all events that have happened."""
        self._port.receive()

    def close(self) -> None:
        """Stop watching. Call it before the watched socket is closed."""
        if not self._watched.closed:
            self._watched.disable_monitor()
        self._port.close(linger_s=0)
