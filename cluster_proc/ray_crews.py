"""Crews on the machines of a Ray cluster. Only this module imports ray.

Ray places a replica (a placement group of a bundle for each of its machines) and says when a
machine or an actor is gone. Everything else goes over this server's own sockets.
"""

import logging
import socket
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

from cluster_proc import crew_actor
from cluster_proc.bundle import Bundle, fewest_machines
from cluster_proc.contract import CrewProcess, PlacedCrew, Placement, Report
from cluster_proc.ray_actor import RayPlacement
from cluster_proc.spread_crew import CREW, SpreadCrew
from quadriga import programs
from quadriga.config.replica_args import ReplicaArgs
from quadriga.errors import ConfigError

INSTALL = "ray"
CONNECT_TIMEOUT_S = 5.0


def import_ray() -> ModuleType:
    """Import ray. Raise ConfigError where it is not installed."""
    try:
        import ray
        import ray.util.scheduling_strategies  # is not imported with ray
    except ImportError:
        raise ConfigError(
            f"--cluster ray needs the package ray: {programs.install_command(INSTALL)}"
        ) from None
    return ray  # type: ignore[no-any-return]


class RayCrews:
    """Starts crews on the machines of a cluster.

    Args:
        args: address of the cluster, and what a replica needs.
        tp: number of ranks of each replica.
        needs_gpus: each rank is on a GPU.

    Attributes:
        bundle: what each replica needs.

    Raises:
        ConfigError: there is no ray, or no cluster at the address.
    """

    def __init__(self, args: ReplicaArgs, tp: int, needs_gpus: bool) -> None:
        self._ray = import_ray()
        self._tp = tp
        try:
            check_port(args.ray_address)
            self._ray.init(args.ray_address, logging_level=logging.WARNING, configure_logging=False)
        except Exception as error:
            raise ConfigError(
                f"no Ray cluster answers at --ray-address {args.ray_address}: {error}. Start one"
                " with ray start --head, or give the address of another"
            ) from None
        self._ray.cloudpickle.register_pickle_by_value(crew_actor)
        gpus = [int(node["Resources"].get("GPU", 0)) for node in self._alive]
        num_machines = args.nnodes or (fewest_machines(tp, gpus) if needs_gpus else 1)
        num_gpus = tp // num_machines if needs_gpus else 0
        self.bundle = Bundle(args.replica_cpus, num_gpus, num_machines)

    @property
    def _alive(self) -> list[dict[str, Any]]:
        """What Ray knows of each machine of the cluster."""
        return [node for node in self._ray.nodes() if node["Alive"]]

    @property
    def host(self) -> str:
        """Address of this machine in the cluster."""
        return str(self._ray.util.get_node_ip_address())

    @property
    def machines(self) -> list[str]:
        """What each machine of the cluster has in all, for messages."""
        return [
            f"{node['NodeManagerAddress']}: {node['Resources'].get('CPU', 0):g} CPU,"
            f" {node['Resources'].get('GPU', 0):g} GPU"
            for node in self._alive
        ]

    def new_crew(self, arguments: list[str]) -> PlacedCrew:
        """Return a crew that is not placed yet. arguments: see crew.py."""
        placement = RayPlacement(self._ray, self.bundle)
        if self.bundle.num_machines == 1:
            return RayCrew(placement, arguments)
        return SpreadCrew(placement, arguments, self.bundle.num_machines, self._tp)

    def close(self) -> None:
        """End all crews of this driver."""
        self._ray.shutdown()


def check_port(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT: Ray itself tries for minutes.

    Args:
        address: as of ray.init; one without a port, such as `auto`, is left to Ray.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()


class RayCrew:
    """The crew of a replica on one machine.

    Args:
        placement: its place.
        arguments: of the crew.
    """

    def __init__(self, placement: Placement, arguments: list[str]) -> None:
        self._placement = placement
        self._arguments = arguments
        self._process: CrewProcess | None = None

    async def place(self) -> None:
        """Wait for a machine that has room, and start the crew there."""
        await self._placement.wait()
        self._process = self._placement.start(0, CREW, self._arguments)

    async def reports(self) -> AsyncIterator[Report]:
        """Yield the crew's reports; one with the reason that it is lost comes last."""
        assert self._process is not None, "it has been placed"
        async for report in self._process.reports():
            yield report

    def send(self, line: str) -> None:
        """Send a command; nothing happens while the crew is not placed."""
        if self._process is not None:
            self._process.send(line)

    async def close(self) -> None:
        """End the crew, whatever it does, and give its place back."""
        if self._process is not None:
            await self._process.stop()
        self._placement.remove()
