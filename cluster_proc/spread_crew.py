"""A replica whose ranks are on several machines.

The first machine has a crew (crew.py) with scheduler, detokenizer and rank 0, as ever; each further
one has a rank crew (rank_crew.py). The crew is started with the addresses that the rank crews have
reported. The end of any of them is that of the replica.
"""

import asyncio
from collections.abc import AsyncIterator

from cluster_proc.contract import CrewProcess, Placement, Report
from quadriga import __version__

CREW, RANK_CREW = "cluster_proc.crew", "cluster_proc.rank_crew"


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
            self._start(machine, RANK_CREW, [*first, *self._arguments])

    async def reports(self) -> AsyncIterator[Report]:
        """Yield the crew's reports, and a rank crew's last one if it ends."""
        while True:
            machine, report = await self._reports.get()
            if machine == 0 or report["report"] == "lost":
                yield report
            elif report["report"] == "ranks" and report["version"] != __version__:
                yield {"report": "lost", "reason": _other_version(report)}
            elif report["report"] == "ranks":
                self._addresses[machine] = report["addresses"]
                if len(self._addresses) == len(self._machines):
                    self._start(
                        0, CREW, ["--rank-addresses", self._all_addresses, *self._arguments]
                    )

    @property
    def _all_addresses(self) -> str:
        """Addresses of all ranks; those of the first machine need none."""
        addresses = [""] * self._num_ranks
        for machine in self._machines:
            addresses += self._addresses[machine]
        return ",".join(addresses)

    def _start(self, machine: int, module: str, arguments: list[str]) -> None:
        crew = self._crews[machine] = self._placement.start(machine, module, arguments)
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
    return (
        f"a machine of its ranks, at {report['addresses'][0]}, runs quadriga {report['version']},"
        f" and this one {__version__}: install the same version on all machines"
    )
