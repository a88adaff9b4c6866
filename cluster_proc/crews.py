"""Crews on the machines of a cluster: what the driver needs of one, and Ray.

In order: the contract of a cluster, what a replica needs of its machines, a replica whose ranks are
on several machines, and Ray. Only this module imports ray: it places a replica (a placement group
of a bundle for each of its machines) and says when a machine or an actor is gone. Everything else
goes over this server's own sockets.
"""

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from cluster_proc import crew_actor
from quadriga import errors, programs
from quadriga.server.config.engine_args import ReplicaArgs
from quadriga.server.processes.machine import other_version

# What the driver needs of a cluster.

# Ray reads the variable, too; without it the cluster is that of this machine.
ADDRESS_VARIABLE, LOCAL_CLUSTER = "RAY_ADDRESS", "auto"

# A report of a crew, as crew.py lists them.
Report = dict[str, Any]


class CrewProcess(Protocol):
    """A crew, or a rank crew, that has been started on a machine."""

    def reports(self) -> AsyncIterator[Report]:
        """Yield its reports; `lost` comes last, also where its machine is gone."""

    def send(self, line: str) -> None:
        """Send a command."""

    async def stop(self) -> None:
        """End it, whatever it does."""


class Placement(Protocol):
    """Room for the crews of one replica, on one machine or several."""

    async def wait(self) -> None:
        """Wait for the machines."""

    def start(self, machine: int, module: str, arguments: list[str]) -> CrewProcess:
        """Start a crew on one of them, from 0 on."""

    def remove(self) -> None:
        """Give the room back."""


class PlacedCrew(Protocol):
    """A crew on one machine of the cluster."""

    async def place(self) -> None:
        """Wait for a machine that has room, and start the crew there."""

    def reports(self) -> AsyncIterator[Report]:
        """Yield the crew's reports; `lost` comes last, also where its machine is gone."""

    def send(self, line: str) -> None:
        """Send a command; nothing happens while the crew is not placed."""

    async def close(self) -> None:
        """End the crew, whatever it does, and give its place back."""


class Crews(Protocol):
    """Starts crews on the machines of a cluster."""

    def bundle_of(self, role: str) -> object:
        """Return what a replica of a role needs, for messages: `a machine with 1 CPU free`."""

    @property
    def host(self) -> str:
        """Address of this machine in the cluster."""

    @property
    def machines(self) -> list[str]:
        """What each machine of the cluster has in all, for messages."""

    def new_crew(self, arguments: list[str], role: str) -> PlacedCrew:
        """Return a crew that is not placed yet.

        Args:
            arguments: see crew.py.
            role: of its replica, as of ReplicaArgs.role_of. Those of a role are on as many machines
                as there are.
        """

    def close(self) -> None:
        """End all crews of this driver."""


# What a replica needs of the machines of a cluster.

# Of a custom resource, which says of what kind a machine is, and not how many replicas it takes.
RESOURCE_SHARE = 0.001


@dataclass(frozen=True, slots=True)
class Bundle:
    """What a replica needs of each of its machines.

    Attributes:
        num_machines: number of its machines.
        resource: custom resource that each has; "": none.
    """

    cpus: float
    gpus: int
    num_machines: int = 1
    resource: str = ""

    @property
    def resources(self) -> dict[str, float]:
        """What it needs of one machine, in Ray's terms."""
        gpus = {"GPU": float(self.gpus)} if self.gpus else {}
        return {"CPU": self.cpus, **gpus, **self._custom}

    @property
    def _custom(self) -> dict[str, float]:
        return {self.resource: RESOURCE_SHARE} if self.resource else {}

    def __str__(self) -> str:
        amounts = ", ".join(
            name if name in self._custom else f"{amount:g} {name}"
            for name, amount in self.resources.items()
        )
        if self.num_machines == 1:
            return f"a machine with {amounts} free"
        return f"{self.num_machines} machines with {amounts} free on each"


class Machine(NamedTuple):
    """A machine of the cluster. resources: all that it has, used or not."""

    name: str
    resources: Mapping[str, float]


class PlacedReplica(NamedTuple):
    """A replica, and the machine that it is on."""

    machine: str
    role: str
    bundle: Bundle


def choose_machine(
    machines: Sequence[Machine], placed: Sequence[PlacedReplica], bundle: Bundle, role: str
) -> str | None:
    """Return the machine for a replica that has the fewest ones of its role, if any has room.

    So the loss of one machine does not take all replicas of a role. Among several of these
    machines it is the one with the fewest replicas, and among those the one with room for most.

    Args:
        machines: all.
        placed: the other replicas of this server. What else runs there is not known here.
        bundle: what the replica needs.
        role: its role.
    """
    ranked = []
    for machine in machines:
        here = [one for one in placed if one.machine == machine.name]
        room = min(
            (
                machine.resources.get(kind, 0.0) - sum(one.bundle.resources.get(kind, 0.0)
                                                       for one in here)
            ) / amount
            for kind, amount in bundle.resources.items()
        )  # fmt: skip
        if room >= 1:
            num_of_role = sum(one.role == role for one in here)
            ranked.append((num_of_role, len(here), -room, machine.name))
    return min(ranked)[-1] if ranked else None


