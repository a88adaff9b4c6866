"""The links between processes: their addresses on one machine and across machines.

Each process binds its own inbox. Links that leave the machine use TCP with the server's inner keys
(NodeLinks); a PeerWatch notices in a thread that the process at the other end has gone. Endpoints
lists all links.
"""

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from quadriga.wire.curve import INNER, INNER_DOMAIN, KeyPair, load_pair
from quadriga.wire.sockets import LinkSocket, Prepare, bind_frames

# Links between processes on different machines: TCP, with the server's inner keys.
#
# Both ends have the inner pair of the server's key directory (`inner.key_secret`), on every
# machine. Its public key is never handed out and not on the wire, so that no stranger can
# connect. A peer that stops answering counts as disconnected.

PEER_HEARTBEAT_MS = 1000
PEER_TIMEOUT_MS = 3000


@dataclass(frozen=True, slots=True)
class NodeLinks:
    """Addresses of a replica's links that leave its machine.

    Attributes:
        scheduler: where its scheduler receives; "": in the run directory.
        delivery: where the frontend receives its results; "": in the run directory.
        key_dir: the server's key directory; "": the links have no keys.
        ranks: where each rank of its worker receives; "", or none at all: in the run directory.
        pages: where its worker gives KV pages to replicas on other machines; "": it gives none.
    """

    scheduler: str = ""
    delivery: str = ""
    key_dir: str = ""
    ranks: tuple[str, ...] = field(default=(), kw_only=True)
    pages: str = field(default="", kw_only=True)

    @property
    def host(self) -> str:
        """Address of this machine that the others reach."""
        return host_of(self.scheduler or next(filter(None, self.ranks)))

    def rank(self, rank: int) -> str:
        """Return where a rank receives; "": in the run directory."""
        return self.ranks[rank] if rank < len(self.ranks) else ""

    @property
    def _leave_machine(self) -> bool:
        return bool(self.scheduler or self.delivery or self.ranks or self.pages)

    @property
    def prepare_bind(self) -> Callable[["zmq.Socket[bytes]"], None]:
        """What is to be done with a socket that binds one of the links."""
        return self._prepare_bind if self._leave_machine else _leave

    @property
    def prepare_connect(self) -> Callable[["zmq.Socket[bytes]"], None]:
        """What is to be done with a socket that connects to one of the links."""
        return self._prepare_connect if self._leave_machine else _leave

    def _prepare_bind(self, link: "zmq.Socket[bytes]") -> None:
        _set_heartbeat(link)
        if self.key_dir:
            link.curve_server = True
            link.setsockopt_string(zmq.ZAP_DOMAIN, INNER_DOMAIN)
            link.curve_publickey, link.curve_secretkey = self._keys

    def _prepare_connect(self, link: "zmq.Socket[bytes]") -> None:
        _set_heartbeat(link)
        if self.key_dir:
            link.curve_serverkey = self._keys.public
            link.curve_publickey, link.curve_secretkey = self._keys

    @property
    def _keys(self) -> KeyPair:
        return load_pair(Path(self.key_dir), INNER)


ON_THIS_MACHINE = NodeLinks()


def host_of(address: str) -> str:
    """Return the host of an address tcp://HOST:PORT."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def tcp_address(host: str, port: int | str) -> str:
    """Return the address tcp://HOST:PORT. port: `*` lets ZeroMQ choose one."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _leave(link: "zmq.Socket[bytes]") -> None:
    """Leave a socket of the run directory as it is."""


def _set_heartbeat(link: "zmq.Socket[bytes]") -> None:
    link.heartbeat_ivl = PEER_HEARTBEAT_MS
    link.heartbeat_timeout = PEER_TIMEOUT_MS
    link.handshake_ivl = PEER_TIMEOUT_MS


class ReservedPort:
    """A TCP port that no other program is given, and that a ZeroMQ socket of this server may bind.

    The reservation is a bound socket that does not listen. ZeroMQ sets SO_REUSEADDR, too, and so
    may bind the same port, in this process or another one, again after each restart.

    Args:
        host: address of this machine that the others reach.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.address = tcp_address(host, self._socket.getsockname()[1])

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()


# Notice in a thread that the process at the other end of a connection has gone.
#
# Each of the two watches a connection that it has made itself. A bound socket cannot be watched
# so: whatever fails to connect to it would look like a loss. A process that has nothing to
# receive from its peer therefore binds a lifeline, to which the peer connects.


class PeerWatch:
    """Watches a connected socket of NodeLinks, whose heartbeats notice a silent peer.

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


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of a run's inner links: ipc sockets in its private directory.

    Several replicas have all links but `public` once each. Where a replica is on another machine,
    `links` has the addresses of `scheduler` and `delivery`, and of the ranks on further machines.

    | link       | binds          | connects                      | carries            |
    |------------|----------------|-------------------------------|--------------------|
    | scheduler  | scheduler_proc | tokenizer_proc, detok_proc    | SchedulerMessage   |
    | worker     | worker_proc    | scheduler_proc                | WorkerMessage      |
    | results    | scheduler_proc | worker_proc                   | ResultMessage      |
    | detok      | detok_proc     | scheduler_proc                | DetokMessage       |
    | delivery   | tokenizer_proc | detok_proc                    | [address, message] |
    | pages      | worker_proc    | worker_proc on other machines | KV pages           |
    | public     | tokenizer_proc | clients, if it is private     | ClientMessage      |
    """

    run_dir: Path
    links: NodeLinks = ON_THIS_MACHINE

    def of_replica(self, number: int, num_replicas: int) -> "Endpoints":
        """Return the addresses of a replica. One among several has a directory of its own."""
        return Endpoints(replica_dir(self.run_dir, number)) if num_replicas > 1 else self

    def _ipc(self, name: str) -> str:
        return f"ipc://{self.run_dir}/{name}"

    @property
    def scheduler(self) -> str:
        """Address of the scheduler's messages."""
        return self.links.scheduler or self._ipc("scheduler")

    @property
    def worker(self) -> str:
        """Address of the worker, or of its rank 0."""
        return self.rank(0)

    def rank(self, rank: int) -> str:
        """Return the address of a TP rank, which receives every message that rank 0 receives."""
        return self.links.rank(rank) or self._ipc(f"worker-{rank}")

    @property
    def results(self) -> str:
        """Address of the worker's results, at the scheduler."""
        return self._ipc("results")

    @property
    def detok(self) -> str:
        """Address of the detokenizer."""
        return self._ipc("detok")

    @property
    def delivery(self) -> str:
        """Address of messages to clients, at the frontend."""
        return self.links.delivery or self._ipc("delivery")

    @property
    def public(self) -> str:
        """Address of the public socket of a server that only its owner may reach."""
        return self._ipc("public")


def replica_dir(run_dir: Path, number: int) -> Path:
    """Return the directory of one replica among several. Its name is in the replica's journal."""
    return run_dir / f"{run_dir.name}-{number}"
