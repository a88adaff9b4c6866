"""Links between processes on different machines: TCP, with the server's inner keys.

Both ends have the inner pair of the server's key directory (`inner.key_secret`), on every machine.
Its public key is never handed out and not on the wire, so that no stranger can connect. A peer that
stops answering counts as disconnected.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from quadriga.wire.curve import INNER, INNER_DOMAIN, KeyPair, load_pair

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
    """

    scheduler: str = ""
    delivery: str = ""
    key_dir: str = ""
    ranks: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def host(self) -> str:
        """Address of this machine that the others reach."""
        return host_of(self.scheduler or next(filter(None, self.ranks)))

    def rank(self, rank: int) -> str:
        """Return where a rank receives; "": in the run directory."""
        return self.ranks[rank] if rank < len(self.ranks) else ""

    @property
    def _leave_machine(self) -> bool:
        return bool(self.scheduler or self.delivery or self.ranks)

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
