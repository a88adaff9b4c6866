"""GET /v1/live: shared events, slow viewers, keys, errors, and the end of the server."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from http_proc.page import live as hub_module
from http_proc.page.live import MAX_BEHIND, LiveHub, PageViewer
from quadriga.client.live import server_from_json, server_to_json, step_from_json, step_to_json
from quadriga.errors import RequestFailed
from quadriga.wire.live import (
    EventKind,
    LiveEvent,
    LiveProcess,
    LiveServer,
    LiveStep,
    RowKind,
    SkipReason,
)
from tests.unit.http.calls import key_file
from tests.unit.live_messages import make_request, make_step
from tests.unit.scripted_ring import ScriptedRing, gateway_before

SERVER = LiveServer(5.0, [LiveProcess("worker_proc", 12, 1.5, 1 << 20, 1.0)], 0, 1, 1, 0)


def step(number: int = 0, **fields: Any) -> LiveStep:
    """Return a whole message with something in each field."""
    events = [LiveEvent(EventKind.ADMITTED, 7, "4")]
    skipped = {SkipReason.PAGES: [8, 9]}
    request = make_request(7, request_id="name")
    message = make_step(number, {7: RowKind.CHUNK}, skipped, [request], events, is_whole=True)
    return msgspec.structs.replace(message, **fields)


class Page:
    """A connection to /v1/live, read event by event."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def next(self) -> tuple[str, Any]:
        name = (await self._response.content.readline()).decode().removeprefix("event: ").strip()
        if not name:
            return "", None
        data = (await self._response.content.readline()).decode().removeprefix("data: ")
        await self._response.content.readline()
        return name, json.loads(data)

    async def until(self, wanted: str) -> Any:
        while True:
            name, body = await self.next()
            assert name, "the stream has ended"
            if name == wanted:
                return body


@pytest.mark.parametrize("message", [step(), step(tree=None, is_whole=False)])
def test_a_step_is_the_same_after_its_way_as_json(message: LiveStep) -> None:
    assert step_from_json(json.loads(json.dumps(step_to_json(message)))) == message


def test_the_processes_are_the_same_after_their_way_as_json() -> None:
    assert server_from_json(json.loads(json.dumps(server_to_json(SERVER)))) == SERVER


async def test_all_viewers_share_one_subscription_and_a_late_one_gets_what_it_missed() -> None:
    ring = ScriptedRing([])
    async with gateway_before(ring) as (_, gateway):
        url = f"{gateway.args.url}/v1/live"
        async with aiohttp.ClientSession() as session, session.get(url) as first:
            page = Page(first)
            assert (await page.until("history"))["rows"] == []
            ring.live.put_nowait(step())
            ring.live.put_nowait(SERVER)
            live = await page.until("live")
            assert live["steps"][0]["requests"][0]["request_id"] == "name"
            assert live["server"]["processes"][0]["name"] == "worker_proc"
            async with session.get(url) as second:
                late = Page(second)
                history = await late.until("history")
                assert history["rows"][0][0] == SERVER.time
                assert history["events"][0]["request_id"] == "name"
                assert (await late.until("live"))["steps"] == live["steps"]
            assert ring.num_watches == 1


async def test_a_request_of_the_gateway_has_the_x_request_id_of_its_caller() -> None:
    ring = ScriptedRing(["a"])
    ring.leaves_open = True
    async with gateway_before(ring) as (_, gateway):
        url = gateway.args.url
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/live") as live:
            page = Page(live)
            await page.until("history")
            body = {"prompt": "a", "stream": True}
            headers = {"X-Request-Id": "load-19"}
            async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
                await answer.content.readany()
                requests = [make_request(7, request_id="0"), make_request(8, request_id="other")]
                ring.live.put_nowait(msgspec.structs.replace(step(), requests=requests))
                (shown,) = (await page.until("live"))["steps"]
                assert [one["caller_id"] for one in shown["requests"]] == ["load-19", ""]
            async with session.get(f"{url}/v1/live") as second:
                history = await Page(second).until("history")
                assert history["events"][0]["request_id"] == "load-19"


async def test_a_failing_ring_is_an_event_and_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub_module, "RETRY_S", 0.01)
    ring = ScriptedRing([], error=RequestFailed("the ring is away"))
    async with gateway_before(ring) as (_, gateway):
        url = f"{gateway.args.url}/v1/live"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            page = Page(response)
            assert (await page.until("error"))["message"] == "the ring is away"
            ring.error = None
            ring.live.put_nowait(step())
            assert (await page.until("live"))["steps"]


async def test_a_view_too_many_is_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_VIEWERS", 1)
    async with gateway_before(ScriptedRing([])) as (_, gateway), aiohttp.ClientSession() as session:
        url = f"{gateway.args.url}/v1/live"
        async with session.get(url) as first, session.get(url) as second:
            assert first.status == 200
            assert second.status == 429
            assert "1 live views are open" in await second.text()


