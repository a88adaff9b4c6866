"""The driver keeps the replicas of a cluster, here one without machines."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster_proc.crews import Report
from cluster_proc.main import Driver, check_keys
from quadriga import __version__
from quadriga.clock import Countdown
from quadriga.errors import ConfigError, ServerFailed
from quadriga.server.config.frontend_args import FrontendArgs
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.processes.child import Child
from quadriga.server.processes.control_channel import Command
from quadriga.wire.links import Endpoints

TIMEOUT_S = 20.0


class FakeControl:
    """The channel to the launcher."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self._commands: list[tuple[Command, str]] = []
        self._on_command: Callable[[], None] = lambda: None

    def answer_in_loop(self) -> None: ...

    def report(self, kind: str, **values: Any) -> None:
        self.reports.append({"report": kind, **values})

    def take(self, state: str) -> list[tuple[int, str]]:
        return [(r["replica"], r["argument"]) for r in self.reports if r.get("state") == state]


@dataclass
class FakeCrew:
    """A crew whose reports a test makes."""

    arguments: list[str]
    has_place: asyncio.Event
    role: str = ""
    queue: "asyncio.Queue[Report]" = field(default_factory=asyncio.Queue)
    sent: list[str] = field(default_factory=list)
    is_closed: bool = False

    async def place(self) -> None:
        await self.has_place.wait()

    async def reports(self) -> AsyncIterator[Report]:
        while True:
            yield await self.queue.get()

    def send(self, line: str) -> None:
        self.sent.append(line)

    async def close(self) -> None:
        self.is_closed = True

    @property
    def delivery(self) -> str:
        return self.arguments[self.arguments.index("--delivery-address") + 1]

    def join(self, version: str = __version__, pages: str = "") -> None:
        self.queue.put_nowait(
            {"report": "joined", "address": "tcp://127.0.0.1:9", "version": version,
             "info": {"dtype": "float32"}, "pages": pages}
        )  # fmt: skip


class FakeCrews:
    host = "127.0.0.1"
    machines = ("127.0.0.1: 2 CPU, 0 GPU",)

    def __init__(self) -> None:
        self.crews: list[FakeCrew] = []
        self.has_place = asyncio.Event()
        self.has_place.set()
        self.is_closed = False

    def new_crew(self, arguments: list[str], role: str) -> FakeCrew:
        self.crews.append(FakeCrew(arguments, self.has_place, role))
        return self.crews[-1]

    def bundle_of(self, role: str) -> str:
        return f"a machine with 1 CPU{role and f', {role}'} free"

    def close(self) -> None:
        self.is_closed = True


class World:
    """A driver of two replicas."""

    def __init__(self, **flags: Any) -> None:
        self.control, self.crews = FakeControl(), FakeCrews()
        config = ServerConfig().replace(cluster="ray", dp=2, **flags)
        child = Child(config, Endpoints(Path("/nowhere")), self.control)  # type: ignore[arg-type]
        self.driver = Driver(child, self.crews)  # type: ignore[arg-type]
        self.task = asyncio.create_task(self.driver.keep_all())

    async def until(self, is_true: Callable[[], bool]) -> None:
        countdown = Countdown(TIMEOUT_S)
        while not is_true():
            assert not self.task.done(), self.task
            assert countdown.left()
            await asyncio.sleep(0.001)

    async def serve(self) -> None:
        await self.until(lambda: len(self.crews.crews) == 2)
        for crew in self.crews.crews:
            crew.join()
        await self.until(lambda: self.control.reports[-1:] != [] and self.is_ready)

    @property
    def is_ready(self) -> bool:
        return any(report["report"] == "ready" for report in self.control.reports)

    async def stop(self) -> None:
        self.driver.obey(Command.DRAIN, "")
        for crew in self.crews.crews:
            crew.queue.put_nowait({"report": "left"})
        await asyncio.wait_for(self.task, TIMEOUT_S)


