"""Events of the connections of a ZeroMQ socket."""

import functools
import operator
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from quadriga.wire.async_port import AsyncPort

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
