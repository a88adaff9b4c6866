"""Responses in the background: polled, streamed, cancelled, and made again after a death."""

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from http_proc.apis.responses import background as background_run
from http_proc.apis.responses import database
from http_proc.apis.responses.stored_responses import StoredResponses
from quadriga.errors import PromptTooLong, QueueFull
from tests.unit.http.responses.asking import ASK, asking, check_events, refused, turns_of
from tests.unit.scripted_ring import ScriptedRing, chunk, gateway_before

BACKGROUND_ASK: Any = {**ASK, "background": True}


@asynccontextmanager
async def client_of(ring: ScriptedRing, path: Path, **flags: Any) -> AsyncIterator[Any]:
    async with (
        gateway_before(ring, data_dir=str(path), **flags) as (url, _),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        yield client


async def ended(client: Any, response_id: str) -> Any:
    """Poll a response until it has ended."""
    while True:
        response = await client.responses.retrieve(response_id)
        if response.status not in ("queued", "in_progress"):
            return response
        await asyncio.sleep(0.01)


def finish(ring: ScriptedRing, piece: str) -> None:
    """Let the last request of a ring end with a piece."""
    ring.handles[-1].done = True
    ring.sinks[-1](chunk(piece, ring.completion()))


async def test_a_response_is_made_without_its_client_and_read_later(tmp_path: Path) -> None:
    ring = ScriptedRing(["No", " rain."])
    async with asking(ring, data_dir=str(tmp_path)) as client:
        created = await client.responses.create(**BACKGROUND_ASK)
        assert created.status == "queued" and created.background and created.output == []
        done = await ended(client, created.id)
        assert done.status == "completed" and done.output_text == "No rain."
        assert done.id == created.id and done.created_at == created.created_at
        items = (await client.responses.input_items.list(created.id)).data
        assert [item.content[0].text for item in items] == ["Rain?"]
        await client.responses.create(**ASK, previous_response_id=created.id)
        assert len(turns_of(ring)) == 3


async def test_its_stream_is_read_while_it_is_made_and_afterwards(tmp_path: Path) -> None:
    ring = ScriptedRing(["No"], leaves_open=True)
    async with asking(ring, data_dir=str(tmp_path)) as client:
        created = await client.responses.create(**BACKGROUND_ASK)

        async def read(after: int | None = None) -> list[Any]:
            query = {} if after is None else {"starting_after": after}
            stream = await client.responses.retrieve(created.id, stream=True, **query)
            return [event async for event in stream]

        first, second = asyncio.create_task(read()), asyncio.create_task(read(3))
        while (now := await client.responses.retrieve(created.id)).output_text != "No":
            await asyncio.sleep(0.01)
        assert now.status == "in_progress" and now.output[0].status == "incomplete"
        finish(ring, " rain.")
        events = await first
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds[:3] == ["created", "queued", "in_progress"]
        assert [event.response.status for event in events[:3]] == [
            "queued",
            "queued",
            "in_progress",
        ]
        assert [one.sequence_number for one in events] == list(range(len(events)))
        assert events[-1].response.output_text == "No rain."
        assert await second == events[4:] == await read(3)
        assert await read() == events


async def test_a_stream_in_the_background_goes_on_without_its_client(tmp_path: Path) -> None:
    ring = ScriptedRing(["No"], leaves_open=True)
    async with asking(ring, data_dir=str(tmp_path)) as client:
        stream = await client.responses.create(**BACKGROUND_ASK, stream=True)
        seen = [await anext(stream) for _ in range(4)]
        await stream.close()
        finish(ring, " rain.")
        rest = await client.responses.retrieve(
            seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number
        )
        events = seen + [event async for event in rest]
        assert events[-1].response.output_text == "No rain."
        assert [one.sequence_number for one in events] == list(range(len(events)))
        assert not ring.handles[0].aborted


async def test_a_client_that_leaves_while_its_response_is_stored_finds_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StoredResponses.open_response
    is_storing, may_go_on = asyncio.Event(), asyncio.Event()

    async def open_slowly(*args: Any) -> None:
        await store(*args)
        is_storing.set()
        await may_go_on.wait()

    monkeypatch.setattr(StoredResponses, "open_response", open_slowly)
    async with asking(ScriptedRing(["No", " rain."]), data_dir=str(tmp_path)) as client:
        name = {"X-Request-Id": "rain"}
        created = asyncio.create_task(client.responses.create(**BACKGROUND_ASK, extra_headers=name))
        await is_storing.wait()
        created.cancel()
        for _ in range(20):  # meanwhile the gateway sees that the connection is closed
            assert (await client.responses.retrieve("resp_rain")).status == "queued"
        may_go_on.set()
        assert (await ended(client, "resp_rain")).output_text == "No rain."


async def test_a_cancelled_response_keeps_what_it_has(tmp_path: Path) -> None:
    ring = ScriptedRing(["No"], leaves_open=True)
    async with asking(ring, data_dir=str(tmp_path)) as client:
        created = await client.responses.create(**BACKGROUND_ASK, stream=True)
        events = [await anext(created) for _ in range(6)]
        response_id = events[0].response.id
        cancelled = await client.responses.cancel(response_id)
        assert cancelled.status == "cancelled" and cancelled.output_text == "No"
        assert ring.handles[0].aborted
        events += [event async for event in created]
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.status == "cancelled"
        assert await client.responses.retrieve(response_id) == cancelled
        assert await client.responses.cancel(response_id) == cancelled


async def test_a_response_is_cancelled_before_it_begins(tmp_path: Path) -> None:
    ring = ScriptedRing([], error=QueueFull("full"))
    async with asking(ring, data_dir=str(tmp_path)) as client:
        created = await client.responses.create(**BACKGROUND_ASK)
        assert (await client.responses.cancel(created.id)).status == "cancelled"
        stream = await client.responses.retrieve(created.id, stream=True)
        assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_an_error_of_the_request_is_that_of_the_response(tmp_path: Path) -> None:
    ring = ScriptedRing([], error=PromptTooLong("prompt has 9000 tokens"))
    async with asking(ring, data_dir=str(tmp_path)) as client:
        created = await client.responses.create(**BACKGROUND_ASK)
        failed = await ended(client, created.id)
        assert failed.status == "failed" and failed.error.code == "context_length_exceeded"
        assert "9000 tokens" in failed.error.message
        events = [one async for one in await client.responses.retrieve(created.id, stream=True)]
        assert [event.type for event in events[-2:]] == ["error", "response.failed"]


async def test_a_full_queue_delays_the_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_run, "RETRY_AFTER_S", 0.0)
    ring = ScriptedRing(["No"], error=QueueFull("full"))
    async with asking(ring, data_dir=str(tmp_path)) as client:
        created = await client.responses.create(**BACKGROUND_ASK)
        while len(ring.handles) < 2:
            assert (await client.responses.retrieve(created.id)).status == "queued"
            await asyncio.sleep(0.01)
        ring.error = None
        done = await ended(client, created.id)
        assert done.output_text == "No"
        stream = [one async for one in await client.responses.retrieve(created.id, stream=True)]
        assert [one.sequence_number for one in stream] == list(range(len(stream)))


