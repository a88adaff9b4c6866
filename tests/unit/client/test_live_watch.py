"""AsyncClient.watch: one subscription that is renewed, shared, ended, refused and lost."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import msgspec
import pytest

from quadriga.client.async_client import AsyncClient
from quadriga.client.live import (
    MAX_BEHIND,
    RENEW_INTERVAL_S,
    WATCH_S,
    LiveSubscription,
    LiveSubscriptions,
)
from quadriga.errors import QueueFull, ServerUnreachable
from quadriga.wire.client import RefusalInfo, Refused, Watch
from quadriga.wire.live import LiveServer, RowKind
from tests.unit import virtual_time
from tests.unit.live_messages import make_step


class Sent:
    """What a subscription has sent."""

    def __init__(self) -> None:
        self.messages: list[msgspec.Struct] = []
        self.subscription = LiveSubscription(self.send)

    def send(self, message: msgspec.Struct) -> bool:
        self.messages.append(message)
        return True

    @property
    def seconds(self) -> list[float]:
        return [message.seconds for message in self.messages if isinstance(message, Watch)]


def server(number: int) -> LiveServer:
    return LiveServer(float(number), [], 0, 0, 1, 0)


def play(test: Callable[[Sent], Awaitable[None]]) -> None:
    async def run() -> None:
        await test(Sent())

    virtual_time.run(asyncio.wait_for(run(), 1000))


def test_a_subscription_is_renewed_while_it_is_read_and_ended_then() -> None:
    async def test(sent: Sent) -> None:
        with sent.subscription.iterator():
            await asyncio.sleep(2.5 * RENEW_INTERVAL_S)
        await asyncio.sleep(5 * RENEW_INTERVAL_S)
        assert sent.seconds == [WATCH_S, WATCH_S, WATCH_S, 0.0]

    play(test)


def test_several_readers_share_a_subscription() -> None:
    async def test(sent: Sent) -> None:
        with sent.subscription.iterator() as first:
            await asyncio.sleep(0)
            with sent.subscription.iterator() as second:
                sent.subscription.on_message(server(1))
                assert await first.next() == await second.next() == server(1)
            assert sent.seconds == [WATCH_S]
        assert sent.seconds == [WATCH_S, 0.0]

    play(test)


def test_a_reader_that_is_too_slow_loses_the_oldest_messages() -> None:
    async def test(sent: Sent) -> None:
        with sent.subscription.iterator() as iterator:
            for number in range(MAX_BEHIND + 5):
                sent.subscription.on_message(server(number))
            assert await iterator.next() == server(5)

    play(test)


def test_a_refusal_is_raised_to_every_reader_and_nothing_is_renewed() -> None:
    async def test(sent: Sent) -> None:
        with sent.subscription.iterator() as iterator:
            await asyncio.sleep(0)
            (first,) = sent.messages
            assert isinstance(first, Watch)
            sent.subscription.on_refused(Refused("another", RefusalInfo("queue_full", "no")))
            sent.subscription.on_refused(Refused(first.request_id, RefusalInfo("queue_full", "no")))
            with pytest.raises(QueueFull, match="no"):
                await iterator.next()
            await asyncio.sleep(5 * RENEW_INTERVAL_S)
        assert sent.seconds == [WATCH_S]

    play(test)


def test_a_reader_of_a_replica_gets_its_steps_and_every_reader_the_processes() -> None:
    async def test(sent: Sent) -> None:
        subscriptions = LiveSubscriptions(sent.send)
        step = msgspec.structs.replace(make_step(0, {1: RowKind.DECODE}), replica=1)
        with subscriptions.iterator(0) as first, subscriptions.iterator(1) as second:
            await asyncio.sleep(0)
            subscriptions.on_message(step)
            subscriptions.on_message(server(1))
            assert await first.next() == server(1)
            assert [await second.next(), await second.next()] == [step, server(1)]
        watched = [(m.replica, m.seconds) for m in sent.messages if isinstance(m, Watch)]
        assert sorted(watched) == [(0, 0.0), (0, WATCH_S), (1, 0.0), (1, WATCH_S)]

    play(test)


async def test_without_a_server_watching_raises_within_the_time_of_the_connection() -> None:
    client = AsyncClient("ipc:///nonexistent/socket", connect_timeout=0.05)
    with pytest.raises(ServerUnreachable):
        async with aclosing(client.watch()) as messages:
            await anext(messages)
    await client.close()
