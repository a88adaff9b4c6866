"""A replica on several machines: which they are, how its crews start, and how it ends."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster_proc.crews import (
    CREW,
    Bundle,
    Machine,
    PlacedReplica,
    Report,
    SpreadCrew,
    choose_machine,
    fewest_machines,
)
from quadriga import __version__

TIMEOUT_S = 20.0


class FakeProcess:
    """A crew whose reports a test makes."""

    def __init__(self, module: str, arguments: list[str]) -> None:
        self.module, self.arguments = module, arguments
        self.queue: asyncio.Queue[Report] = asyncio.Queue()
        self.sent: list[str] = []
        self.is_stopped = False

    async def reports(self) -> AsyncIterator[Report]:
        while True:
            yield await self.queue.get()

    def send(self, line: str) -> None:
        self.sent.append(line)

    async def stop(self) -> None:
        self.is_stopped = True


class FakePlacement:
    def __init__(self) -> None:
        self.started: dict[int, FakeProcess] = {}
        self.is_removed = False

    async def wait(self) -> None: ...

    def start(self, machine: int, module: str, arguments: list[str]) -> FakeProcess:
        self.started[machine] = FakeProcess(module, arguments)
        return self.started[machine]

    def remove(self) -> None:
        self.is_removed = True


def report_ranks(crew: FakeProcess, *addresses: str, version: str = __version__) -> None:
    crew.queue.put_nowait({"report": "ranks", "addresses": list(addresses), "version": version})


async def placed(placement: FakePlacement) -> SpreadCrew:
    """Return a replica of six ranks on three machines."""
    crew = SpreadCrew(placement, ["--replica", "4"], num_machines=3, tp=6)
    await crew.place()
    return crew


async def test_the_crew_starts_with_the_addresses_that_the_rank_crews_have_reported() -> None:
    placement = FakePlacement()
    crew = await placed(placement)
    assert {n: (one.module, one.arguments) for n, one in placement.started.items()} == {
        1: (CREW, ["--first-rank", "2", "--replica", "4"]),
        2: (CREW, ["--first-rank", "4", "--replica", "4"]),
    }
    crew.send("reload")  # too early: nothing to reload
    reports = crew.reports()
    first = asyncio.ensure_future(anext(reports))
    report_ranks(placement.started[2], "tcp://c:5", "tcp://c:6")
    report_ranks(placement.started[1], "tcp://b:3", "tcp://b:4")
    while 0 not in placement.started:
        await asyncio.sleep(0)
    main = placement.started[0]
    addresses = ",,tcp://b:3,tcp://b:4,tcp://c:5,tcp://c:6"
    assert main.module == CREW
    assert main.arguments == ["--rank-addresses", addresses, "--replica", "4"]
    main.queue.put_nowait({"report": "joined"})
    assert await asyncio.wait_for(first, TIMEOUT_S) == {"report": "joined"}
    crew.send("reload")
    assert main.sent == ["reload"]
    await crew.close()
    assert all(one.is_stopped for one in placement.started.values())
    assert placement.is_removed


@pytest.mark.parametrize("machine", [0, 2])
async def test_the_end_of_a_crew_is_that_of_the_replica(machine: int) -> None:
    placement = FakePlacement()
    crew = await placed(placement)
    lost = asyncio.ensure_future(anext(crew.reports()))
    for number in (1, 2):
        report_ranks(placement.started[number], "tcp://a:1", "tcp://a:2")
    while 0 not in placement.started:
        await asyncio.sleep(0)
    placement.started[machine].queue.put_nowait({"report": "lost", "reason": "power"})
    assert await asyncio.wait_for(lost, TIMEOUT_S) == {"report": "lost", "reason": "power"}
    await crew.close()


async def test_a_machine_of_the_ranks_with_another_version_is_named() -> None:
    placement = FakePlacement()
    crew = await placed(placement)
    report_ranks(placement.started[1], "tcp://10.0.0.8:1", version="0.0.1")
    lost = await asyncio.wait_for(anext(crew.reports()), TIMEOUT_S)
    assert lost["report"] == "lost"
    assert lost["reason"].startswith("a machine of its ranks, at tcp://10.0.0.8:1, runs")
    await crew.close()


@pytest.mark.parametrize(
    ("tp", "gpus", "expected"),
    [
        (4, [8, 8], 1),
        (4, [2, 2], 2),
        (4, [0, 3, 2, 1], 2),
        (4, [1, 1, 1, 1], 4),
        (8, [4, 2, 4], 2),
        (6, [2, 2, 2], 3),
        (4, [2, 1, 1], 1),  # it waits for further machines
        (2, [], 1),
    ],
)
def test_ranks_are_on_as_few_machines_as_have_their_gpus(
    tp: int, gpus: list[int], expected: int
) -> None:
    assert fewest_machines(tp, gpus) == expected


def test_a_message_says_what_is_wanted() -> None:
    assert str(Bundle(1.5, 0)) == "a machine with 1.5 CPU free"
    assert str(Bundle(1, 2, 3)) == "3 machines with 1 CPU, 2 GPU free on each"
    assert str(Bundle(1, 1, resource="h100")) == "a machine with 1 CPU, 1 GPU, h100 free"


def place(machines: dict[str, dict[str, float]], roles: str, **resources: str) -> list[str]:
    """Return the machine of each replica, placed in turn. roles: `p` or `d` for each."""
    placed: list[PlacedReplica] = []
    for role in roles:
        bundle = Bundle(1, 0, resource=resources.get(role, ""))
        found = [Machine(name, resources) for name, resources in machines.items()]
        placed.append(
            PlacedReplica(choose_machine(found, placed, bundle, role) or "", role, bundle)
        )
    return [one.machine for one in placed]


def test_the_replicas_of_a_role_are_spread_over_the_machines() -> None:
    two = {"a": {"CPU": 2.0}, "b": {"CPU": 2.0}}
    assert sorted(place(two, "ppdd")[:2]) == sorted(place(two, "ppdd")[2:]) == ["a", "b"]
    assert place({"a": {"CPU": 1.0}, "b": {"CPU": 4.0}}, "pddd") == ["b", "a", "b", "b"]
    three = {name: {"CPU": 4.0} for name in "abc"}
    assert [sorted(place(three, "pppddd")[at : at + 3]) for at in (0, 3)] == [["a", "b", "c"]] * 2
    assert place({"a": {"CPU": 1.0}}, "pd") == ["a", ""], "Ray finds a place later"


def test_a_role_is_on_the_machines_with_its_resource() -> None:
    machines = {"a": {"CPU": 4.0, "h100": 1.0}, "b": {"CPU": 4.0}, "c": {"CPU": 4.0, "l40s": 1.0}}
    assert place(machines, "ppdd", p="h100", d="l40s") == ["a", "a", "c", "c"]
    assert place(machines, "p", p="tpu") == [""]
