"""Resumable streams: cut anywhere, resumed anywhere, and dropped in the end."""

import asyncio
import json
import socket
import tracemalloc
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from http_proc.core.event_log import EventLog, pieces_of
from http_proc.core.gateway import Gateway
from http_proc.web import resumable
from http_proc.web.resumable import STREAM_ROWS, ResumableStream, StreamTable
from http_proc.web.stream_rows import StreamName
from quadriga.errors import NonFiniteLogits, PromptTooLong
from tests.unit.http.calls import key_file, send
from tests.unit.http.streams.stream_clients import (
    BODIES,
    PIECES,
    OpenRing,
    events_of,
    reading,
    streaming,
    until,
)
from tests.unit.scripted_ring import ScriptedRing, chunk, gateway_before


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[StreamTable]:
    """Return a list that gets the table of each gateway."""
    found: list[StreamTable] = []

    class Seen(StreamTable):
        def __init__(self, gateway: Gateway) -> None:
            super().__init__(gateway)
            found.append(self)

    monkeypatch.setattr(resumable, "StreamTable", Seen)
    return found


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_is_cut_anywhere_goes_on_with_the_next_byte(path: str) -> None:
    async with gateway_before(ScriptedRing(PIECES)) as (_, gateway):
        async with streaming(gateway, path) as response:
            name, whole = response.headers["X-Stream-Id"], await events_of(response)
        numbers = [event.split(b"\n")[0] for event in whole]
        assert numbers == [b"id: %d" % number for number in range(1, len(whole) + 1)]
        for num_read in range(len(whole) + 1):
            async with reading(gateway, name, num_read) as response:
                assert await events_of(response) == whole[num_read:]
            async with reading(gateway, name, headers={"Last-Event-ID": str(num_read)}) as response:
                assert await events_of(response) == whole[num_read:]


async def test_a_stream_goes_on_without_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, num_readers = OpenRing(PIECES), [0]
    note = StreamTable._on_change

    def on_change(table: StreamTable, stream: ResumableStream) -> None:
        num_readers.append(stream.num_readers)
        note(table, stream)

    monkeypatch.setattr(StreamTable, "_on_change", on_change)
    async with gateway_before(ring) as (_, gateway):
        async with streaming(gateway) as response:
            name, first = response.headers["X-Stream-Id"], await events_of(response, 2)
        await until(lambda: num_readers[-2:] == [1, 0])
        ring.sinks[0](chunk(" five"))
        async with reading(gateway, name, len(first)) as response:
            ring.finish()
            rest = await events_of(response)
        assert not ring.handles[0].aborted
        text = b"".join(first + rest)
        for piece in ("One", " two", " three", " four", " five", " end", "[DONE]"):
            assert text.count(piece.encode()) == 1


async def test_a_stream_that_is_not_resumable_ends_with_its_connection() -> None:
    ring = OpenRing(PIECES)
    async with gateway_before(ring) as (_, gateway):
        async with streaming(gateway, resumable=False) as response:
            name = response.headers["X-Request-Id"]
            assert "X-Stream-Id" not in response.headers
            (event,) = await events_of(response, 1)
            assert event.startswith(b"data: ")
        await until(lambda: ring.handles[0].aborted)
        async with reading(gateway, name) as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "stream_not_found"


@pytest.mark.parametrize(
    ("header", "field", "is_resumable"),
    [
        (None, None, False),
        (None, True, True),
        (None, False, False),
        ("true", None, True),
        ("true", False, True),
        ("false", True, False),
    ],
)
async def test_the_header_counts_before_the_field(
    header: str | None, field: bool | None, is_resumable: bool
) -> None:
    async with gateway_before(ScriptedRing(PIECES)) as (_, gateway):
        headers = None if header is None else {"X-Resumable": header}
        async with streaming(gateway, headers=headers, resumable=field) as response:
            assert ("X-Stream-Id" in response.headers) == is_resumable


async def test_a_stream_without_readers_ends_after_the_window() -> None:
    ring = OpenRing(PIECES)
    async with gateway_before(ring, resume_window=0.05) as (_, gateway):
        async with streaming(gateway) as response:
            name = response.headers["X-Stream-Id"]
            assert await events_of(response, 1)
        await until(lambda: ring.handles[0].aborted)
        async with reading(gateway, name) as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "stream_expired"


