"""Notice in a thread that the process at the other end of a connection has gone.

Each of the two watches a connection that it has made itself. A bound socket cannot be watched so:
whatever fails to connect to it would look like a loss. A process that has nothing to receive from
its peer therefore binds a lifeline, to which the peer connects.
"""

import threading
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from quadriga.wire.node_links import tcp_address
from quadriga.wire.sockets import LinkSocket, Prepare, bind_frames


class PeerWatch:
    """Watches a connected socket of node_links.py, whose heartbeats notice a silent peer.

    Args:
        link: the socket.
        on_loss: called once, in a thread, when the connection has broken.
    """

    def __init__(self, link: LinkSocket, on_loss: Callable[[], None]) -> None:
        self._link = link
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        self._monitor = link.get_monitor_socket(events)
        self._on_loss = on_loss
        self._thread = threading.Thread(target=self._watch, name="peer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Call it in the thread that owns the socket, before that is closed."""
        self._link.disable_monitor()
        self._thread.join()

    def _watch(self) -> None:
        try:
            event = recv_monitor_message(self._monitor)["event"]
        except zmq.ZMQError:  # this process ends, and closes every socket
            return
        if event == zmq.EVENT_DISCONNECTED:
            self._on_loss()


def bind_lifeline(host: str, prepare: Prepare) -> tuple[LinkSocket, str]:
    """Bind a socket that carries nothing, on a free port; return it and its address.

    Args:
        host: address of this machine that the peers reach.
        prepare: called with the socket before it is bound.
    """
    lifeline = bind_frames(tcp_address(host, "*"), prepare)
    return lifeline, lifeline.getsockopt_string(zmq.LAST_ENDPOINT)