def fewest_machines(tp: int, gpus: Sequence[int]) -> int:
    """Return the least number of machines that have the GPUs for `tp` ranks, equally many on each.

    Args:
        tp: number of ranks, each on a GPU of its own.
        gpus: number of GPUs of each machine.

    Returns:
        1 also where no number of these machines has the GPUs: others may join the cluster.
    """
    for num_machines in range(1, tp + 1):
        share = tp // num_machines
        if tp % num_machines == 0 and sum(count >= share for count in gpus) >= num_machines:
            return num_machines
    return 1


# A replica whose ranks are on several machines.
#
# The first machine has a crew (crew.py) with scheduler, detokenizer and rank 0, as ever; each
# further one has a rank crew, of the same module. The crew is started with the addresses that the
# rank crews have reported. The end of any of them is that of the replica.

CREW = "cluster_proc.crew"


class SpreadCrew:
    """A crew, the rank crews of the other machines, and their places.

    Args:
        placement: of one bundle for each machine.
        arguments: of the crew.
        num_machines: number of machines.
        tp: number of ranks.
    """

    def __init__(
        self, placement: Placement, arguments: list[str], num_machines: int, tp: int
    ) -> None:
        self._placement = placement
        self._arguments = arguments
        self._machines = range(1, num_machines)  # those of the rank crews
        self._num_ranks = tp // num_machines
        self._crews: dict[int, CrewProcess] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._reports: asyncio.Queue[tuple[int, Report]] = asyncio.Queue()
        self._addresses: dict[int, list[str]] = {}

    async def place(self) -> None:
        """Wait for machines that have room, and start the rank crews there."""
        await self._placement.wait()
        for machine in self._machines:
            first = ["--first-rank", str(machine * self._num_ranks)]
            self._start(machine, [*first, *self._arguments])

    async def reports(self) -> AsyncIterator[Report]:
        """Yield the crew's reports, and a rank crew's last one if it ends."""
        while True:
            machine, report = await self._reports.get()
            if machine == 0 or report["report"] == "lost":
                yield report
            elif report["report"] == "ranks" and (refusal := _other_version(report)):
                yield {"report": "lost", "reason": refusal}
            elif report["report"] == "ranks":
                self._addresses[machine] = report["addresses"]
                if len(self._addresses) == len(self._machines):
                    addresses = ["--rank-addresses", self._all_addresses]
                    self._start(0, [*addresses, *self._arguments])

    @property
    def _all_addresses(self) -> str:
        """Addresses of all ranks; those of the first machine need none."""
        addresses = [""] * self._num_ranks
        for machine in self._machines:
            addresses += self._addresses[machine]
        return ",".join(addresses)

    def _start(self, machine: int, arguments: list[str]) -> None:
        crew = self._crews[machine] = self._placement.start(machine, CREW, arguments)
        self._readers.append(asyncio.create_task(self._read(machine, crew)))

    async def _read(self, machine: int, crew: CrewProcess) -> None:
        async for report in crew.reports():
            self._reports.put_nowait((machine, report))

    def send(self, line: str) -> None:
        """Send a command to the crew; nothing happens while it has not been started."""
        if 0 in self._crews:
            self._crews[0].send(line)

    async def close(self) -> None:
        """End all crews, whatever they do, and give their places back."""
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*(crew.stop() for crew in self._crews.values()))
        self._placement.remove()


def _other_version(report: Report) -> str:
    return other_version(f"a machine of its ranks, at {report['addresses'][0]},", report["version"])


# Crews in actors of Ray, on the machines of a placement group.

# Of a crew that is not needed any more, on a machine that may be gone.
STOP_TIMEOUT_S = 12.0


class RayPlacement:
    """A placement group: a bundle on each of one machine or several.

    Args:
        ray: the package.
        bundle: what is needed of each machine.
        target: the machine that is taken if it has room; None: any.

    Attributes:
        is_removed: it has no room any more.
    """

    def __init__(self, ray: ModuleType, bundle: Bundle, target: str | None = None) -> None:
        self._ray = ray
        self._bundle = bundle
        self._target = target
        self.is_removed = False
        strategy = "STRICT_PACK" if bundle.num_machines == 1 else "STRICT_SPREAD"
        bundles = [bundle.resources] * bundle.num_machines
        self._group = ray.util.placement_group(
            bundles, strategy=strategy, _soft_target_node_id=target
        )

    @property
    def machine(self) -> str:
        """The first of its machines, or the one that it is to be on; "": not known yet."""
        table = self._ray.util.placement_group_table(self._group)
        return table.get("bundles_to_node_id", {}).get(0) or self._target or ""

    async def wait(self) -> None:
        """Wait for machines that have room."""
        await self._group.ready()

    def start(self, machine: int, module: str, arguments: list[str]) -> "RayActor":
        """Start an actor with a crew on one of the machines, from 0 on."""
        strategies = self._ray.util.scheduling_strategies
        actor_class = self._ray.remote(crew_actor.CrewActor).options(
            num_cpus=self._bundle.cpus,
            num_gpus=self._bundle.gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=4,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(self._group, machine),
        )
        return RayActor(self._ray, actor_class.remote(programs.__file__, module, arguments))

    def remove(self) -> None:
        """Give the room back."""
        self.is_removed = True
        self._ray.util.remove_placement_group(self._group)


