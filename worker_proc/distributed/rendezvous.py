"""How the ranks of a worker find each other: by a file on one machine, or by a port of rank 0."""

import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from quadriga.errors import ConfigError
from quadriga.wire.links import host_of, tcp_address

if TYPE_CHECKING:
    from worker_proc.loading.sharding import TPRank


class Rendezvous(Protocol):
    """Where the ranks meet. Each process makes its own of the same `address`."""

    @property
    def address(self) -> str:
        """What the other ranks need to find this place."""

    def begin(self, rank: "TPRank", timeout: timedelta) -> dict[str, Any]:
        """Choose the network, and return the arguments of init_process_group for it."""


class FileRendezvous:
    """All ranks are on this machine, and find each other by a new file.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def address(self) -> str:
        """The file."""
        return str(self._path)

    def begin(self, rank: "TPRank", timeout: timedelta) -> dict[str, Any]:  # noqa: ARG002
        """Keep the ranks unreachable from the network, and name the file."""
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return {"init_method": f"file://{self._path}"}


class PortRendezvous:
    """Ranks on several machines find each other by a port at rank 0.

    Args:
        address: the port, as tcp://HOST:PORT.
        own_host: address of this machine that the others reach.
    """

    def __init__(self, address: str, own_host: str) -> None:
        self.address = address
        self._own_host = own_host
        self._listener: socket.socket | None = None

    @classmethod
    def open(cls, host: str) -> "PortRendezvous":
        """Return a new port of this machine, on no other address than the one given."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        meeting = cls(tcp_address(host, listener.getsockname()[1]), host)
        meeting._listener = listener
        return meeting

    def begin(self, rank: "TPRank", timeout: timedelta) -> dict[str, Any]:
        """Choose the network interface, and connect to the port; rank 0 serves it.

        Raises:
            ConfigError: no interface of this machine has its address.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        interface = interface_of(self._own_host)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # = asks for the whole name
        host, port = host_of(self.address), int(self.address.rpartition(":")[2])
        listener = None if self._listener is None else self._listener.detach()
        store = TCPStore(host, port, rank.count, rank.rank == 0, timeout, master_listen_fd=listener)
        return {"store": store}


def rendezvous_at(address: str) -> Rendezvous:
    """Return the meeting of a rank on the machine of rank 0."""
    if address.startswith("tcp://"):
        return PortRendezvous(address, host_of(address))
    return FileRendezvous(Path(address))


def interface_of(host: str) -> str:
    """Return the name of the network interface that has an address. Raise ConfigError: none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == host for one in addresses):
            return str(name)
    raise ConfigError(
        f"no network interface of this machine has the address {host}, under which the cluster"
        " knows it: start Ray there with --node-ip-address and an address of the machine"
    )
