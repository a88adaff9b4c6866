"""A gateway that replaces another one goes on with its streams: the same events, from any place."""

import asyncio
import json
import sqlite3
from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from http_proc.core.caller import short_hash
from http_proc.core.gateway import Gateway
from http_proc.web.resumable import STREAM_ROWS
from http_proc.web.stream_rows import FILE_NAME, StreamRow, StreamRows
from quadriga.errors import DeadlineExceeded
from quadriga.wire.client import Usage
from tests.unit.http.calls import send
from tests.unit.http.streams.stream_clients import (
    BODIES,
    MINE,
    OTHER,
    PIECES,
    OpenRing,
    events_of,
    gateway_on,
    reading,
    streaming,
    until,
)
from tests.unit.scripted_ring import ScriptedRing, chunk

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


class MergedRing(ScriptedRing):
    """A ring that sends all pieces in one chunk, as a replay does."""

    def _answer(self, handle: Any, sink: Any) -> None:
        handle.done = True
        whole = chunk("".join(self.pieces), self.completion())
        whole.token_ids = [1] * len(self.pieces)
        whole.token_times = [1.0] * len(self.pieces)
        whole.text_lengths = [len(piece) for piece in self.pieces]
        asyncio.get_running_loop().call_soon(sink, whole)


class LateRing(MergedRing):
    """A ring that answers no question at first, as one that is starting on a busy machine."""

    num_silent = 3

    async def info(self, timeout: float) -> dict[str, Any]:
        if self.num_silent:
            self.num_silent -= 1
            raise DeadlineExceeded("no answer")
        return await super().info(timeout)


