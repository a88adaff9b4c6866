"""The store stays within its bounds, and a disk that fails ends the storing, not the serving."""

import asyncio
import random
import resource
import sqlite3
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from http_proc.apis.responses import database, tables
from http_proc.apis.responses.schema import ResponseObject
from http_proc.apis.responses.store import EndedResponse
from http_proc.apis.responses.stored_responses import StoreBounds, StoredResponses
from http_proc.apis.responses.tables import ObjectKind
from http_proc.core.errors import ApiError
from http_proc.core.shares import SharedBound, Shares
from quadriga.server.config.frontend_args import TenantArgs
from tests.unit.http.responses.asking import ASK, asking
from tests.unit.scripted_ring import ScriptedRing

MEBIBYTE = 1024 * 1024
SHARES = Shares(TenantArgs(), None)
WIDE = StoreBounds(1000, 100 * MEBIBYTE, 1000.0, SHARES)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of the store, which the test may change."""
    times = [1_000_000.0]
    monkeypatch.setattr("http_proc.apis.responses.stored_responses.now", lambda: times[0])
    return times


def ended(number: int, text: str = "No", previous: int | None = None) -> EndedResponse:
    message = {"id": f"msg_{number}", "type": "message", "role": "assistant",
               "status": "completed", "content": text}  # fmt: skip
    response = ResponseObject(
        id=f"resp_{number}", created_at=0, model="tiny", status="completed", output=[message],
        previous_response_id=None if previous is None else f"resp_{previous}",
    )  # fmt: skip
    asked = [{"type": "message", "role": "user", "content": f"Question {number}"}]
    return EndedResponse(response, asked, True, None, b"event: x\ndata: {}\n\n")


@asynccontextmanager
async def opened_store(path: Path, bounds: StoreBounds = WIDE) -> AsyncIterator[StoredResponses]:
    held = SharedBound(SHARES, MEBIBYTE)
    store = StoredResponses(path / "responses.sqlite3", bounds, True, 16 * MEBIBYTE, held)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def reason_of(read: Coroutine[Any, Any, Any]) -> str | None:
    with pytest.raises(ApiError) as raised:
        await read
    return raised.value.answer.error.code


async def test_the_least_recently_used_go_first(tmp_path: Path, clock: list[float]) -> None:
    async with opened_store(tmp_path, replace(WIDE, max_objects=3)) as store:
        for number in range(3):
            clock[0] += 1
            assert await store.save(ended(number))
        clock[0] += 1
        assert await store.save(ended(3, previous=0))
        assert store.size.num_responses == 3
        assert await reason_of(store.response("resp_1")) == "response_expired"
        assert (await store.response("resp_2"))["id"] == "resp_2"
        assert len(await store.items_of_response("resp_3")) == 4


async def test_what_is_too_old_has_expired_and_its_use_prolongs_it(
    tmp_path: Path, clock: list[float]
) -> None:
    async with opened_store(tmp_path) as store:
        await store.save(ended(0))
        await store.save(ended(1))
        clock[0] += 600
        await store.save(ended(2, previous=1))
        clock[0] += 600
        assert await reason_of(store.response("resp_0")) == "response_expired"
        assert (await store.response("resp_1"))["id"] == "resp_1"
        await store.save(ended(3))
        assert store.size.num_responses == 3
        assert await reason_of(store.response("resp_0")) == "response_expired"


async def test_changes_that_wait_together_are_made_or_refused_one_by_one(tmp_path: Path) -> None:
    async with opened_store(tmp_path) as store:
        changes = [store.save(ended(number)) for number in range(20)]
        changes.append(store.save(ended(3)))
        removals = [store.delete(ObjectKind.RESPONSE, f"resp_{number}") for number in (4, 4, 99)]
        saved = await asyncio.gather(*changes)
        assert saved == [True] * 20 + [False]
        removed = await asyncio.gather(*removals, return_exceptions=True)
        assert removed[0] is None and all(isinstance(one, ApiError) for one in removed[1:])
        assert store.size.num_responses == 19 and not store.has_failed
    async with opened_store(tmp_path) as store:
        assert store.size.num_responses == 19


async def test_the_file_keeps_its_size(tmp_path: Path) -> None:
    async with opened_store(tmp_path, replace(WIDE, max_bytes=MEBIBYTE)) as store:
        for number in range(200):
            noise = sqlite3.connect(":memory:").execute("SELECT hex(randomblob(20000))").fetchone()
            assert await store.save(ended(number, noise[0]))
            assert store.size.num_bytes <= MEBIBYTE
        assert 20 < store.size.num_responses < 60
        assert await reason_of(store.response("resp_0")) == "response_expired"
    assert (tmp_path / "responses.sqlite3").stat().st_size < 1.5 * MEBIBYTE


async def test_smaller_bounds_take_effect_at_the_next_start(tmp_path: Path) -> None:
    async with opened_store(tmp_path) as store:
        for number in range(20):
            await store.save(ended(number))
    async with opened_store(
        tmp_path, replace(WIDE, max_objects=5, max_age_s=1000000000.0)
    ) as store:
        assert store.size.num_responses == 5
        assert (await store.response("resp_19"))["id"] == "resp_19"


async def test_ids_of_removed_responses_are_bounded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MAX_REMOVED_IDS", 3)
    async with opened_store(tmp_path) as store:
        for number in range(5):
            await store.save(ended(number))
            await store.delete(ObjectKind.RESPONSE, f"resp_{number}")
        assert await reason_of(store.response("resp_0")) == "response_unknown"
        assert await reason_of(store.response("resp_4")) == "response_deleted"


async def test_a_long_chain_is_read_in_its_order(tmp_path: Path) -> None:
    async with opened_store(tmp_path) as store:
        await store.save(ended(0))
        for number in range(1, 300):
            await store.save(ended(number, f"Answer {number}", previous=number - 1))
        items = await store.items_of_response("resp_299")
        questions = [item["content"][0]["text"] for item in items[::2]]
        assert questions == [f"Question {number}" for number in range(300)]


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a store try again at once after a failure."""
    monkeypatch.setattr(database, "RETRY_S", 0.0)


