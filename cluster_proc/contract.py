"""What the driver needs of a cluster."""

from collections.abc import AsyncIterator
from typing import Any, Protocol

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

    @property
    def bundle(self) -> object:
        """What each replica needs, for messages: `a machine with 1 CPU free`."""

    @property
    def host(self) -> str:
        """Address of this machine in the cluster."""

    @property
    def machines(self) -> list[str]:
        """What each machine of the cluster has in all, for messages."""

    def new_crew(self, arguments: list[str]) -> PlacedCrew:
        """Return a crew that is not placed yet. arguments: see crew.py."""

    def close(self) -> None:
        """End all crews of this driver."""
