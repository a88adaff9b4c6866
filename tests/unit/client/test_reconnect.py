"""A client whose server is replaced under it: nothing is lost, nothing is shown twice."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from bench.client.server import free_port
from quadriga.client import AsyncClient, Completion, connection
from quadriga.errors import AddressInUse, RequestFailed, ServerStopping, ServerUnreachable
from quadriga.wire.async_sockets import AsyncPort
from quadriga.wire.client import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Abort,
    Chunks,
    ClientMessage,
    ErrorInfo,
    Generate,
    GetInfo,
    Info,
    Ping,
    Pong,
    Replay,
    ServerGone,
)
from quadriga.wire.sockets import bind_public, encode
from tests.unit.public_messages import make_chunk, make_end

PATIENCE = 20.0


class ScriptedDoor:
    """A frontend that answers pings by itself and else says what a test wants it to say."""

    def __init__(self, socket: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(ClientMessage).decode
        self._port = AsyncPort(socket, self._take)
        self._client = b""
        self._messages: asyncio.Queue[Any] = asyncio.Queue()

    @classmethod
    async def open(cls, endpoint: str) -> "ScriptedDoor":
        """As soon as the one before, if there was one, has left the address."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return cls(bind_public(endpoint))
            except AddressInUse:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.005)

    def _take(self, frames: list[bytes]) -> None:
        self._client, message = frames[0], self._decode(frames[1])
        if isinstance(message, Ping):
            self.say(Pong(PROTOCOL_VERSION, "i", MAX_FRAME_BYTES))
        else:
            self._messages.put_nowait(message)

    def say(self, message: msgspec.Struct) -> None:
        self._port.send(self._client, encode(message))

    async def next(self) -> Any:
        return await asyncio.wait_for(self._messages.get(), PATIENCE)

    def close(self) -> None:
        self._port.close(linger_s=0.5)


Script = Callable[[ScriptedDoor, Callable[[], Awaitable[ScriptedDoor]], Generate], Awaitable[None]]


@asynccontextmanager
async def client_and_door(**options: Any) -> AsyncIterator[tuple[AsyncClient, ScriptedDoor]]:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    door = await ScriptedDoor.open(endpoint)
    async with AsyncClient(endpoint, PATIENCE, **options) as client:
        yield client, door
    door.close()


def served_by(script: Script, **options: Any) -> tuple[Completion, list[str]]:
    """The completion of one request, and the pieces in which its text came."""

    async def run() -> tuple[Completion, list[str]]:
        async with client_and_door(**options) as (client, first):
            doors = [first]

            async def replace() -> ScriptedDoor:
                doors[-1].close()
                doors.append(await ScriptedDoor.open(client.endpoint))
                return doors[-1]

            handle = client.submit("x")
            message = await first.next()
            playing = asyncio.ensure_future(script(first, replace, message))
            pieces = []
            try:
                async for item in handle:
                    pieces.append(item.text)
            finally:
                await asyncio.wait_for(playing, PATIENCE)
                doors[-1].close()
            assert item.completion is not None
            return item.completion, pieces

    return asyncio.run(asyncio.wait_for(run(), 2 * PATIENCE))


def test_a_stream_goes_on_at_a_new_frontend_and_shows_nothing_twice() -> None:
    async def script(door: ScriptedDoor, replace: Any, message: Generate) -> None:
        name = message.request_id
        door.say(Chunks([make_chunk(name, 0, "He", [1])]))
        await asyncio.sleep(0.05)
        door = await replace()
        again = await door.next()
        assert again == msgspec.structs.replace(message, resent=True)
        assert message.params.seed is not None, "a second run must give the same"
        # A chunk that may have been missed is sent again.
        door.say(Chunks([make_chunk(name, 3, "lo", [3])]))
        door.say(Replay([make_chunk(name, 0, "Hello", [1, 2, 3])]))
        door.say(Chunks([make_chunk(name, 5, " you", [4], make_end(4))]))

    completion, pieces = served_by(script)
    assert completion.text == "Hello you"
    assert completion.token_ids == [1, 2, 3, 4]
    assert len(completion.timings.token_times) == 4
    assert pieces in (["He", "llo", " you"], ["Hello", " you"])