class RayActor:
    """A crew's actor.

    Args:
        ray: the package.
        actor: its handle.
    """

    def __init__(self, ray: ModuleType, actor: Any) -> None:
        self._ray = ray
        self._actor = actor

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
        """Send a command."""
        self._actor.send.remote(line)

    async def stop(self) -> None:
        """End the crew, whatever it does."""
        stopping = asyncio.ensure_future(self._stop())
        await asyncio.wait({stopping}, timeout=STOP_TIMEOUT_S)
        stopping.cancel()
        self._ray.kill(self._actor)

    async def _stop(self) -> None:
        with suppress(self._ray.exceptions.RayError):
            await self._actor.stop.remote()


def _first_line(error: Exception) -> str:
    """Return what Ray says of a death, without its advice and stacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


# Crews on the machines of a Ray cluster. Only this module imports ray.
#
# Ray places a replica (a placement group of a bundle for each of its machines) and says when a
# machine or an actor is gone. Everything else goes over this server's own sockets.

INSTALL = "ray"
CONNECT_TIMEOUT_S = 5.0


def import_ray() -> ModuleType:
    """Import ray. Raise ConfigError where it is not installed."""
    try:
        import ray
        import ray.util.scheduling_strategies  # is not imported with ray
    except ImportError:
        raise errors.ConfigError(
            f"--cluster ray needs the package ray: {programs.install_command(INSTALL)}"
        ) from None
    return ray  # type: ignore[no-any-return]


class RayCrews:
    """Starts crews on the machines of a cluster.

    Args:
        args: what a replica needs.
        tp: number of ranks of each replica.
        needs_gpus: each rank is on a GPU.

    Attributes:
        bundle: what each replica needs, whatever its role.

    Raises:
        ConfigError: there is no ray, or no cluster on this machine or at RAY_ADDRESS.
    """

    def __init__(self, args: ReplicaArgs, tp: int, needs_gpus: bool) -> None:
        self._ray = import_ray()
        self._tp = tp
        address = os.environ.get(ADDRESS_VARIABLE, "") or LOCAL_CLUSTER
        try:
            check_port(address)
            self._ray.init(address, logging_level=logging.WARNING, configure_logging=False)
        except Exception as error:
            raise errors.ConfigError(
                f"no Ray cluster answers at {ADDRESS_VARIABLE} {address}: {error}. Start one with"
                f" ray start --head, or set {ADDRESS_VARIABLE} to the address of another"
            ) from None
        self._ray.cloudpickle.register_pickle_by_value(crew_actor)
        gpus = [int(node["Resources"].get("GPU", 0)) for node in self._alive]
        num_machines = args.nnodes or (fewest_machines(tp, gpus) if needs_gpus else 1)
        num_gpus = tp // num_machines if needs_gpus else 0
        self.bundle = Bundle(args.replica_cpus, num_gpus, num_machines)
        self._args = args
        self._placements: list[tuple[RayPlacement, str]] = []  # with their roles

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

    def bundle_of(self, role: str) -> Bundle:
        """Return what a replica of a role needs."""
        return replace(self.bundle, resource=self._args.resource_of(role))

    def new_crew(self, arguments: list[str], role: str) -> PlacedCrew:
        """Return a crew that is not placed yet. The arguments are those of Crews."""
        bundle = self.bundle_of(role)
        target = self._choose_machine(bundle, role) if role else None
        placement = RayPlacement(self._ray, bundle, target)
        self._placements.append((placement, role))
        if self.bundle.num_machines == 1:
            return RayCrew(placement, arguments)
        return SpreadCrew(placement, arguments, self.bundle.num_machines, self._tp)

    def _choose_machine(self, bundle: Bundle, role: str) -> str | None:
        self._placements = [pair for pair in self._placements if not pair[0].is_removed]
        placed = [
            PlacedReplica(placement.machine, other, self.bundle_of(other))
            for placement, other in self._placements
        ]
        machines = [Machine(node["NodeID"], node["Resources"]) for node in self._alive]
        return choose_machine(machines, placed, bundle, role)

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