async def test_it_is_ready_when_all_replicas_have_joined_and_ends_when_all_have_left() -> None:
    world = World()
    await world.until(lambda: len(world.crews.crews) == 2)
    first, second = world.crews.crews
    first.join()
    await world.until(lambda: len(world.control.take("joined")) == 1)
    assert not world.is_ready
    second.join()
    await world.until(lambda: world.is_ready)
    addresses = [f"tcp://127.0.0.1:9 {crew.delivery}" for crew in (first, second)]
    assert world.control.take("joined") == list(enumerate(addresses))
    assert first.delivery != second.delivery
    await world.stop()
    assert first.is_closed and second.is_closed and world.crews.is_closed


async def test_a_lost_replica_is_placed_again_with_another_address_of_results() -> None:
    world = World()
    await world.serve()
    lost = world.crews.crews[1]
    lost.queue.put_nowait({"report": "lost", "reason": "its machine is gone"})
    await world.until(lambda: len(world.crews.crews) == 3)
    assert world.control.take("lost") == [(1, "its machine is gone")]
    again = world.crews.crews[2]
    assert lost.is_closed and again.arguments[:2] == ["--replica", "1"]
    again.join()
    await world.until(lambda: len(world.control.take("joined")) == 3)
    assert [report["report"] for report in world.control.reports].count("ready") == 1
    await world.stop()


async def test_a_drain_gives_up_a_replica_that_waits_for_its_place() -> None:
    world = World()
    await world.serve()
    world.crews.has_place.clear()
    world.crews.crews[0].queue.put_nowait({"report": "lost", "reason": "x"})
    await world.until(lambda: len(world.crews.crews) == 3)
    await world.stop()
    assert world.crews.crews[2].is_closed


async def test_commands_of_the_launcher_reach_the_crews_that_they_concern() -> None:
    world = World()
    await world.serve()
    world.driver.obey(Command.RELOAD, "1")
    world.driver.obey(Command.ABORT, "it is late")
    assert [crew.sent for crew in world.crews.crews] == [
        ["abort it is late"], ["reload", "abort it is late"],
    ]  # fmt: skip
    world.crews.crews[0].queue.put_nowait({"report": "died", "process": "detok_proc/0"})
    await world.until(lambda: world.control.take("died") == [(0, "detok_proc/0")])
    await world.stop()


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"report": "lost", "reason": "no such model"}, "replica 0 cannot start: no such model"),
        (
            {"report": "joined", "address": "a", "version": "0.0.1", "info": {}},
            "replica 0 cannot start: the replica at a runs quadriga 0.0.1",
        ),
    ],
)
async def test_a_replica_that_cannot_start_ends_the_start(report: Report, message: str) -> None:
    world = World()
    await world.until(lambda: len(world.crews.crews) == 2)
    world.crews.crews[0].queue.put_nowait(report)
    with pytest.raises(ServerFailed, match=message):
        await asyncio.wait_for(world.task, TIMEOUT_S)
    assert all(crew.is_closed for crew in world.crews.crews)


async def test_a_machine_that_cannot_replace_a_lost_one_is_named_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    await world.serve()
    world.crews.crews[1].queue.put_nowait({"report": "lost", "reason": "x"})
    await world.until(lambda: len(world.crews.crews) == 3)
    world.crews.crews[2].join("0.0.1")
    await world.until(lambda: "replica 1 cannot start again: the replica at" in caplog.text)
    assert "tcp://127.0.0.1:9 runs quadriga 0.0.1, and this machine" in caplog.text
    assert world.crews.crews[2].is_closed and not world.crews.crews[0].is_closed
    world.driver.obey(Command.DRAIN, "")
    world.crews.crews[0].queue.put_nowait({"report": "left"})
    await asyncio.wait_for(world.task, TIMEOUT_S)


