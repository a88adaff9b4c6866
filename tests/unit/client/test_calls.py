"""How calls of a client end while its server is away, lost or full, and when the client closes."""

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from quadriga.client.async_client import AsyncClient
from quadriga.client.request_handle import RequestHandle
from quadriga.errors import (
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    RequestAborted,
    ServerStopping,
    ServerUnreachable,
)
from quadriga.sampling.params import SamplingParams
from quadriga.wire.client import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Accepted,
    ErrorInfo,
    Pong,
    ServerGone,
)
from tests.unit import virtual_time
from tests.unit.scripted_network import Network
from tests.unit.scripted_server import SILENT, Server, letter

CONNECT_S, RECONNECT_S = 5.0, 8.0
SHORT_S = 0.3
"""In which a server that is there and calm answers."""


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network(random.Random(1))
    network.install(monkeypatch)
    return network


@pytest.fixture
def client(network: Network) -> AsyncClient:
    return AsyncClient("tcp://scripted", CONNECT_S, RECONNECT_S)


@pytest.fixture
def server(network: Network) -> Server:
    """A server that is not there yet."""
    return Server(network, random.Random(2))


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in virtual time, close its client, and check that nothing is left."""

    async def whole(client: AsyncClient, server: Server, **others: Any) -> None:
        await test(client, server, **others)
        await client.close()
        assert not len(client._inflight)
        assert not server.network.open_sockets

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        virtual_time.run(asyncio.wait_for(whole(**fixtures), 1000))

    return run


def now() -> float:
    return asyncio.get_running_loop().time()


@in_virtual_time
async def test_first_calls_at_once_share_one_attempt_and_its_outcome(
    client: AsyncClient, server: Server
) -> None:
    calls = [client.generate("a"), client.info(60), client.tokenize("a"), client.abort(),
             anext(client.stream("a")), client.connect()]  # fmt: skip
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in errors] == [ServerUnreachable] * len(calls)
    assert {str(error) for error in errors} == {str(errors[0])}
    assert "within 5 s" in str(errors[0])
    assert now() == pytest.approx(CONNECT_S)
    server.start()
    found = await client.generate("a", SamplingParams(max_new_tokens=3))
    assert found.text == chr(letter("a", 0)) * 3


@in_virtual_time
async def test_a_connect_finds_a_server_that_was_replaced_meanwhile_as_soon_as_it_is_there(
    client: AsyncClient, server: Server
) -> None:
    server.start()
    assert server.door is not None
    server.door.is_frozen = True
    calls = [asyncio.create_task(client.tokenize("a")) for _ in range(3)]
    for _ in range(4):
        await asyncio.sleep(1)
        server.network.vanish()
        server.start()
        assert server.door is not None
        server.door.is_frozen = True
    await asyncio.sleep(0.5)
    server.door.is_frozen = False
    server.network.thaw()
    assert await asyncio.gather(*calls) == [[1, 2, 3]] * 3
    assert now() < 4.5 + SHORT_S


@in_virtual_time
async def test_pings_are_repeated_until_one_is_answered(
    client: AsyncClient, server: Server
) -> None:
    server.start()
    server.ping_loss = 1.0
    call = asyncio.create_task(client.connect())
    await asyncio.sleep(3)
    server.ping_loss = 0.0
    await call
    assert now() < 4 + SHORT_S


@in_virtual_time
async def test_a_ping_follows_soon_when_a_connection_comes_up(
    client: AsyncClient, server: Server
) -> None:
    server.start()
    server.ping_loss = 1.0
    call = asyncio.create_task(client.connect())
    await asyncio.sleep(2.55)  # the next ping would be sent at 3.5 s
    server.network.vanish()
    server.ping_loss = 0.0
    server.start()
    await call
    assert now() < 2.55 + SHORT_S


@in_virtual_time
async def test_a_farewell_that_comes_while_connecting_does_not_end_the_attempt(
    client: AsyncClient, server: Server
) -> None:
    server.start()
    server.ping_loss = 1.0
    call = asyncio.create_task(client.connect())
    await asyncio.sleep(0.5)
    farewell = ServerGone(ErrorInfo("server_stopping", "good bye"))
    server.say(client._identity.bytes, farewell)
    await asyncio.sleep(0.5)
    server.network.vanish()
    server.ping_loss = 0.0
    server.start()
    await call


@in_virtual_time
async def test_a_cancelled_call_leaves_the_attempt_to_the_others_and_ends_it_when_alone(
    client: AsyncClient, server: Server
) -> None:
    first, second = (asyncio.create_task(client.connect()) for _ in range(2))
    await asyncio.sleep(1)
    first.cancel()
    await asyncio.sleep(1)
    server.start()
    await second
    await client.close()
    server.network.vanish()
    alone = asyncio.create_task(client.connect())
    await asyncio.sleep(1)
    alone.cancel()
    await asyncio.sleep(0.001)
    assert not server.network.open_sockets
    began = now()
    with pytest.raises(ServerUnreachable):  # and the next attempt has all of its time
        await client.connect()
    assert now() - began == pytest.approx(CONNECT_S)


@in_virtual_time
async def test_closing_ends_calls_that_connect_or_wait_and_the_next_call_connects_again(
    client: AsyncClient, server: Server
) -> None:
    for _ in range(2):  # without a server, then with one
        calls = [asyncio.create_task(client.generate(SILENT)) for _ in range(3)]
        await asyncio.sleep(1)
        await client.close()
        began = now()
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert now() == began
        assert [repr(e) for e in errors] == ["RequestAborted('the client was closed')"] * 3
        server.start()
    with pytest.raises(ServerUnreachable, match="connect"):
        client.submit("a")
    assert await client.tokenize("a") == [1, 2, 3]


@pytest.mark.parametrize("is_there", [False, True])
@in_virtual_time
async def test_the_timeout_of_a_call_includes_connecting(
    client: AsyncClient, server: Server, is_there: bool
) -> None:
    appears = asyncio.get_running_loop().call_later(1, server.start)
    if not is_there:
        appears.cancel()
    calls: list[Any] = [
        client.generate(SILENT, timeout=2),
        client.generate([SILENT, SILENT], timeout=2),
        anext(client.stream(SILENT, timeout=2)),
    ]
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, DeadlineExceeded)
        assert "within 2 s" in str(error)
    assert now() == pytest.approx(2)
    if not is_there:
        with pytest.raises(DeadlineExceeded, match=r"within 0\.5 s"):
            await client.info(0.5)
        assert now() == pytest.approx(2.5)


@in_virtual_time
async def test_a_sink_gets_the_deadline_of_its_request_also_while_the_server_is_away(
    client: AsyncClient, server: Server
) -> None:
    server.start()
    await client.connect()
    items: list[Any] = []
    handle = client.submit(SILENT, timeout=3, sink=items.append)
    server.network.vanish()
    await asyncio.sleep(2.9)
    assert not items and not handle.done
    await asyncio.sleep(0.2)
    assert handle.done and [type(item) for item in items] == [DeadlineExceeded]


@in_virtual_time
async def test_every_reader_of_a_handle_ends_when_it_ends_or_is_left(
    client: AsyncClient, server: Server
) -> None:
    server.start()
    await client.connect()

    async def count(handle: Any) -> int:
        return len([chunk async for chunk in handle])

    handle = client.submit("a", SamplingParams(max_new_tokens=5), stream=False)
    assert sum(await asyncio.gather(*(count(handle) for _ in range(3)))) == 1
    handle = client.submit(SILENT)
    readers = [asyncio.create_task(count(handle)) for _ in range(2)]
    whole = asyncio.create_task(handle.completion())
    await asyncio.sleep(1)
    handle.abort()
    assert await asyncio.gather(*readers) == [0, 0]
    with pytest.raises(RequestAborted, match="aborted"):
        await whole


# --- a server that is full ------------------------------------------------------------------------


async def refused_when_sent_again(
    client: AsyncClient, server: Server, prompt: str = "a", **options: Any
) -> RequestHandle:
    """A request that was accepted; the next frontend does not know it, and has no room."""
    server.start()
    await client.connect()
    handle = client.submit(prompt, SamplingParams(max_new_tokens=200), **options)
    await asyncio.sleep(0.01)
    server.network.vanish()
    server.requests.clear()
    server.retry_after, server.refusal = 2.0, 1.0
    server.start()
    return handle


@pytest.mark.parametrize("in_the_ring", [False, True])
@in_virtual_time
async def test_a_request_that_was_accepted_waits_for_room_at_a_server_that_does_not_know_it(
    client: AsyncClient, server: Server, in_the_ring: bool
) -> None:
    server.refuses_in_the_ring = in_the_ring
    handle = await refused_when_sent_again(client, server)
    await asyncio.sleep(5)
    assert not handle.done and len(server.refused) == 3  # at 0, 2 and 4 s
    assert all(message.resent for message in server.refused)
    server.refusal = 0.0
    assert (await handle.completion()).finish_reason == "length"
    assert now() < 6 + SHORT_S + 2


@pytest.mark.parametrize("in_the_ring", [False, True])
@in_virtual_time
async def test_a_refused_resend_waits_no_longer_than_a_reconnect(
    client: AsyncClient, server: Server, in_the_ring: bool
) -> None:
    server.refuses_in_the_ring = in_the_ring
    handle = await refused_when_sent_again(client, server)
    with pytest.raises(QueueFull):
        await handle.completion()
    assert RECONNECT_S <= now() < RECONNECT_S + SHORT_S


@in_virtual_time
async def test_a_refused_resend_waits_no_longer_than_its_own_timeout(
    client: AsyncClient, server: Server
) -> None:
    began = now()
    handle = await refused_when_sent_again(client, server, timeout=20)
    with pytest.raises(DeadlineExceeded):
        await handle.completion()
    assert now() == pytest.approx(began + 20, abs=SHORT_S)
    assert len(server.refused) == 10


@pytest.mark.parametrize("end", ["abort", "close"])
@in_virtual_time
async def test_a_wait_for_room_ends_with_its_handle_or_client(
    client: AsyncClient, server: Server, end: str
) -> None:
    handle = await refused_when_sent_again(client, server)
    await asyncio.sleep(1)
    if end == "abort":
        handle.abort()
    else:
        await client.close()
    await asyncio.sleep(20)
    assert len(server.refused) == 1


@in_virtual_time
async def test_a_new_request_is_refused_at_once_also_when_it_was_made_while_the_server_was_away(
    client: AsyncClient, server: Server
) -> None:
    server.start()
    await client.connect()
    server.retry_after, server.refusal = 2.0, 1.0
    with pytest.raises(QueueFull):
        await client.generate("a")
    server.network.vanish()
    await asyncio.sleep(1)
    call = asyncio.create_task(client.generate("a"))
    await asyncio.sleep(1)
    server.start()
    with pytest.raises(QueueFull):
        await call
    assert now() < 3 + SHORT_S
    assert [message.resent for message in server.refused] == [False, False]


@in_virtual_time
async def test_each_loss_of_a_request_gives_it_time_anew_to_wait_for_room(
    client: AsyncClient, server: Server
) -> None:
    handle = await refused_when_sent_again(client, server, SILENT)
    for _ in range(3):
        await asyncio.sleep(RECONNECT_S - 1)
        assert not handle.done
        server.refusal = 0.0
        await asyncio.sleep(2)
        assert server.requests
        server.network.vanish()
        server.requests.clear()
        server.refusal = 1.0
        server.start()
    handle.abort()


# --- a server that was lost -----------------------------------------------------------------------


@in_virtual_time
async def test_a_client_that_gave_a_server_up_finds_it_again_without_a_call(
    client: AsyncClient, server: Server
) -> None:
    server.start()
    await client.connect()
    server.network.vanish()
    await asyncio.sleep(RECONNECT_S + 1)
    with pytest.raises(ServerUnreachable, match="8 s"):
        client.submit("a")
    server.ping_loss = 1.0
    server.start()
    await asyncio.sleep(0.15)
    server.ping_loss = 0.0
    await asyncio.sleep(1)
    assert (await client.submit("a").completion()).finish_reason == "length"


@in_virtual_time
async def test_a_pong_of_a_server_that_said_farewell_does_not_count(
    client: AsyncClient, server: Server
) -> None:
    server.start()
    await client.connect()
    handle = client.submit(SILENT)
    await asyncio.sleep(0.1)
    server.farewell("server_stopping")
    server.say(client._identity.bytes, Pong(PROTOCOL_VERSION, "i", MAX_FRAME_BYTES))
    with pytest.raises(ServerStopping):
        await handle.completion()
    with pytest.raises(ServerStopping):
        await client.info()


@in_virtual_time
async def test_an_abort_that_was_lost_with_the_connection_is_asked_for_again(
    client: AsyncClient, server: Server
) -> None:
    server.start()
    await client.connect()
    kept, left = client.submit(SILENT), client.submit(SILENT)
    await asyncio.sleep(0.1)
    server.network.vanish()
    await asyncio.sleep(0.1)
    await client.abort(kept.request_id)
    left.abort()
    server.start()
    assert (await kept.completion()).finish_reason == "abort"
    await asyncio.sleep(SHORT_S)
    assert {name: request.ends for name, request in server.requests.items()} == {
        kept.request_id: {0: "abort"},
        left.request_id: {0: "abort"},
    }


@in_virtual_time
async def test_a_request_that_could_not_be_sent_is_sent_as_a_new_one(
    client: AsyncClient, server: Server
) -> None:
    server.start()
    await client.connect()
    server.network.jam()
    server.network.cut()
    handle = client.submit("a", SamplingParams(max_new_tokens=9))  # it has not heard of it
    assert not handle.was_sent
    assert (await handle.completion()).finish_reason == "length"
    assert not handle.was_resent


@in_virtual_time
async def test_a_request_that_the_next_server_finds_too_large_fails_alone(
    client: AsyncClient, server: Server
) -> None:
    server.start()
    await client.connect()
    large, small = client.submit("a" * 5000), client.submit("a", SamplingParams())
    server.network.vanish()
    server.max_frame_bytes = 1000
    server.start()
    with pytest.raises(InvalidRequest, match="at most 1000"):
        await large.completion()
    assert (await small.completion()).finish_reason == "length"


# --- prompts --------------------------------------------------------------------------------------


@in_virtual_time
async def test_no_prompts_give_no_completions_and_are_no_prompt(
    client: AsyncClient, server: Server
) -> None:
    server.start()
    no_prompts: list[str] = []
    assert await client.generate(no_prompts) == []
    for call in (anext(client.stream([])), client.tokenize([])):
        with pytest.raises(InvalidRequest, match="a list of 0 prompts") as caught:
            await call
        assert caught.value.field == "prompt"


@in_virtual_time
async def test_the_prompts_before_a_wrong_one_are_aborted(
    client: AsyncClient, server: Server
) -> None:
    server.start()
    with pytest.raises(InvalidRequest):
        await client.generate([SILENT, SILENT, [object()]])  # type: ignore[arg-type]
    await asyncio.sleep(SHORT_S)
    assert [request.ends for request in server.requests.values()] == [{0: "abort"}] * 2


@in_virtual_time
async def test_an_acknowledgement_that_was_lost_is_requested_again(
    client: AsyncClient, server: Server
) -> None:
    server.start()
    await client.connect()
    server.loses_acknowledgement = True
    accepted: list[Accepted] = []
    handle = client.submit("word", SamplingParams(max_new_tokens=9), on_accepted=accepted.append)
    completion = await handle.completion()
    assert completion.text == chr(letter("word", 0)) * 9
    assert [message.num_prompt_tokens for message in accepted] == [4]