async def test_open_responses_are_made_by_the_next_gateway(tmp_path: Path) -> None:
    ring = ScriptedRing(["No"], leaves_open=True)
    async with client_of(ring, tmp_path) as client:
        first = await client.responses.create(**ASK, background=True, instructions="Be brief.")
        stream = await client.responses.create(
            **BACKGROUND_ASK, stream=True, extra_body={"seed": 5}
        )
        seen = [await anext(stream) for _ in range(5)]
        second = seen[0].response
    again = ScriptedRing(["No", " rain."])
    async with client_of(again, tmp_path) as client:
        for created in (first, second):
            done = await ended(client, created.id)
            assert done.output_text == "No rain." and done.created_at == created.created_at
        rest = await client.responses.retrieve(second.id, stream=True, starting_after=4)
        events = [*seen, *[event async for event in rest]]
        again_events = await client.responses.retrieve(second.id, stream=True)
        assert events == [event async for event in again_events]
    # The same is asked under the same ids, with the same seed also where none was given.
    kept = [[options["kept"] for *_, options in one.submitted] for one in (ring, again)]
    assert [one._replace(is_resent=True) for one in kept[0]] == kept[1]
    seeds = [params.seed for _, params, _ in ring.submitted]
    assert [params.seed for _, params, _ in again.submitted] == seeds
    assert seeds[1] == 5 and seeds[0] is not None
    assert [turns for turns, *_ in again.submitted] == [turns for turns, *_ in ring.submitted]
    third = ScriptedRing(["No"])
    async with client_of(third, tmp_path) as client:
        assert (await client.responses.retrieve(first.id)).output_text == "No rain."
    assert third.submitted == []


