"""What happens to the connections of a ZeroMQ socket."""

import functools
import operator
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from quadriga.wire.sockets import AsyncPort

_REFUSALS = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the server does not know this client's key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "one side uses keys and the other does not, or others",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the other side broke the handshake off: does one side"
    " use keys and the other not, or another server's?",
}


class ConnectionWatch:
    """Calls back when a connection of a socket (one of a ROUTER's) comes up, is lost, or is
    refused, with the reason; and when one is taken, with its file descriptor."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        on_disconnect: Callable[[], None],
        on_connect: Callable[[], None] = lambda: None,
        on_refusal: Callable[[str], None] = lambda reason: None,
        on_accept: Callable[[int], None] = lambda descriptor: None,
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

        def take(frames: list[bytes]) -> None:
            told = parse_monitor_message(frames)
            callbacks[told["event"]](told["value"])

        self._port = AsyncPort(monitor, take)

    def look(self) -> None:
        """Call back at once for what has happened, before anything that came after it."""
        self._port.receive()

    def close(self) -> None:
        """Call before the watched socket is closed."""
        if not self._watched.closed:
            self._watched.disable_monitor()
        self._port.close(linger=0)
