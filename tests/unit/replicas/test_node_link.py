"""The frontend notices a broken link before it receives what a later connection brings."""

import asyncio
from pathlib import Path

import pytest
import zmq

from quadriga import __version__
from quadriga.clock import Countdown
from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.curve import make_server_keys
from quadriga.wire.links import NodeLinks, ReservedPort
from quadriga.wire.sockets import Inbox, Outbox, bind_frames
from quadriga.wire.to_scheduler import Drain, LinkRestored, SchedulerMessage
from tests.unit.simulation import World
from tokenizer_proc.replicas.links import NodeLink

TIMEOUT_S = 20.0


async def until(events: list[str], wanted: list[str]) -> None:
    countdown = Countdown(TIMEOUT_S)
    while events != wanted:
        assert countdown.left(), events
        await asyncio.sleep(0.001)


async def test_a_loss_of_results_comes_before_the_messages_of_the_next_connection() -> None:
    events: list[str] = []
    ports = [ReservedPort("127.0.0.1") for _ in range(2)]
    links = NodeLinks(*(port.address for port in ports))
    link = NodeLink(
        links, lambda frames: events.append(frames[0].decode()), lambda: events.append("lost")
    )
    first = Outbox(links.delivery, links.prepare_connect)
    first.send_frames(b"1")
    await until(events, ["1"])
    first.close()
    # The event loop does not run until both wait to be received.
    assert link._watch._port.socket.poll(int(1000 * TIMEOUT_S))
    second = Outbox(links.delivery, links.prepare_connect)
    second.send_frames(b"2")
    assert link._port.socket.poll(int(1000 * TIMEOUT_S))
    link._port.receive()
    assert events == ["1", "lost", "2"]
    second.close()
    link.outbox.close()
    link.close()
    for port in ports:
        port.close()


async def test_a_refused_replica_is_named_once_and_blocks_no_send(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_server_keys(tmp_path)
    ports = [ReservedPort("127.0.0.1") for _ in range(2)]
    addresses = [port.address for port in ports]
    losses: list[str] = []
    links = NodeLinks(addresses[0], addresses[1], str(tmp_path))
    link = NodeLink(links, lambda _: None, lambda: losses.append("lost"))
    link.outbox.send(Drain())
    without_keys = bind_frames(addresses[0])
    await until(losses, ["lost"])
    countdown = Countdown(TIMEOUT_S)
    while link.outbox.socket.poll(0, zmq.POLLOUT):  # until it has given up the connection
        assert countdown.left()
        await asyncio.sleep(0.001)
    link.outbox.send(Drain())
    link.outbox.send(Drain())
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert addresses[0] in record.getMessage() and "--curve-dir" in record.getMessage()
    link.outbox.close()
    link.close()
    without_keys.close(linger=0)
    for port in ports:
        port.close()


@pytest.mark.parametrize("renews", [False, True])
async def test_a_loss_of_the_scheduler_is_noticed_also_after_a_renewal(renews: bool) -> None:
    events: list[str] = []
    ports = [ReservedPort("127.0.0.1") for _ in range(2)]
    links = NodeLinks(*(port.address for port in ports))
    link = NodeLink(links, lambda _: None, lambda: events.append("lost"))
    if renews:
        link.outbox.renew()
    inbox = Inbox[Drain](links.scheduler, Drain, links.prepare_bind)
    link.outbox.send(Drain())
    assert inbox.socket.poll(int(1000 * TIMEOUT_S))
    inbox.socket.close(linger=0)
    await until(events, ["lost"])
    bind_frames(links.scheduler).close(linger=0)
    link.outbox.close()
    link.close()
    for port in ports:
        port.close()


@pytest.mark.parametrize("version", [__version__, "9.9.9"])
async def test_a_scheduler_refuses_the_frontend_of_another_version_by_name(version: str) -> None:
    ports = [ReservedPort("127.0.0.1") for _ in range(2)]
    links = NodeLinks(*(port.address for port in ports))
    inbox = Inbox[SchedulerMessage](links.scheduler, SchedulerMessage, links.prepare_bind)
    link = NodeLink(links, lambda _: None, lambda: None)
    link.outbox.send(LinkRestored(version))
    message = inbox.receive()
    world = World(SchedulerArgs())
    if version == __version__:
        world.send(message)
    else:
        with pytest.raises(ConfigError, match=r"runs quadriga 9\.9\.9, .* install the same"):
            world.send(message)
    inbox.socket.close(linger=0)
    link.outbox.close()
    link.close()
    for port in ports:
        port.close()