async def test_a_full_disk_ends_the_storing_and_reading_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, no_pause: None
) -> None:
    async with opened_store(tmp_path) as store:
        assert await store.save(ended(0))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = (tmp_path / "responses.sqlite3-wal").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            for number in range(1, 4):
                assert not await store.save(ended(number))
            assert store.has_failed and store.outcomes == {"stored": 1, "failed": 3}
            assert (await store.response("resp_0"))["id"] == "resp_0"
            assert await reason_of(store.delete(ObjectKind.RESPONSE, "resp_0")) == "no_storage"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert await store.save(ended(4))
        assert not store.has_failed and store.size.num_responses == 2
    assert len([one for one in caplog.records if "cannot be used" in one.message]) == 1


async def test_a_failed_store_is_not_tried_at_every_request(tmp_path: Path) -> None:
    (tmp_path / "responses.sqlite3").mkdir()
    async with opened_store(tmp_path) as store:
        assert not store.keeps_responses
        (tmp_path / "responses.sqlite3").rmdir()
        assert await reason_of(store.response("resp_0")) == "no_storage"
        assert not await store.save(ended(0))


@pytest.mark.parametrize("content", [b"no database " * 1000, b""])
async def test_a_damaged_file_does_not_end_the_serving(
    tmp_path: Path, content: bytes, no_pause: None
) -> None:
    path = tmp_path / "responses.sqlite3"
    path.write_bytes(content)
    ring = ScriptedRing(["No"])
    async with asking(ring, data_dir=str(tmp_path)) as client:
        answer: Any = await client.responses.create(**ASK)
        assert answer.output_text == "No" and answer.store is (content == b"")
        if content:
            with pytest.raises(openai.InternalServerError, match="move it away") as raised:
                await client.responses.retrieve(answer.id)
            assert raised.value.status_code == 503
            path.unlink()
            answer = await client.responses.create(**ASK)
            assert answer.store is True
        assert (await client.responses.retrieve(answer.id)).id == answer.id


async def test_pages_that_are_damaged_while_the_store_is_open_are_an_error_of_one_request(
    tmp_path: Path, no_pause: None
) -> None:
    path = tmp_path / "responses.sqlite3"
    async with opened_store(tmp_path) as store:
        for number in range(200):
            await store.save(ended(number, "No" * 2000))
    data = bytearray(path.read_bytes())
    data[3 * 4096 :] = b"\xff" * (len(data) - 3 * 4096)
    path.write_bytes(data)
    async with opened_store(tmp_path) as store:
        codes = []
        for number in range(200):
            try:
                await store.response(f"resp_{number}")
            except ApiError as error:
                codes.append(error.status)
        assert codes and set(codes) == {503}


SMALL: dict[str, Any] = {"max_stored_bytes": 400_000}


def long_text(num_bytes: int) -> str:
    """Return a text that takes as many bytes when it is compressed."""
    return random.Random(0).randbytes(num_bytes // 2).hex()[:num_bytes] * 2


@pytest.mark.parametrize("background", [False, True])
async def test_an_input_that_is_too_large_for_the_store_is_refused_before_the_work(
    tmp_path: Path, background: bool
) -> None:
    ring = ScriptedRing(["No"])
    async with asking(ring, data_dir=str(tmp_path), **SMALL) as client:
        ask = {**ASK, "input": long_text(800_000), "background": background}
        with pytest.raises(openai.APIStatusError, match="--max-stored-bytes") as raised:
            await client.responses.create(**ask)
        assert (raised.value.status_code, raised.value.code) == (413, "object_too_large")
        assert not ring.submitted
        if not background:
            assert (await client.responses.create(**ask, store=False)).store is False
        assert (await client.responses.create(**ASK)).store is True


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_that_is_too_large_says_that_it_is_not_stored(
    tmp_path: Path, streams: bool
) -> None:
    ring = ScriptedRing([long_text(500_000)])
    async with asking(ring, data_dir=str(tmp_path), **SMALL) as client:
        pieces, ring.pieces = ring.pieces, ["No"]
        first = await client.responses.create(**ASK)
        ring.pieces = pieces
        if streams:
            events = [event async for event in await client.responses.create(**ASK, stream=True)]
            assert events[0].response.store is True
            answered: Any = events[-1].response
        else:
            answered = await client.responses.create(**ASK)
        assert answered.status == "completed" and answered.store is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answered.id)
        assert await client.responses.retrieve(first.id) == first


async def test_a_background_answer_that_is_too_large_has_failed(tmp_path: Path) -> None:
    ring = ScriptedRing([long_text(500_000)])
    async with asking(ring, data_dir=str(tmp_path), **SMALL) as client:
        created = await client.responses.create(**ASK, background=True, stream=True)
        events = [event async for event in created]
        final = events[-1].response
        assert events[-1].type == "response.failed" and final.status == "failed"
        assert "--max-stored-bytes" in final.error.message and final.output == []
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert await client.responses.retrieve(final.id) == final
