"""A process notices the death of its peer by a connection that it has made itself."""

import queue
import socket
from collections.abc import Iterator

import psutil
import pytest

from quadriga.wire.links import NodeLinks, PeerWatch, bind_lifeline, host_of
from quadriga.wire.sockets import Outbox
from tests.waiting import wait_until

HOST = "127.0.0.1"
LINKS = NodeLinks(ranks=(f"tcp://{HOST}:9",))
TIMEOUT_S = 20.0


class Pair:
    """A lifeline, and the watch of a peer that is connected to it."""

    def __init__(self) -> None:
        self.losses: queue.Queue[str] = queue.Queue()
        self.lifeline, self.address = bind_lifeline(HOST, LINKS.prepare_bind)
        self.port = int(self.address.rpartition(":")[2])
        self.outbox = Outbox(self.address, LINKS.prepare_connect)
        self.watch = PeerWatch(self.outbox.socket, lambda: self.losses.put("lost"))
        wait_until(self._is_connected, TIMEOUT_S)

    def _is_connected(self) -> bool:
        return any(
            one.status == psutil.CONN_ESTABLISHED and one.laddr.port == self.port
            for one in psutil.Process().net_connections("tcp")
        )


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    if not pair.outbox.socket.closed:
        pair.watch.close()
        pair.outbox.close()
    pair.lifeline.close(linger=0)


def test_the_end_of_the_peer_is_noticed_once(pair: Pair) -> None:
    assert host_of(pair.address) == HOST
    pair.lifeline.close(linger=0)
    assert pair.losses.get(timeout=TIMEOUT_S) == "lost"
    pair.watch.close()
    pair.outbox.close()
    assert pair.losses.empty()


def test_a_watch_that_is_closed_reports_nothing(pair: Pair) -> None:
    pair.watch.close()
    pair.lifeline.close(linger=0)
    pair.outbox.close()
    assert pair.losses.empty()


def test_a_stranger_that_connects_to_a_lifeline_and_leaves_is_no_loss(pair: Pair) -> None:
    for _ in range(3):
        socket.create_connection((HOST, pair.port)).close()
    with pytest.raises(queue.Empty):
        pair.losses.get(timeout=0.3)
