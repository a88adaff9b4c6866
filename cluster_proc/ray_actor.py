"""Crews in actors of Ray, on the machines of a placement group."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from types import ModuleType
from typing import Any

from cluster_proc import crew_actor
from cluster_proc.bundle import Bundle
from cluster_proc.contract import Report
from quadriga import programs

# Of a crew that is not needed any more, on a machine that may be gone.
STOP_TIMEOUT_S = 12.0


class RayPlacement:
    """A placement group: a bundle on each of one machine or several.

    Args:
        ray: the package.
        bundle: what is needed of each machine.
    """

    def __init__(self, ray: ModuleType, bundle: Bundle) -> None:
        self._ray = ray
        self._bundle = bundle
        strategy = "STRICT_PACK" if bundle.num_machines == 1 else "STRICT_SPREAD"
        bundles = [bundle.resources] * bundle.num_machines
        self._group = ray.util.placement_group(bundles, strategy=strategy)

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