async def test_replicas_are_added_under_a_load_and_leave_without_it() -> None:
    flags = {"target_ongoing_requests": 4, "scale_up_after": 0.0, "scale_down_after": 0.0}
    world = World(max_replicas=3, **flags)
    await world.serve()
    world.driver.obey(Command.LOAD, "99")
    await world.until(lambda: len(world.crews.crews) == 3)
    third = world.crews.crews[2]
    assert third.arguments[:2] == ["--replica", "2"]
    third.join()
    await world.until(lambda: len(world.control.take("joined")) == 3)
    world.driver.obey(Command.LOAD, "6")
    await world.until(lambda: world.control.take("leaving") == [(2, "")])
    assert not third.is_closed
    for _ in range(2):  # the answer comes again where the frontend was restarted
        world.driver.obey(Command.REMOVE, "2")
        await world.until(lambda: third.is_closed)
    await world.until(lambda: world.control.take("left") == [(2, "")])
    assert world.control.take("lost") == []
    await world.stop()


async def test_a_replica_that_has_no_place_yet_is_given_up_when_the_load_is_gone() -> None:
    flags = {"target_ongoing_requests": 4, "scale_up_after": 0.0, "scale_down_after": 0.0}
    world = World(max_replicas=3, min_replicas=2, **flags)
    await world.serve()
    world.crews.has_place.clear()
    world.driver.obey(Command.LOAD, "99")
    await world.until(lambda: len(world.crews.crews) == 3)
    world.driver.obey(Command.LOAD, "0")
    await world.until(lambda: world.crews.crews[2].is_closed)
    await world.until(lambda: world.control.take("left") == [(2, "")])
    assert world.control.take("leaving") == []
    await world.stop()


async def test_a_replica_that_is_lost_while_it_leaves_does_not_come_back() -> None:
    flags = {"target_ongoing_requests": 4, "scale_up_after": 0.0, "scale_down_after": 0.0}
    world = World(max_replicas=2, **flags)
    await world.serve()
    world.driver.obey(Command.LOAD, "0")
    await world.until(lambda: world.control.take("leaving") == [(1, "")])
    world.crews.crews[1].queue.put_nowait({"report": "lost", "reason": "x"})
    await world.until(lambda: world.control.take("left") == [(1, "")])
    assert world.control.take("lost") == [(1, "x")]
    assert len(world.crews.crews) == 2
    await world.stop()


def test_links_that_other_machines_reach_need_keys() -> None:
    with pytest.raises(ConfigError, match=r"10\.0\.0\.7.*quadriga keygen DIR"):
        check_keys(ServerConfig(), "10.0.0.7")
    check_keys(ServerConfig(), "127.0.0.1")
    check_keys(ServerConfig(frontend=FrontendArgs(insecure=True)), "10.0.0.7")
    check_keys(ServerConfig(frontend=FrontendArgs(curve_dir="keys")), "10.0.0.7")


async def test_every_replica_learns_where_the_others_give_pages_as_they_come_and_go() -> None:
    world = World(prefill_replicas=1)
    await world.until(lambda: len(world.crews.crews) == 2)
    prefill, decode = world.crews.crews
    assert [crew.role for crew in world.crews.crews] == ["prefill", "decode"]
    decode.join()
    await world.until(lambda: decode.sent == ["sources 1 "])
    prefill.join(pages="tcp://127.0.0.1:8")
    await world.until(lambda: len(prefill.sent) == 2 and world.is_ready)
    assert decode.sent[-1] == prefill.sent[-1] == "sources 2 0=tcp://127.0.0.1:8"
    prefill.queue.put_nowait({"report": "lost", "reason": "its machine is gone"})
    await world.until(lambda: len(world.crews.crews) == 3)
    assert decode.sent[-1] == "sources 3 "
    assert world.crews.crews[2].role == "prefill"
    world.crews.crews[2].join(pages="tcp://127.0.0.1:7")
    await world.until(lambda: decode.sent[-1] == "sources 4 0=tcp://127.0.0.1:7")
    await world.stop()
