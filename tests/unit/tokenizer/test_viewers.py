"""Subscriptions to the live feed at the frontend: renewal, expiry, limits, slow viewers."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from quadriga.errors import InvalidRequest, QueueFull
from quadriga.server.config.frontend_args import TenantArgs
from quadriga.server.tenants import hash_of_key
from quadriga.wire.client import Watch, gateway_address
from quadriga.wire.live import LiveServer
from quadriga.wire.sockets import Outbox
from quadriga.wire.to_scheduler import WatchSteps
from tokenizer_proc.deliver.clients import Clients
from tokenizer_proc.deliver.live import MAX_VIEWERS, ProcessUsage, Viewers, process_name
from tokenizer_proc.intake.tenants import RequestOwners


class Link:
    """A link to the scheduler, and the clients, of which one may be slow."""

    def __init__(self) -> None:
        self.sent: list[msgspec.Struct] = []
        self.offered: list[tuple[bytes, bytes]] = []
        self.slow = b""
        self.num_refused = 0
        self.arrived = asyncio.Event()

    def send(self, message: msgspec.Struct) -> None:
        self.sent.append(message)

    def offer(self, client: bytes, frame: bytes) -> bool:
        self.offered.append((client, frame))
        self.arrived.set()
        return client != self.slow


def make(
    clock: Callable[[], float] = time.monotonic, num_replicas: int = 1
) -> tuple[Viewers, Link]:
    link, usage = Link(), ProcessUsage(os.getpid())
    outbox, clients = cast(Outbox, link), cast(Clients, link)
    return Viewers(outbox, clients, usage, lambda: 3, num_replicas, clock), link


def watch(seconds: float = 10.0, replica: int = 0) -> Watch:
    return Watch(1, "watch-1", seconds, replica)


async def test_the_scheduler_learns_of_new_viewers_and_of_the_end_of_the_last_one() -> None:
    viewers, link = make()
    for client, seconds in ((b"a", 10.0), (b"a", 10.0), (b"b", 5.0), (b"a", 0.0), (b"b", 0.0)):
        viewers.watch(client, watch(seconds))
    assert link.sent == [
        WatchSteps(10.0, is_new=True),
        WatchSteps(10.0, is_new=False),
        WatchSteps(5.0, is_new=True),
        WatchSteps(0.0),
    ]


async def test_a_frame_goes_to_every_viewer_whose_time_has_not_passed() -> None:
    now = 100.0
    viewers, link = make(lambda: now)
    viewers.watch(b"a", watch(5.0))
    viewers.watch(b"b", watch(20.0))
    viewers.show(b"1")
    now += 10.0
    viewers.show(b"2")
    frames = [item for item in link.offered if item[1] in (b"1", b"2")]
    assert frames == [(b"a", b"1"), (b"b", b"1"), (b"b", b"2")]


async def test_the_processes_are_reported_with_what_slow_viewers_have_lost() -> None:
    viewers, link = make()
    link.slow = b"slow"
    viewers.watch(b"slow", watch())
    viewers.show(b"lost")
    link.arrived.clear()
    while len(link.offered) < 2:
        link.arrived.clear()
        await link.arrived.wait()
    report = msgspec.msgpack.decode(link.offered[1][1], type=LiveServer)
    assert (report.dropped, report.viewers, report.open_requests) == (1, 1, 3)
    assert os.getpid() in [process.pid for process in report.processes]


async def test_a_client_that_watches_a_replica_gets_the_frames_of_that_one() -> None:
    viewers, link = make(num_replicas=2)
    for client, replica in ((b"a", 0), (b"a", 1), (b"b", 1)):
        viewers.watch(client, watch(replica=replica))
    viewers.show(b"0", 0)
    viewers.show(b"1", 1)
    assert sorted(link.offered) == [(b"a", b"0"), (b"a", b"1"), (b"b", b"1")]
    link.sent.clear()
    viewers.forget(b"a")
    assert link.sent == [WatchSteps(0.0, replica=0)]


@pytest.mark.parametrize(
    ("replica", "num_replicas", "there"),
    [(1, 1, "the only one is 0"), (2, 2, "0 to 1 are there"), (-1, 2, "0 to 1 are there")],
)
async def test_a_replica_that_does_not_exist_is_refused(
    replica: int, num_replicas: int, there: str
) -> None:
    viewers, link = make(num_replicas=num_replicas)
    with pytest.raises(InvalidRequest, match=f"replica is {replica}: {there}"):
        viewers.watch(b"a", watch(replica=replica))
    assert not link.sent


@pytest.mark.parametrize("seconds", [-1.0, 31.0, float("nan"), float("inf")])
async def test_a_time_out_of_range_is_refused_with_the_range(seconds: float) -> None:
    viewers, link = make()
    with pytest.raises(InvalidRequest, match="0 to 30"):
        viewers.watch(b"a", watch(seconds))
    assert not link.sent


async def test_a_viewer_too_many_is_refused() -> None:
    viewers, _ = make()
    for number in range(MAX_VIEWERS):
        viewers.watch(b"%d" % number, watch())
    with pytest.raises(QueueFull, match=f"{MAX_VIEWERS} clients watch"):
        viewers.watch(b"more", watch())
    viewers.forget(b"0")
    viewers.watch(b"more", watch())


def test_with_tenants_only_the_gateway_may_watch(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"- name: alice\n  key: {hash_of_key(b'hers')}\n")
    owners = RequestOwners(TenantArgs(keys=str(file)))
    owners.check_operator(gateway_address().bytes, "it shows")
    with pytest.raises(InvalidRequest, match="ask the web gateway"):
        owners.check_operator(b"0123456789abcdef", "it shows")
    RequestOwners(TenantArgs()).check_operator(b"0123456789abcdef", "it shows")


@pytest.mark.parametrize(
    ("command", "is_child", "name"),
    [
        (["python", "/x/programs.py", "worker_proc", "--run-dir"], True, "worker_proc"),
        (["python", "/x/programs.py", "tokenizer_proc"], False, "tokenizer_proc (child)"),
        (["/usr/bin/thing", "--flag"], True, "thing"),
        ([], True, "?"),
    ],
)
def test_a_process_is_named_by_its_program(command: list[str], is_child: bool, name: str) -> None:
    assert process_name(command, is_child) == name


def test_a_process_that_ends_is_no_longer_reported() -> None:
    usage = ProcessUsage(os.getpid())
    child: Any = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in [process.pid for process in usage.read()]
    finally:
        child.communicate(b"\n", timeout=30)
    assert child.pid not in [process.pid for process in usage.read()]