def test_a_replay_may_come_unasked_and_lag_behind_what_is_known() -> None:
    async def script(door: ScriptedDoor, replace: Any, message: Generate) -> None:
        name = message.request_id
        door.say(Chunks([make_chunk(name, 0, "Hello", [1, 2, 3])]))
        door.say(Replay([make_chunk(name, 0, "He", [1])]))
        door.say(Chunks([make_chunk(name, 2, "ll", [2])]))
        door.say(Chunks([make_chunk(name, 4, "o you", [3, 4], make_end(4))]))

    completion, pieces = served_by(script)
    assert completion.text == "Hello you"
    assert completion.token_ids == [1, 2, 3, 4]
    assert pieces == ["Hello", " you"]


def test_a_request_that_runs_anew_is_compared_with_what_it_gave_before() -> None:
    def script_that_gives(second: list[int]) -> Script:
        async def script(door: ScriptedDoor, replace: Any, message: Generate) -> None:
            name = message.request_id
            door.say(Chunks([make_chunk(name, 0, "ab", [1, 2])]))
            await asyncio.sleep(0.05)
            door = await replace()
            await door.next()
            door.say(Replay([make_chunk(name, 0, "", [])]))
            door.say(Chunks([make_chunk(name, 0, "abc", second, make_end(3))]))

        return script

    assert served_by(script_that_gives([1, 2, 3]))[0].text == "abc"
    with pytest.raises(RequestFailed, match="ran again"):
        served_by(script_that_gives([1, 9, 3]))


def test_a_chunk_that_was_lost_is_requested_again() -> None:
    async def script(door: ScriptedDoor, replace: Any, message: Generate) -> None:
        name = message.request_id
        door.say(Chunks([make_chunk(name, 0, "a", [1])]))
        door.say(Chunks([make_chunk(name, 2, "c", [3])]))
        assert (await door.next()).resent
        door.say(Replay([make_chunk(name, 0, "abc", [1, 2, 3])]))
        door.say(Chunks([make_chunk(name, 3, "", [5], make_end(5))]))  # where is token 4?
        assert (await door.next()).resent
        door.say(Replay([make_chunk(name, 0, "abc", [1, 2, 3, 4, 5], make_end(5))]))

    completion, pieces = served_by(script)
    assert completion.token_ids == [1, 2, 3, 4, 5]
    assert "".join(pieces) == completion.text == "abc"


def test_the_error_after_giving_up_names_the_cause_and_the_unknown_outcome() -> None:
    async def script(door: ScriptedDoor, replace: Any, message: Generate) -> None:
        door.close()

    with pytest.raises(ServerUnreachable, match=r"answered there for 0.3 s; .* not known"):
        served_by(script, reconnect_timeout=0.3)


async def test_questions_are_asked_again_and_a_farewell_is_believed_at_once() -> None:
    async with client_and_door() as (client, door):
        asking = asyncio.ensure_future(client.info())
        assert isinstance(await door.next(), GetInfo)
        door.close()
        door = await ScriptedDoor.open(client.endpoint)
        question = await door.next()
        door.say(Info(question.request_id, {"running": 7}))
        assert await asking == {"running": 7}
        handle = client.submit("x")
        await door.next()
        door.say(ServerGone(ErrorInfo("server_stopping", "good bye")))
        with pytest.raises(ServerStopping, match="good bye"):
            await handle.completion()
        with pytest.raises(ServerStopping):
            client.submit("x")
        door.close()


async def test_a_request_cancelled_while_the_server_was_away_is_aborted_when_it_is_back() -> None:
    async with client_and_door() as (client, door):
        handle = client.submit("x")
        await door.next()
        door.close()
        door = await ScriptedDoor.open(client.endpoint)
        assert (await door.next()).request_id == handle.request_id
        door.say(Chunks([make_chunk("another", 0, "a", [1])]))
        message = await door.next()
        assert message == Abort(PROTOCOL_VERSION, "another")
        handle.abort()
        assert (await door.next()).request_id == handle.request_id
        door.close()


async def test_a_socket_that_has_stopped_reconnecting_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "MAX_SOCKET_SILENCE_S", 0.25)
    async with client_and_door() as (client, door):
        handle = client.submit("x")
        message = await door.next()
        door.close()
        socket = client._connection._link._port.socket  # type: ignore[union-attr]
        while not client._connection._search.is_running:  # until it has noticed
            await asyncio.sleep(0.005)
        socket.disconnect(client.endpoint)  # whatever happens, this one does not come back
        door = await ScriptedDoor.open(client.endpoint)
        assert await door.next() == msgspec.structs.replace(message, resent=True)
        door.say(Replay([make_chunk(message.request_id, 0, "ab", [1, 2], make_end(2))]))
        assert (await handle.completion()).text == "ab"
        assert socket.closed
        door.close()
