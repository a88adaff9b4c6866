"""A gateway that replaces another one goes on with its streams: the same events, from any place."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.client.server import free_port
from http_proc.gateway import Gateway
from http_proc.listener import bind, listen, make_runner, tls_context
from http_proc.streams.stream_rows import FILE_NAME, StreamRow, StreamRows
from quadriga.config.server_config import ServerConfig
from quadriga.errors import DeadlineExceeded
from tests.unit.http.streams.test_resumable import (
    BODIES,
    PIECES,
    OpenRing,
    events_of,
    reading,
    streaming,
    until,
)
from tests.unit.scripted_ring import TIMEOUT_S, ScriptedRing, chunk

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


class MergedRing(ScriptedRing):
    """A ring that sends all pieces in one chunk, as a replay does."""

    def _answer(self, handle: Any, sink: Any) -> None:
        handle.done = True
        whole = chunk("".join(self.pieces), self._completion())
        whole.token_ids = [1] * len(self.pieces)
        whole.token_times = [0.0] * len(self.pieces)
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


@asynccontextmanager
async def gateway_on(directory: Path, ring: ScriptedRing, **flags: Any) -> AsyncIterator[Gateway]:
    """Run a gateway that keeps its rows in a directory."""
    config = ServerConfig().replace(
        **{"served_model_name": "tiny", "port": free_port(), "api_key": "mine,other"} | flags
    )
    rows = StreamRows(directory)
    gateway = Gateway(config, ring, None, ring, rows)  # type: ignore[arg-type]
    runner = await make_runner(gateway)
    server = await listen(runner, bind(config.http), tls_context(config.http), gateway)
    try:
        yield gateway
    finally:
        server.close()
        await runner.cleanup()
        rows.close()


MINE, OTHER = ({"Authorization": f"Bearer {key}"} for key in ("mine", "other"))


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, TIMEOUT_S))


@pytest.mark.parametrize("path", BODIES)
def test_every_rest_of_a_stream_is_the_same_at_the_next_gateway(tmp_path: Path, path: str) -> None:
    pieces = [*PIECES, *CALL, " and"]
    fields = {} if path == "/v1/completions" else {"tools": TOOLS}
    if path == "/v1/responses":
        fields = {"tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]}

    async def check() -> None:
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

    run(check())


def test_a_stream_goes_on_at_a_ring_that_answers_late(tmp_path: Path) -> None:
    async def check() -> None:
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

    run(check())


def test_a_stream_that_had_ended_runs_again_only_where_it_is_read(tmp_path: Path) -> None:
    async def check() -> None:
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
                rest = await events_of(response)
            assert [event.split(b",")[0] for event in rest] == [
                event.split(b",")[0] for event in whole[2:]
            ]
            assert len(ring.submitted) == 1

    run(check())


def test_the_same_request_sent_to_the_next_gateway_is_the_same_stream(tmp_path: Path) -> None:
    async def check() -> None:
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

    run(check())


def test_streams_of_another_model_and_old_ones_are_expired(tmp_path: Path) -> None:
    def row(name: str, model: str, ended_at: float | None) -> StreamRow:
        return StreamRow(name, name, "/v1/completions", b"{}", "", "", "", 0, model, ended_at)

    rows = StreamRows(tmp_path)
    rows.add(row("old", "tiny", 0.0)).result()
    rows.add(row("foreign", "another", None)).result()
    rows.close()

    async def check() -> None:
        ring = ScriptedRing(PIECES)
        async with gateway_on(tmp_path, ring) as gateway:
            for name in ("old", "foreign"):
                async with reading(gateway, name, headers=MINE) as response:
                    assert (await response.json())["error"]["code"] == "stream_expired"
            assert not ring.submitted
        left = StreamRows(tmp_path)
        assert left.all() == []
        left.close()

    run(check())


def test_a_deleted_stream_leaves_no_row(tmp_path: Path) -> None:
    async def check() -> None:
        async with gateway_on(tmp_path, ScriptedRing(PIECES), resume_window=0.05) as gateway:
            async with streaming(gateway, headers=MINE) as response:
                await events_of(response)
            await until(lambda: not gateway.stream_rows.all())

    run(check())


def test_the_file_is_for_its_owner_and_keeps_the_address(tmp_path: Path) -> None:
    rows = StreamRows(tmp_path / "data")
    address = rows.address
    rows.close()
    assert (tmp_path / "data" / FILE_NAME).stat().st_mode & 0o777 == 0o600
    again = StreamRows(tmp_path / "data")
    assert again.address == address
    again.close()


@pytest.mark.parametrize("fault", ["directory", "damage", "lock"])
def test_a_file_that_cannot_be_used_costs_one_line_and_no_stream(
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

    async def check() -> None:
        async with gateway_on(tmp_path, ScriptedRing(PIECES)) as gateway:
            assert gateway.stream_rows.has_failed
            async with streaming(gateway, headers=MINE) as response:
                name, whole = response.headers["X-Stream-Id"], await events_of(response)
            async with reading(gateway, name, headers=MINE) as response:
                assert await events_of(response) == whole

    run(check())
    assert len([line for line in caplog.messages if "resumable streams end" in line]) == 1
    if holder is not None:
        holder.close()


def test_a_full_disk_costs_one_line_and_no_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with gateway_on(tmp_path, ScriptedRing(PIECES)) as gateway:
            database = gateway.stream_rows._database
            (size,) = database.execute("PRAGMA page_count").fetchone()
            database.execute(f"PRAGMA max_page_count = {size}")
            for _ in range(3):
                body = {"prompt": "x" * 100_000}
                async with streaming(gateway, headers=MINE, **body) as response:
                    assert len(await events_of(response)) == len(PIECES) + 1
            assert gateway.stream_rows.has_failed
            database.execute("PRAGMA max_page_count = 100000")
            async with streaming(gateway, headers=MINE) as response:
                await events_of(response)
            assert not gateway.stream_rows.has_failed

    run(check())
    assert len([line for line in caplog.messages if "is full" in line]) == 1
