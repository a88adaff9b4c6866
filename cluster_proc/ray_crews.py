"""Crews on the machines of a Ray cluster. Only this module imports ray.

Ray places a replica (a placement group of one bundle) and says when its machine or its actor is
gone. Everything else goes over this server's own sockets.
"""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from cluster_proc import crew_actor
from cluster_proc.contract import Report
from quadriga import programs
from quadriga.config.replica_args import ReplicaArgs
from quadriga.errors import ConfigError

INSTALL = "ray"
CONNECT_TIMEOUT_S = 5.0
# Of a crew that is not needed any more, on a machine that may be gone.
STOP_TIMEOUT_S = 12.0


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


@dataclass(frozen=True, slots=True)
class Bundle:
    """What a replica needs of its machine."""

    cpus: float
    gpus: int

    @property
    def resources(self) -> dict[str, float]:
        """The bundle in Ray's terms."""
        return {"CPU": self.cpus, **({"GPU": float(self.gpus)} if self.gpus else {})}

    def __str__(self) -> str:
        return ", ".join(f"{amount:g} {name}" for name, amount in self.resources.items())


class RayCrews:
    """Starts crews on the machines of a cluster.

    Args:
        args: address of the cluster.
        bundle: what each replica needs.

    Attributes:
        bundle: what each replica needs.

    Raises:
        ConfigError: there is no ray, or no cluster at the address.
    """

    def __init__(self, args: ReplicaArgs, bundle: Bundle) -> None:
        self._ray = import_ray()
        self.bundle = bundle
        try:
            check_port(args.ray_address)
            self._ray.init(args.ray_address, logging_level=logging.WARNING, configure_logging=False)
        except Exception as error:
            raise ConfigError(
                f"no Ray cluster answers at --ray-address {args.ray_address}: {error}. Start one"
                " with ray start --head, or give the address of another"
            ) from None
        self._ray.cloudpickle.register_pickle_by_value(crew_actor)

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
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def new_crew(self, arguments: list[str]) -> "RayCrew":
        """Return a crew that is not placed yet. arguments: see crew.py."""
        return RayCrew(self._ray, self.bundle, arguments)

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
    """A crew, its actor and its placement group."""

    def __init__(self, ray: ModuleType, bundle: Bundle, arguments: list[str]) -> None:
        self._ray = ray
        self._bundle = bundle
        self._arguments = arguments
        self._group = ray.util.placement_group([bundle.resources], strategy="STRICT_PACK")
        self._actor: Any = None

    async def place(self) -> None:
        """Wait for a machine that has room, and start the crew there."""
        await self._group.ready()
        strategies = self._ray.util.scheduling_strategies
        actor_class = self._ray.remote(crew_actor.CrewActor).options(
            num_cpus=self._bundle.cpus,
            num_gpus=self._bundle.gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=4,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(self._group, 0),
        )
        self._actor = actor_class.remote(programs.__file__, self._arguments)

    async def reports(self) -> AsyncIterator[Report]:
        """Yield the crew's reports; one with the reason that it is lost comes last."""
        while True:
            try:
                lines = await self._actor.next_reports.remote()
            except self._ray.exceptions.RayError as error:
                yield {"report": "lost", "reason": _first_line(error)}
                return
            for line in lines:
                yield json.loads(line)
            if not lines:
                yield {"report": "lost", "reason": "its crew has ended"}
                return

    def send(self, line: str) -> None:
        """Send a command; nothing happens while the crew is not placed."""
        if self._actor is not None:
            self._actor.send.remote(line)

    async def close(self) -> None:
        """End the crew, whatever it does, and give its place back."""
        if self._actor is not None:
            stopping = asyncio.ensure_future(self._stop_actor())
            await asyncio.wait({stopping}, timeout=STOP_TIMEOUT_S)
            stopping.cancel()
            self._ray.kill(self._actor)
        self._ray.util.remove_placement_group(self._group)

    async def _stop_actor(self) -> None:
        with suppress(self._ray.exceptions.RayError):
            await self._actor.stop.remote()


def _first_line(error: Exception) -> str:
    """Return what Ray says of a death, without its advice and stacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