class StartingRing(ScriptedRing):
    """A ring that is not ready, and notes what is aborted."""

    def __init__(self) -> None:
        super().__init__(["No", " rain."])
        self.facts["ready"] = False
        self.aborted: list[str] = []

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


@pytest.mark.parametrize("act", ["cancel", "delete"])
async def test_a_response_ends_while_the_server_starts(tmp_path: Path, act: str) -> None:
    ring = ScriptedRing(["No"], leaves_open=True)
    async with client_of(ring, tmp_path) as client:
        first, other = [await client.responses.create(**BACKGROUND_ASK) for _ in range(2)]
        while len(ring.handles) < 2:
            await asyncio.sleep(0.01)
    kept = ring.submitted[0][2]["kept"].request_id
    starting = StartingRing()
    async with client_of(starting, tmp_path) as client:
        assert (await client.responses.retrieve(first.id)).status == "queued"
        if act == "cancel":
            cancelled = await client.responses.cancel(first.id)
            assert cancelled.status == "cancelled"
            assert await client.responses.retrieve(first.id) == cancelled
        else:
            await client.responses.delete(first.id)
        assert not starting.aborted
        starting.facts["ready"] = True
        assert (await ended(client, other.id)).output_text == "No rain."
        assert len(starting.submitted) == 1
        while not starting.aborted:
            await asyncio.sleep(0.01)
        assert starting.aborted == [kept]
    third = ScriptedRing(["No"])
    async with client_of(third, tmp_path) as client:
        if act == "cancel":
            assert (await client.responses.retrieve(first.id)).status == "cancelled"
        else:
            with pytest.raises(openai.NotFoundError, match="was deleted"):
                await client.responses.retrieve(first.id)
    assert third.submitted == []


async def test_a_response_that_is_made_again_is_cancelled_with_all_that_was_sent(
    tmp_path: Path,
) -> None:
    ring = ScriptedRing(["No", " rain"], leaves_open=True)
    async with asking(ring, data_dir=str(tmp_path)) as client:
        created = await client.responses.create(**BACKGROUND_ASK, stream=True)
        events = [await anext(created) for _ in range(7)]
        ring.pieces = ["No"]
        ring.sinks[-1](QueueFull("full"))
        while len(ring.handles) < 2:
            await asyncio.sleep(0.01)
        response_id = events[0].response.id
        assert (await client.responses.retrieve(response_id)).output_text == "No rain"
        assert (await client.responses.cancel(response_id)).output_text == "No rain"
        events += [event async for event in created]
        assert events[-1].response.status == "cancelled"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        again = await client.responses.retrieve(response_id, stream=True)
        assert [event async for event in again] == events


async def test_the_end_is_seen_when_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = StoredResponses.close_response
    is_storing, may_go_on = asyncio.Event(), asyncio.Event()

    async def close_slowly(*args: Any) -> bool:
        is_storing.set()
        await may_go_on.wait()
        return await close(*args)

    monkeypatch.setattr(StoredResponses, "close_response", close_slowly)
    async with asking(ScriptedRing(["No", " rain."]), data_dir=str(tmp_path)) as client:
        stream = await client.responses.create(**BACKGROUND_ASK, stream=True)
        events = [await anext(stream)]
        await is_storing.wait()
        response_id = events[0].response.id
        shown = await client.responses.retrieve(response_id)
        assert (shown.status, shown.output_text) == ("in_progress", "No rain.")
        assert shown.usage is None and shown.completed_at is None
        cancelling = asyncio.create_task(client.responses.cancel(response_id))
        may_go_on.set()
        assert (await cancelling).status == "completed"
        events += [event async for event in stream]
        assert events[-1].type == "response.completed"