async def test_a_stream_with_a_reader_outlives_the_window() -> None:
    ring = OpenRing(PIECES)
    async with (
        gateway_before(ring, resume_window=0.05) as (_, gateway),
        streaming(gateway, headers={"X-Request-Id": "mine"}) as response,
        reading(gateway, "cmpl-mine", 1) as second,
    ):
        assert response.headers["X-Stream-Id"] == "mine"
        first, same = await events_of(response, 2), await events_of(second, 1)
        await asyncio.sleep(0.1)  # twice the window
        ring.finish()
        first += await events_of(response)
        same += await events_of(second)
        assert first[1:] == same
        assert first[-1].endswith(b"data: [DONE]\n\n")


async def test_the_same_request_sent_again_reads_the_same_stream() -> None:
    ring = OpenRing(PIECES)
    async with gateway_before(ring) as (_, gateway):
        headers = {"X-Request-Id": "mine"}
        async with streaming(gateway, headers=headers) as response:
            first = await events_of(response, 2)
        async with streaming(gateway, headers=headers | {"Last-Event-ID": "2"}) as response:
            ring.finish()
            rest = await events_of(response)
        async with streaming(gateway, headers=headers) as response:
            assert await events_of(response) == first + rest
        assert len(ring.handles) == 1
        async with streaming(gateway, headers=headers, prompt="other") as response:
            assert response.status == 409
            assert (await response.json())["error"]["code"] == "stream_exists"


async def test_an_error_before_the_begin_is_a_status_and_leaves_nothing() -> None:
    ring = ScriptedRing(PIECES, error=PromptTooLong("prompt has 9 tokens"))
    async with gateway_before(ring) as (_, gateway):
        headers = {"X-Request-Id": "mine"}
        async with streaming(gateway, headers=headers) as response:
            assert response.status == 400
        async with reading(gateway, "mine") as response:
            assert response.status == 404
        ring.error = None
        async with streaming(gateway, headers=headers) as response:
            assert len(await events_of(response)) == len(PIECES) + 1


async def test_what_came_before_an_error_is_in_the_stream_before_it() -> None:
    ring = OpenRing(PIECES)
    async with gateway_before(ring) as (_, gateway):
        async with streaming(gateway) as response:
            ring.sinks[0](chunk(" five"))
            ring.sinks[0](NonFiniteLogits("no numbers"))
            name, whole = response.headers["X-Stream-Id"], await events_of(response)
        assert b" five" in whole[4] and b"no numbers" in whole[5]
        async with reading(gateway, name, 3) as response:
            assert await events_of(response) == whole[3:]


async def test_a_stream_is_read_with_the_key_that_started_it() -> None:
    async with gateway_before(ScriptedRing(PIECES), api_key="mine,other") as (_, gateway):
        mine, other = ({"Authorization": f"Bearer {key}"} for key in ("mine", "other"))
        async with streaming(gateway, headers=mine) as response:
            name = response.headers["X-Stream-Id"]
        async with reading(gateway, name, headers=other) as response:
            assert response.status == 403
            assert (await response.json())["error"]["code"] == "not_your_stream"
        async with reading(gateway, name, headers=mine) as response:
            assert len(await events_of(response)) == len(PIECES) + 1


async def test_a_deleted_stream_ends_with_abort_for_its_readers() -> None:
    ring = OpenRing(PIECES)
    async with gateway_before(ring) as (_, gateway):
        async with streaming(gateway) as response:
            name = response.headers["X-Stream-Id"]
            answer = await send(gateway, f"/v1/streams/{name}", None, "DELETE")
            assert answer.body == {"id": name, "deleted": True, "object": "stream.deleted"}
            assert b'"finish_reason":"abort"' in b"".join(await events_of(response))
        async with reading(gateway, name) as response:
            assert response.status == 404


async def test_ended_streams_make_room_and_running_ones_do_not() -> None:
    ring = OpenRing(PIECES)
    async with gateway_before(ring, max_resumable_streams=1) as (_, gateway):
        async with streaming(gateway) as response:
            first = response.headers["X-Stream-Id"]
            async with streaming(gateway) as refused:
                assert refused.status == 503
                assert (await refused.json())["error"]["code"] == "too_many_streams"
            ring.finish()
            await events_of(response)
        ring.leaves_open = False
        async with streaming(gateway) as response:
            await events_of(response)
        async with reading(gateway, first) as response:
            assert (await response.json())["error"]["code"] == "stream_expired"


async def test_the_requests_of_running_streams_have_a_bound_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resumable, "MAX_BYTES", 3000)
    ring = OpenRing(PIECES)
    async with gateway_before(ring) as (_, gateway), streaming(gateway) as response:
        assert await events_of(response, 1)
        async with streaming(gateway, prompt="a" * 3000) as refused:
            assert refused.status == 503
        async with streaming(gateway, prompt="a" * 1000) as response:
            assert await events_of(response, 1)