@pytest.mark.parametrize("path", BODIES)
async def test_every_rest_of_a_stream_is_the_same_at_the_next_gateway(
    tmp_path: Path, path: str
) -> None:
    pieces = [*PIECES, *CALL, " and"]
    fields = {} if path == "/v1/completions" else {"tools": TOOLS}
    if path == "/v1/responses":
        fields = {"tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]}

    ring = OpenRing(pieces)
    async with (
        gateway_on(tmp_path, ring) as gateway,
        streaming(gateway, path, MINE, **fields) as response,
    ):
        name = response.headers["X-Stream-Id"]
        before = await events_of(response, 4)
    after = MergedRing([*pieces, " end"])
    async with gateway_on(tmp_path, after) as gateway:
        await until(lambda: after.submitted)
        async with reading(gateway, name, headers=MINE) as response:
            whole = await events_of(response)
        assert whole[: len(before)] == before
        for num_read in range(len(whole)):
            async with reading(gateway, name, num_read, MINE) as response:
                assert await events_of(response) == whole[num_read:]
        async with reading(gateway, name, headers=OTHER) as response:
            assert response.status == 403
    (first, again) = (each.submitted[0] for each in (ring, after))
    assert first[1] == again[1]
    assert first[1].seed is not None
    assert first[2]["kept"].request_id == again[2]["kept"].request_id
    assert (first[2]["kept"].is_resent, again[2]["kept"].is_resent) == (False, True)


async def test_a_stream_goes_on_at_a_ring_that_answers_late(tmp_path: Path) -> None:
    async with (
        gateway_on(tmp_path, OpenRing(PIECES)) as gateway,
        streaming(gateway, "/v1/chat/completions", MINE) as response,
    ):
        name, before = response.headers["X-Stream-Id"], await events_of(response, 2)
    late = LateRing(PIECES)
    async with (
        gateway_on(tmp_path, late) as gateway,
        reading(gateway, name, headers=MINE) as response,
    ):
        assert response.status == 200
        assert (await events_of(response))[: len(before)] == before
    assert late.num_silent == 0


async def test_a_stream_that_had_ended_runs_again_only_where_it_is_read(tmp_path: Path) -> None:
    async with (
        gateway_on(tmp_path, ScriptedRing(PIECES)) as gateway,
        streaming(gateway, headers=MINE) as response,
    ):
        name, whole = response.headers["X-Stream-Id"], await events_of(response)
    ring = ScriptedRing(PIECES)
    async with gateway_on(tmp_path, ring) as gateway:
        assert not ring.submitted
        async with reading(gateway, name, headers=OTHER) as response:
            assert response.status == 403
        assert not ring.submitted
        async with reading(gateway, name, 2, MINE) as response:
            assert await events_of(response) == whole[2:]
        assert len(ring.submitted) == 1


def other_times(ring: ScriptedRing) -> None:
    """Let a ring have other times and cache hits than every run before."""
    make = ring.completion

    def completion() -> Any:
        made = make()
        made.timings.submitted -= 77.0
        made.timings.token_times = [made.timings.submitted + 3.0, made.timings.submitted + 5.0]
        made.usage = Usage(3, len(ring.pieces), 2)
        return made

    ring.completion = completion  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {}),
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}}),
        ("/v1/completions", {}),
        ("/v1/completions", {"prompt": ["x", "y"], "stream_options": {"include_usage": True}}),
    ],
)
async def test_the_end_of_a_stream_is_the_same_at_the_next_gateway(
    tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    async with (
        gateway_on(tmp_path, MergedRing(PIECES)) as gateway,
        streaming(gateway, path, MINE, **fields) as response,
    ):
        name, whole = response.headers["X-Stream-Id"], await events_of(response)
    for _ in range(2):
        ring = MergedRing(PIECES)
        other_times(ring)
        async with (
            gateway_on(tmp_path, ring) as gateway,
            reading(gateway, name, headers=MINE) as response,
        ):
            assert await events_of(response) == whole
        assert ring.submitted


def storing_gateway(directory: Path, ring: ScriptedRing) -> AbstractAsyncContextManager[Gateway]:
    """Run a gateway that stores responses beside its rows."""
    return gateway_on(directory, ring, data_dir=str(directory))


async def ask(
    gateway: Gateway, path: str, body: Any = None, name: str = "", method: str = "post"
) -> Any:
    """Return the JSON of the answer to a request, with the name as X-Request-Id."""
    headers = MINE | ({"X-Request-Id": name} if name else {})
    return (await send(gateway, path, body, method, **headers)).body


def in_file(path: Path, statement: str) -> list[Any]:
    """Return the rows of a statement, in a file that no gateway uses."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        return database.execute(statement).fetchall()


async def read_to_end(response: aiohttp.ClientResponse) -> tuple[list[bytes], Any]:
    """Return the events of a stream of the Responses API, and the response of the last."""
    events = await events_of(response)
    return events, json.loads(events[-1].split(b"data: ")[1])["response"]


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_stored_response_keeps_its_id_and_is_stored_once(
    tmp_path: Path, has_ended: bool, is_stored: bool
) -> None:
    ring = MergedRing(PIECES)
    async with storing_gateway(tmp_path, ring) as gateway:
        talk = (await ask(gateway, "/v1/conversations", {}))["id"]
        fields = {"conversation": talk, "store": is_stored}
        headers = MINE | {"X-Request-Id": "fox"}
        async with streaming(gateway, "/v1/responses", headers, **fields) as response:
            whole, final = await read_to_end(response)
        assert final["id"] == "resp_fox" and final["store"] is is_stored
        items = await ask(gateway, f"/v1/conversations/{talk}/items", method="get")
    if not has_ended:  # as if the power was cut after the response was stored
        in_file(tmp_path / FILE_NAME, "UPDATE streams SET ended_at = NULL")
    for _ in range(2):
        again = MergedRing(PIECES)
        other_times(again)
        async with storing_gateway(tmp_path, again) as gateway:
            async with reading(gateway, "fox", headers=MINE) as response:
                assert await events_of(response) == whole
            # The turn that the response has added is not in its own prompt.
            assert again.submitted[0][0] == ring.submitted[0][0]
            stored = await ask(gateway, "/v1/responses/resp_fox", method="get")
            assert (stored.get("status") == "completed") is is_stored
            now = await ask(gateway, f"/v1/conversations/{talk}/items", method="get")
            assert now == items
        (count,) = in_file(tmp_path / "responses.sqlite3", "SELECT count(*) FROM objects")
        assert count == (1 + is_stored,)


async def test_a_stream_goes_on_after_what_it_continues_was_deleted(tmp_path: Path) -> None:
    ring = MergedRing(PIECES)
    async with storing_gateway(tmp_path, ring) as gateway:
        first = await ask(gateway, "/v1/responses", {"input": "x"})
        item = first["output"][0]["id"]
        fields = {
            "previous_response_id": first["id"],
            "input": [
                {"role": "user", "content": "y"},
                {"type": "message", "role": "assistant", "content": "z"},
            ],
        }
        async with streaming(gateway, "/v1/responses", MINE, **fields) as response:
            name, whole = response.headers["X-Stream-Id"], await events_of(response)
        fields = {"input": [{"type": "item_reference", "id": item}]}
        async with streaming(gateway, "/v1/responses", MINE, **fields) as response:
            by_item, referring = response.headers["X-Stream-Id"], await events_of(response)
        await ask(gateway, f"/v1/responses/{first['id']}", method="delete")
    async with storing_gateway(tmp_path, MergedRing(PIECES)) as gateway:
        async with reading(gateway, name, headers=MINE) as response:
            assert await events_of(response) == whole
        async with reading(gateway, by_item, headers=MINE) as response:
            assert await events_of(response) == referring


async def test_another_request_does_not_get_the_id_of_a_stream_that_waits(tmp_path: Path) -> None:

    headers = MINE | {"X-Request-Id": "fox"}
    async with (
        storing_gateway(tmp_path, OpenRing(PIECES)) as gateway,
        streaming(gateway, "/v1/responses", headers) as response,
    ):
        before = await events_of(response, 4)
    ring = MergedRing(PIECES)
    ring.facts["ready"] = False
    async with storing_gateway(tmp_path, ring) as gateway:
        other = await ask(gateway, "/v1/responses", {"input": "other"}, "fox")
        assert other["id"].startswith("resp_fox~") and other["store"] is True
        ring.facts["ready"] = True
        async with reading(gateway, "fox", headers=MINE) as response:
            events, final = await read_to_end(response)
        assert events[: len(before)] == before and final["id"] == "resp_fox"
        for response_id, text in (("resp_fox", "x"), (other["id"], "other")):
            path = f"/v1/responses/{response_id}/input_items"
            (item,) = (await ask(gateway, path, method="get"))["data"]
            assert item["content"][0]["text"] == text


async def test_the_same_request_sent_to_the_next_gateway_is_the_same_stream(tmp_path: Path) -> None:

    headers = MINE | {"X-Request-Id": "named"}
    async with (
        gateway_on(tmp_path, OpenRing(PIECES)) as gateway,
        streaming(gateway, headers=headers) as response,
    ):
        first = await events_of(response, 2)
    ring = OpenRing(PIECES)
    async with gateway_on(tmp_path, ring) as gateway:
        async with streaming(gateway, headers=headers) as response:
            assert await events_of(response, 2) == first
        assert len(ring.submitted) == 1


async def test_streams_of_another_model_and_old_ones_are_expired(tmp_path: Path) -> None:
    def row(name: str, model: str, ended_at: float | None) -> StreamRow:
        mine = short_hash("mine")
        return StreamRow(name, name, "/v1/completions", b"{}", "", "", mine, 0, model, ended_at)

    rows = StreamRows(tmp_path)
    rows.add(row("old", "tiny", 0.0)).result()
    rows.add(row("foreign", "another", None)).result()
    rows.close()

    ring = ScriptedRing(PIECES)
    async with gateway_on(tmp_path, ring) as gateway:
        for name in ("old", "foreign"):
            async with reading(gateway, name, headers=MINE) as response:
                assert (await response.json())["error"]["code"] == "stream_expired"
        assert not ring.submitted
    left = StreamRows(tmp_path)
    assert left.all() == []
    left.close()


async def test_a_deleted_stream_leaves_no_row(tmp_path: Path) -> None:
    async with gateway_on(tmp_path, ScriptedRing(PIECES), resume_window=0.05) as gateway:
        async with streaming(gateway, headers=MINE) as response:
            await events_of(response)
        await until(lambda: not gateway[STREAM_ROWS].all())


def test_the_file_is_for_its_owner_and_keeps_the_address(tmp_path: Path) -> None:
    rows = StreamRows(tmp_path / "data")
    address = rows.address
    rows.close()
    assert (tmp_path / "data" / FILE_NAME).stat().st_mode & 0o777 == 0o600
    again = StreamRows(tmp_path / "data")
    assert again.address == address
    again.close()


@pytest.mark.parametrize("fault", ["directory", "damage", "lock"])
async def test_a_file_that_cannot_be_used_costs_one_line_and_no_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    holder = None
    if fault == "directory":
        (tmp_path / FILE_NAME).mkdir()
    elif fault == "damage":
        (tmp_path / FILE_NAME).write_bytes(b"no database" * 1000)
    else:
        holder = sqlite3.connect(tmp_path / FILE_NAME)
        holder.execute("PRAGMA locking_mode = EXCLUSIVE")
        holder.execute("CREATE TABLE t (x)")
    async with gateway_on(tmp_path, ScriptedRing(PIECES)) as gateway:
        assert gateway[STREAM_ROWS].has_failed
        async with streaming(gateway, headers=MINE) as response:
            name, whole = response.headers["X-Stream-Id"], await events_of(response)
        async with reading(gateway, name, headers=MINE) as response:
            assert await events_of(response) == whole
    assert len([line for line in caplog.messages if "resumable streams end" in line]) == 1
    if holder is not None:
        holder.close()


async def test_a_full_disk_costs_one_line_and_no_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_on(tmp_path, ScriptedRing(PIECES)) as gateway:
        database = gateway[STREAM_ROWS]._database
        (size,) = database.execute("PRAGMA page_count").fetchone()
        database.execute(f"PRAGMA max_page_count = {size}")
        for _ in range(3):
            body = {"prompt": "x" * 100_000}
            async with streaming(gateway, headers=MINE, **body) as response:
                assert len(await events_of(response)) == len(PIECES) + 1
        assert gateway[STREAM_ROWS].has_failed
        database.execute("PRAGMA max_page_count = 100000")
        async with streaming(gateway, headers=MINE) as response:
            await events_of(response)
        assert not gateway[STREAM_ROWS].has_failed
    assert len([line for line in caplog.messages if "is full" in line]) == 1


def test_rows_of_an_earlier_version_have_ids_of_their_owners_and_are_found(tmp_path: Path) -> None:
    StreamRows(tmp_path).close()
    database = sqlite3.connect(tmp_path / FILE_NAME)
    for row_id, tenant, key_hash in (("1", "alice", ""), ("2", "", "hash"), ("3", "", "")):
        values = (row_id, "key", "/v1/completions", b"{}", tenant, "", key_hash, 0, "tiny")
        names = "id, key, path, body, tenant, user, key_hash, created, model"
        database.execute(f"INSERT INTO streams ({names}) VALUES (?,?,?,?,?,?,?,?,?)", values)
    database.commit()
    database.close()
    rows = StreamRows(tmp_path)
    assert [row.name for row in rows.all()] == [("alice", "1"), ("hash", "2"), ("", "3")]
    for row in rows.all():
        rows.remove(row.name).result()
    assert rows.all() == []
    rows.close()
