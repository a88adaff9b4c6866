"""What happens to the connections of a ZeroMQ socket."""

import functools
import operator
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from quadriga.sockets import AsyncPort

_REFUSALS = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the server does not know this client's key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "one side uses keys and the other does not, or others",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the other side broke the handshake off: does one side"
    " use keys and the other not, or another server's?",
}


class ConnectionWatch:
    """Calls back when a connection of a socket (one of a ROUTER's) comes up, is lost, or is
    refused, with the reason."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        on_disconnect: Callable[[], None],
        on_connect: Callable[[], None] = lambda: None,
        on_refusal: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._watched = socket
        callbacks: dict[int, Callable[[], None]] = {
            zmq.EVENT_DISCONNECTED: on_disconnect,
            zmq.EVENT_CONNECTED: on_connect,
        }
        for event, reason in _REFUSALS.items():
            callbacks[event] = functools.partial(on_refusal, reason)
        monitor = socket.get_monitor_socket(functools.reduce(operator.or_, callbacks))
        self._port = AsyncPort(
            monitor, lambda frames: callbacks[parse_monitor_message(frames)["event"]]()
        )

    def look(self) -> None:
        """Call back at once for what has happened, before anything that came after it."""
        self._port.receive()

    def close(self) -> None:
        """Call before the watched socket is closed."""
        if not self._watched.closed:
            self._watched.disable_monitor()
        self._port.close(linger=0)