async def test_a_resumable_request_in_the_background_is_one_response(tmp_path: Path) -> None:
    async with asking(ScriptedRing(["No", " rain."]), data_dir=str(tmp_path)) as client:
        ask = {**BACKGROUND_ASK, "extra_body": {"resumable": True}}
        stream = await client.responses.create(**ask, stream=True)
        events = [event async for event in stream]
        assert events[-1].response.output_text == "No rain."
        again = await client.responses.retrieve(events[0].response.id, stream=True)
        assert [event async for event in again] == events
        assert (await client.responses.create(**ask)).status == "queued"


async def test_an_open_response_cannot_be_continued_and_ends_when_it_is_deleted(
    tmp_path: Path,
) -> None:
    ring = ScriptedRing(["No"], leaves_open=True)
    async with asking(ring, data_dir=str(tmp_path)) as client:
        created = await client.responses.create(**BACKGROUND_ASK)
        with pytest.raises(openai.ConflictError, match="has not ended"):
            await client.responses.create(**ASK, previous_response_id=created.id)
        while not ring.handles:
            await asyncio.sleep(0.01)
        await client.responses.delete(created.id)
        assert ring.handles[0].aborted
        with pytest.raises(openai.NotFoundError, match="was deleted"):
            await client.responses.retrieve(created.id)


async def test_the_number_of_open_responses_is_bounded(tmp_path: Path) -> None:
    ring = ScriptedRing(["No"], leaves_open=True)
    async with asking(ring, data_dir=str(tmp_path), max_background_responses=2) as client:
        for _ in range(2):
            await client.responses.create(**BACKGROUND_ASK)
        with pytest.raises(openai.RateLimitError, match="this server takes 2"):
            await client.responses.create(**BACKGROUND_ASK)


async def test_open_responses_outlive_the_bounds_of_the_store(tmp_path: Path) -> None:
    ring = ScriptedRing(["No"], leaves_open=True)
    async with asking(ring, data_dir=str(tmp_path), max_stored_responses=1) as client:
        created = await client.responses.create(**BACKGROUND_ASK)
        while not ring.handles:
            await asyncio.sleep(0.01)
        ring.leaves_open = False
        for _ in range(3):
            await client.responses.create(**ASK)
        assert (await client.responses.retrieve(created.id)).status == "in_progress"


async def test_an_end_that_cannot_be_stored_is_stored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "RETRY_S", 0.0)
    monkeypatch.setattr(background_run, "RETRY_S", 0.01)
    ring = ScriptedRing(["No"], leaves_open=True)

    ids: list[str] = []
    async with asking(ring, data_dir=str(tmp_path)) as client:
        created = await client.responses.create(**BACKGROUND_ASK)
        while not ring.handles:
            await asyncio.sleep(0.01)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
        try:
            finish(ring, " rain.")
            assert (await ended(client, created.id)).output_text == "No rain."
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        ids.append(created.id)
    async with asking(ScriptedRing(["No", " rain."]), data_dir=str(tmp_path)) as client:
        assert (await client.responses.retrieve(ids[0])).output_text == "No rain."


async def test_wrong_uses_of_the_background_are_refused(tmp_path: Path) -> None:
    async with asking(ScriptedRing(["No"]), data_dir=str(tmp_path)) as client:
        await refused(client, "store", "must be true", background=True, store=False)
    async with asking(ScriptedRing(["No"])) as client:
        await refused(client, "background", "--no-store", background=True)


async def test_the_events_of_a_response_in_the_background_add_up(tmp_path: Path) -> None:
    ring = ScriptedRing(["No", " rain", "."])
    async with asking(ring, data_dir=str(tmp_path)) as client:
        stream = await client.responses.create(**BACKGROUND_ASK, stream=True)
        events = [event async for event in stream]
        queued = [event for event in events if event.type == "response.queued"]
        assert len(queued) == 1 and events[1] is queued[0]
        for number, event in enumerate(rest := [events[0], *events[2:]]):
            event.sequence_number = number
        check_events(rest)