async def test_a_long_stream_keeps_its_last_events_and_a_reader_that_keeps_up_gets_all(
    monkeypatch: pytest.MonkeyPatch, tables: list[StreamTable]
) -> None:
    monkeypatch.setattr(resumable, "MAX_BYTES", 20_000)
    monkeypatch.setattr(resumable, "DROPPED_AT_ONCE_BYTES", 1000)

    class PacedRing(OpenRing):
        """A ring that sends one piece after the other, as they are asked for."""

        def _answer(self, handle: Any, sink: Any) -> None:
            """Wait for the test."""

    ring = PacedRing([])

    async def first_piece(ring: PacedRing) -> None:
        await until(lambda: ring.sinks)
        ring.sinks[0](chunk("first"))

    async with gateway_before(ring) as (_, gateway):
        asked = asyncio.create_task(first_piece(ring))
        async with streaming(gateway) as response:
            await asked
            name = response.headers["X-Stream-Id"]
            events: list[bytes] = []
            for number in range(200):
                ring.sinks[0](chunk(f"piece {number} "))
                events += await events_of(response, 1)
                assert tables[0].num_bytes <= 20_000
            ring.finish()
            events += await events_of(response)
        numbers = [int(event.split(b"\n")[0].removeprefix(b"id: ")) for event in events]
        assert numbers == list(range(1, len(events) + 1))
        async with reading(gateway, name) as response:
            assert response.status == 404
            error = (await response.json())["error"]
            assert error["code"] == "stream_expired"
        num_dropped = int(error["message"].split("up to number ")[1].split()[0])
        assert 0 < num_dropped < len(events) - 10
        async with reading(gateway, name, num_dropped) as response:
            assert await events_of(response) == events[num_dropped:]


async def test_readers_that_do_not_read_share_one_copy(tables: list[StreamTable]) -> None:
    pieces = ["a" * 1000] * 3000
    num_readers = 20
    async with gateway_before(ScriptedRing(pieces)) as (_, gateway):
        async with streaming(gateway) as response:
            name, size = response.headers["X-Stream-Id"], len(await response.read())
        assert size > 3_000_000
        address = ("127.0.0.1", gateway.args.port)
        readers = []
        loop = asyncio.get_running_loop()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(num_readers):
                reader = socket.socket()
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reader.setblocking(False)
                await loop.sock_connect(reader, address)
                line = f"GET /v1/streams/{name} HTTP/1.1\r\nHost: localhost\r\n\r\n"
                await loop.sock_sendall(reader, line.encode())
                assert await loop.sock_recv(reader, 100)
                readers.append(reader)
            stream = tables[0].get(StreamName("", name))
            assert stream is not None
            await until(lambda: stream.num_readers == num_readers)
            for _ in range(100):
                await asyncio.sleep(0)
            held = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
            for reader in readers:
                reader.close()
        assert held < size
        await until(lambda: not stream.num_readers)


async def test_a_long_event_is_sent_without_a_copy() -> None:

    log = EventLog()
    await log.write(b"data: " + b"a" * 1_000_000 + b"\n\n")
    (event,) = log.since(0)
    sent = list(pieces_of([event]))
    assert all(isinstance(piece, memoryview) and piece.obj is event for piece in sent)
    assert b"".join(sent) == event


@pytest.fixture
def tenants(tmp_path: Path) -> dict[str, Any]:
    return {"keys": str(key_file(tmp_path, alice="alice", bob="bob", tiny="tiny")), "api_key": "op"}


def as_tenant(name: str, stream_id: str = "") -> dict[str, str]:
    headers = {"Authorization": f"Bearer {name}"}
    return headers | ({"X-Request-Id": stream_id} if stream_id else {})


