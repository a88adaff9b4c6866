"""The frontend notices a broken link before it receives what a later connection brings."""

import asyncio

import pytest

from quadriga.clock import Countdown
from quadriga.wire.messages.to_scheduler import Drain
from quadriga.wire.node_links import NodeLinks, ReservedPort
from quadriga.wire.sockets import Inbox, Outbox, bind_frames
from tokenizer_proc.replicas.node_link import NodeLink

TIMEOUT_S = 20.0


async def until(events: list[str], wanted: list[str]) -> None:
    countdown = Countdown(TIMEOUT_S)
    while events != wanted:
        assert countdown.left(), events
        await asyncio.sleep(0.001)


def test_a_loss_of_results_comes_before_the_messages_of_the_next_connection() -> None:
    async def run() -> None:
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
        second = Outbox(links.delivery, links.prepare_connect)
        second.send_frames(b"2")
        await until(events, ["1", "lost", "2"])
        second.close()
        link.outbox.close()
        link.close()
        for port in ports:
            port.close()

    asyncio.run(run())


@pytest.mark.parametrize("renews", [False, True])
def test_a_loss_of_the_scheduler_is_noticed_also_after_a_renewal(renews: bool) -> None:
    async def run() -> None:
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

    asyncio.run(run())