async def test_a_view_chooses_its_replica_and_one_that_is_not_there_is_refused() -> None:
    ring = ScriptedRing([], num_replicas=2)
    async with gateway_before(ring) as (_, gateway):
        async with aiohttp.ClientSession() as session:
            for text, part in (("2", "0 to 1 are there"), ("one", "it must be a number"),
                               ("-1", "it must be a number")):  # fmt: skip
                async with session.get(f"{gateway.args.url}/v1/live?replica={text}") as refused:
                    assert refused.status == 400
                    assert part in await refused.text()
            async with session.get(f"{gateway.args.url}/v1/live?replica=1") as response:
                page = Page(response)
                ring.live.put_nowait(step(replica=1))
                assert (await page.until("live"))["steps"][0]["replica"] == 1
        assert ring.watched == [1]


async def test_a_key_is_needed_as_for_the_api_and_one_of_a_tenant_does_not_suffice(
    tmp_path: Path,
) -> None:
    file = key_file(tmp_path, alice="hers")
    async with gateway_before(ScriptedRing([]), api_key="operator", keys=str(file)) as (_, gateway):
        url = f"{gateway.args.url}/v1/live"
        async with aiohttp.ClientSession() as session:
            for headers, status in (
                ({}, 401),
                ({"Authorization": "Bearer hers"}, 403),
                ({"Authorization": "Bearer operator"}, 200),
            ):
                async with session.get(url, headers=headers) as response:
                    assert response.status == status


async def test_the_streams_end_when_the_server_stops() -> None:
    async with aiohttp.ClientSession() as session:
        async with gateway_before(ScriptedRing([])) as (url, _):
            response = await session.get(f"{url}/v1/live")
            await Page(response).until("history")
        assert await response.content.read() == b""


async def test_a_viewer_that_does_not_read_loses_events_and_learns_how_many() -> None:

    viewer = PageViewer([])
    for number in range(MAX_BEHIND + 1):
        viewer.put(b"event %d\n" % number)
    assert viewer.num_dropped == MAX_BEHIND
    data = await viewer.take()
    assert data.startswith(b"event: dropped") and data.endswith(b"event %d\n" % MAX_BEHIND)


async def test_an_event_is_encoded_once_for_a_hundred_viewers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[str] = []
    sse = hub_module.sse

    def counted(name: str, body: Any) -> bytes:
        encoded.append(name)
        return sse(name, body)

    monkeypatch.setattr(hub_module, "sse", counted)

    ring = ScriptedRing([])
    hub = LiveHub(ring)  # type: ignore[arg-type]
    with hub.viewer() as first, hub.viewer() as second:
        others = [hub.viewer() for _ in range(98)]
        for other in others:
            other.__enter__()
        await first.take(), await second.take()
        ring.live.put_nowait(step())
        assert await first.take() == await second.take() != b""
        for other in others:
            other.__exit__(None, None, None)
    hub.close()
    assert encoded.count("live") == 1


async def test_nothing_is_kept_and_the_ring_is_left_when_the_last_viewer_leaves() -> None:
    ring = ScriptedRing([])
    hub = LiveHub(ring)  # type: ignore[arg-type]
    with hub.viewer() as viewer:
        await viewer.take()
        ring.live.put_nowait(step())
        await viewer.take()
    with hub.viewer() as viewer:
        assert json.loads((await viewer.take()).split(b"data: ")[1])["events"] == []
        ring.live.put_nowait(step())
        await viewer.take()
    assert ring.num_watches == 2


async def _connect_with_little_room(
    host: str, port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect with a small receive buffer, so that the system does not keep what is not read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (host, port))
    return await asyncio.open_connection(sock=connection)


async def test_a_hundred_pages_that_read_nothing_take_bounded_memory_and_delay_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub_module, "FLUSH_S", 0.0)  # an event for each message
    hubs: list[LiveHub] = []
    begin = LiveHub.__init__

    def note(self: LiveHub, *args: Any) -> None:
        begin(self, *args)
        hubs.append(self)

    monkeypatch.setattr(LiveHub, "__init__", note)
    ring = ScriptedRing(["answer"])
    requests = [make_request(seq, request_id="x" * 900) for seq in range(60)]
    large = make_step(0, requests=requests, is_whole=True)  # more than 60 kB
    async with gateway_before(ring) as (_, gateway):
        url = gateway.args.url
        host, port = url.removeprefix("http://").split(":")
        silent = [await _connect_with_little_room(host, int(port)) for _ in range(100)]
        for _, writer in silent:
            writer.write(b"GET /v1/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/live") as response:
            page = Page(response)
            await page.until("history")
            for number in range(4 * MAX_BEHIND):
                ring.live.put_nowait(msgspec.structs.replace(large, number=number, step=number))
                assert (await page.until("live"))["steps"][0]["number"] == number
            async with session.post(f"{url}/v1/completions", json={"prompt": "a"}) as answer:
                assert answer.status == 200
        (hub,) = hubs
        behind = [len(viewer._events) for viewer in hub._viewers]
        assert len(behind) >= 100
        assert max(behind) <= MAX_BEHIND + 1
        assert all(viewer.num_dropped for viewer in hub._viewers if viewer._events)
        assert max(behind) > 1, "the pages have read all"
        for _, writer in silent:
            writer.close()
