"""What the driver needs of a cluster."""

from collections.abc import AsyncIterator
from typing import Any, Protocol

# A report of a crew, as crew.py lists them.
Report = dict[str, Any]


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
        """What each replica needs, for messages."""

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