async def test_an_id_of_a_stream_is_one_of_its_tenant(tenants: dict[str, Any]) -> None:
    aborted: list[int] = []

    class AbortedRing(OpenRing):
        """A ring that ends the request that is aborted, and no other."""

        async def abort(self, request_id: str) -> None:
            aborted.append(int(request_id))
            self.finish_reason = "abort"
            self.handles[int(request_id)].done = True
            self.sinks[int(request_id)](chunk("", self.completion()))

    ring = AbortedRing(PIECES)
    async with (
        gateway_before(ring, **tenants) as (_, gateway),
        streaming(gateway, headers=as_tenant("alice", "1"), prompt="of alice") as first,
        streaming(gateway, headers=as_tenant("bob", "1"), prompt="of bob") as second,
        streaming(gateway, headers=as_tenant("bob", "job-1")) as third,
        streaming(gateway, headers=as_tenant("op", "cmpl-1")) as fourth,
    ):
        begun = [await events_of(one, 1) for one in (first, second, third, fourth)]
        assert len(ring.submitted) == 4
        async with reading(gateway, "1", headers=as_tenant("bob")) as response:
            assert await events_of(response, 1) == begun[1]
        for name in ("alice", "bob"):
            async with streaming(
                gateway, headers=as_tenant(name, "1"), prompt=f"of {name}"
            ) as again:
                assert again.headers["X-Stream-Id"] == "1"
        assert len(ring.submitted) == 4
        async with reading(gateway, "job-1", headers=as_tenant("alice")) as response:
            assert response.status == 200  # its own stream 1, with a prefix
        async with reading(gateway, "1", headers=as_tenant("tiny")) as response:
            assert response.status == 403
        answer = await send(gateway, "/v1/streams/1", None, "DELETE", **as_tenant("bob"))
        assert answer.status == 200
        assert b'"finish_reason":"abort"' in b"".join(await events_of(second))
        assert aborted == [1]


async def test_streams_of_one_tenant_leave_room_for_those_of_others(
    tenants: dict[str, Any],
) -> None:
    ring = OpenRing(PIECES)
    async with gateway_before(ring, max_resumable_streams=8, **tenants) as (_, gateway):
        ring.leaves_open = False
        async with streaming(gateway, headers=as_tenant("bob", "ended")) as response:
            await events_of(response)
        for number in range(12):
            async with streaming(gateway, headers=as_tenant("alice", str(number))) as response:
                await events_of(response)
        async with reading(gateway, "ended", headers=as_tenant("bob")) as response:
            assert len(await events_of(response)) == len(PIECES) + 1
        async with reading(gateway, "0", headers=as_tenant("alice")) as response:
            assert (await response.json())["error"]["code"] == "stream_expired"
        ring.leaves_open = True
        statuses = []
        async with AsyncExitStack() as stack:
            for number in range(20, 28):
                headers = as_tenant("alice", str(number))
                one = await stack.enter_async_context(streaming(gateway, headers=headers))
                statuses.append(one.status)
            assert statuses == [200] * 5 + [503] * 3
            for name in ("bob", "tiny", "op"):
                async with streaming(gateway, headers=as_tenant(name)) as response:
                    assert response.status == 200


@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        ({}, {"stream": False}, "resumable"),
        ({"X-Resumable": "perhaps"}, {}, None),
        ({}, {"resumable": "yes"}, "resumable"),
    ],
)
async def test_a_wrong_wish_is_refused(
    headers: dict[str, str], fields: dict[str, Any], param: str | None
) -> None:
    async with (
        gateway_before(ScriptedRing(PIECES)) as (_, gateway),
        streaming(gateway, headers=headers, **fields) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param


@pytest.mark.parametrize("value", ["-1", "x", "1.5", "9" * 20])
async def test_a_wrong_event_id_is_refused(value: str) -> None:
    async with gateway_before(ScriptedRing(PIECES)) as (_, gateway):
        async with streaming(gateway) as response:
            name = response.headers["X-Stream-Id"]
        async with reading(gateway, name, headers={"Last-Event-ID": value}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "Last-Event-ID"


async def test_more_events_than_there_are_cannot_have_been_read() -> None:
    async with gateway_before(ScriptedRing(PIECES)) as (_, gateway):
        async with streaming(gateway) as response:
            name, whole = response.headers["X-Stream-Id"], await events_of(response)
        async with reading(gateway, name, len(whole) + 1) as response:
            assert response.status == 400


async def test_metrics_count_streams() -> None:
    async with gateway_before(ScriptedRing(PIECES, ready=False)) as (_, gateway):
        async with streaming(gateway) as response:
            name, size = response.headers["X-Stream-Id"], len(await response.read())
            body = {"stream": True, "resumable": True} | BODIES["/v1/completions"]
            size += len(json.dumps(body))
        size += sum(len(row.decisions) for row in gateway[STREAM_ROWS].all())
        size += 4 * len(PIECES)  # the ids of its tokens
        async with reading(gateway, name) as response:
            await response.read()
        text = (await send(gateway, "/metrics")).text
        assert 'quadriga:resumable_streams{model_name="tiny"} 1.0' in text
        assert f'quadriga:resumable_stream_bytes{{model_name="tiny"}} {size}.0' in text
        assert 'quadriga:streams_resumed_total{model_name="tiny"} 1.0' in text
