"""What stored items unpack to is bounded before the work, for one request and for all together."""

import asyncio
import gzip
import json
import random
import sqlite3
import tracemalloc
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from http_proc.apis.responses import stored_responses, tables
from http_proc.apis.responses.tables import StoredItem, Unpacker, packed
from http_proc.core.call import MAX_CONTAINERS, num_containers
from http_proc.core.gateway import Gateway
from tests.unit.http.calls import key_file
from tests.unit.scripted_ring import ScriptedRing, gateway_before

MEGABYTE = 1_000_000


class Http:
    """The endpoints of one gateway, for one key."""

    def __init__(self, gateway: Gateway, session: aiohttp.ClientSession) -> None:
        self.gateway = gateway
        self._session = session

    async def call(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Any]:
        data = None if body is None else gzip.compress(json.dumps(body).encode(), 1)
        headers |= {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        url = self.gateway.args.url + path
        async with self._session.request(method, url, data=data, headers=headers) as answer:
            text = await answer.read()
            return answer.status, json.loads(text) if text.startswith(b"{") else text

    async def conversation(self, *items: Any) -> str:
        status, made = await self.call("POST", "/v1/conversations", {"items": items[:1]})
        assert status == 200, made
        for item in items[1:]:
            path = f"/v1/conversations/{made['id']}/items"
            assert (await self.call("POST", path, {"items": [item]}))[0] == 200
        name: str = made["id"]
        return name


def item(item_id: str, num_chars: int) -> dict[str, Any]:
    return {"role": "user", "id": item_id, "content": "a" * num_chars}


@asynccontextmanager
async def http_before(directory: Path, ring: Any = None, **flags: Any) -> AsyncIterator[Http]:
    async with (
        gateway_before(ring or ScriptedRing(["No"]), data_dir=str(directory), **flags) as (_, own),
        aiohttp.ClientSession(headers={"Authorization": "Bearer a-key"}) as session,
    ):
        yield Http(own, session)


async def peak_of(work: Awaitable[Any]) -> tuple[Any, int]:
    """Return the result of some work, and the bytes that were held at most meanwhile."""
    tracemalloc.start()
    try:
        return await work, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


async def test_an_item_that_is_referred_to_often_is_refused_before_it_is_loaded(
    tmp_path: Path,
) -> None:
    async with http_before(tmp_path) as http:
        await http.conversation(item("big", 4 * MEGABYTE))
        many = {"input": [{"type": "item_reference", "id": "big"}] * 4096}
        (status, body), peak = await peak_of(http.call("POST", "/v1/responses", many))
        assert status == 400
        assert "input[1].id is 'big', which input[0] has too" in body["error"]["message"]
        assert peak < 4 * MEGABYTE


@pytest.mark.parametrize("kind", ["references", "conversation", "chain"])
async def test_stored_items_beyond_the_size_of_a_body_are_refused_after_that_size(
    tmp_path: Path, kind: str
) -> None:
    async with http_before(tmp_path, max_body_bytes=4 * MEGABYTE) as http:
        items = [item(f"i{number}", MEGABYTE) for number in range(12)]
        body: dict[str, Any] = {"input": "x"}
        if kind == "chain":
            previous = None
            for one in items:
                if previous:
                    body["previous_response_id"] = previous
                given = {**body, "input": [one]}
                status, made = await http.call("POST", "/v1/responses", given)
                if status != 200:
                    break
                previous = made["id"]
            assert previous
        else:
            name = await http.conversation(*items)
            references = [{"type": "item_reference", "id": one["id"]} for one in items]
            body |= {"input": references} if kind == "references" else {"conversation": name}
            (status, made), peak = await peak_of(http.call("POST", "/v1/responses", body))
            assert peak < 20 * MEGABYTE
        assert status == 400
        assert made["error"]["code"] == "stored_items_too_large"
        assert "--max-body-bytes" in made["error"]["message"]
        assert http.gateway.stored_items.total == 0


async def test_a_page_of_large_items_has_those_that_fit_and_the_next_pages_the_rest(
    tmp_path: Path,
) -> None:
    sizes = [3 * MEGABYTE, 2 * MEGABYTE, 100, 6 * MEGABYTE, 3 * MEGABYTE, 2 * MEGABYTE, 100, 100]
    async with http_before(tmp_path) as http:
        items = [item(f"i{number}", size) for number, size in enumerate(sizes)]
        name = await http.conversation(*items)
        path, seen, pages = f"/v1/conversations/{name}/items?order=asc&limit=100", [], []
        after = ""
        while True:
            (status, listed), peak = await peak_of(http.call("GET", path + after))
            assert status == 200 and listed["data"]
            assert peak < 60 * MEGABYTE
            pages.append(len(listed["data"]))
            seen += [one["id"] for one in listed["data"]]
            assert (listed["first_id"], listed["last_id"]) == (seen[-pages[-1]], seen[-1])
            if not listed["has_more"]:
                break
            after = f"&after={listed['last_id']}"
        assert seen == [f"i{number}" for number in range(len(sizes))]
        assert len(pages) > 3


async def test_items_of_open_requests_have_a_bound_together_until_the_requests_end(
    tmp_path: Path,
) -> None:
    ring = ScriptedRing(["No"], leaves_open=True)
    async with http_before(tmp_path, ring) as http:
        held = http.gateway.stored_items
        held.limit = 5 * MEGABYTE
        name = await http.conversation(item("big", 2 * MEGABYTE))
        body = {"input": "x", "conversation": name}
        opened = [asyncio.create_task(http.call("POST", "/v1/responses", body)) for _ in range(2)]
        while len(ring.submitted) < 2:
            await asyncio.sleep(0.01)
        assert held.total > 4 * MEGABYTE
        status, refused = await http.call("POST", "/v1/responses", body)
        assert (status, refused["error"]["code"]) == (503, "too_many_stored_items")
        for task in opened:
            task.cancel()
        await asyncio.gather(*opened, return_exceptions=True)
        while held.total:
            await asyncio.sleep(0.01)
        ring.leaves_open = False
        assert (await http.call("POST", "/v1/responses", body))[0] == 200


async def test_a_background_response_holds_its_items_until_it_ends(tmp_path: Path) -> None:
    ring = ScriptedRing(["No"], leaves_open=True)
    async with http_before(tmp_path, ring) as http:
        held = http.gateway.stored_items
        name = await http.conversation(item("big", 2 * MEGABYTE))
        body = {"input": "x", "conversation": name, "background": True}
        status, made = await http.call("POST", "/v1/responses", body)
        assert status == 200
        while held.total > 3 * MEGABYTE:  # the request that started it has ended
            await asyncio.sleep(0.01)
        assert held.total > 2 * MEGABYTE
        held.limit = 3 * MEGABYTE
        assert (await http.call("POST", "/v1/responses", body))[0] == 503
        assert (await http.call("POST", f"/v1/responses/{made['id']}/cancel"))[0] == 200
        while held.total:
            await asyncio.sleep(0.01)


async def test_a_stored_stream_is_read_in_pieces_from_any_event_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_responses, "READ_BYTES", 100)
    monkeypatch.setattr(tables, "PIECE_BYTES", 37)
    async with http_before(tmp_path) as http:
        body = {"input": "x", "instructions": "word " * 500}
        _, made = await http.call("POST", "/v1/responses", body)
        path = f"/v1/responses/{made['id']}?stream=true"
        _, whole = await http.call("GET", path)
        events = [event + b"\n\n" for event in whole.split(b"\n\n")[:-1]]
        assert len(events) > 5
        for number in range(len(events) + 2):
            _, rest = await http.call("GET", f"{path}&starting_after={number}")
            assert rest == b"".join(events[number + 1 :])


def test_no_more_is_unpacked_than_the_bound_allows() -> None:
    body = {"content": "a" * 10 * MEGABYTE}
    bomb = StoredItem("i", packed(body))
    assert len(bomb.data) < 100_000
    tracemalloc.start()
    try:
        assert Unpacker(MEGABYTE).body(bomb) is None
        assert tracemalloc.get_traced_memory()[1] < 3 * MEGABYTE
    finally:
        tracemalloc.stop()
    unpacker = Unpacker(10 * MEGABYTE + 14)
    assert unpacker.body(bomb) == body
    assert unpacker.body(StoredItem("j", packed({}))) is None


def test_the_objects_and_arrays_of_all_items_are_bounded() -> None:
    unpacker = Unpacker(100 * MEGABYTE)
    half = StoredItem("i", packed({"content": [[]] * (MAX_CONTAINERS // 2)}))
    assert unpacker.body(half) is not None
    assert unpacker.body(half) is None


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ({"a": "{" * 100}, 1),
        ({"a": '"[' * 100, "b": [[], {}] * 20}, 42),
        ({"\\": "\\[[[[[[[[[[[[[[[[[[[", "x": "\\\\"}, 1),
    ],
)
def test_braces_within_texts_are_no_objects(value: Any, count: int) -> None:
    assert num_containers(json.dumps(value).encode()) == count


@pytest.fixture
def tenants(tmp_path: Path) -> dict[str, Any]:
    return {"keys": str(key_file(tmp_path, alice="a-key", bob="b-key", tiny="t-key"))}


async def test_what_one_tenant_stores_does_not_remove_what_others_have(
    tmp_path: Path, tenants: dict[str, Any]
) -> None:
    async with http_before(tmp_path / "data", max_stored_responses=20, **tenants) as http:
        bob = {"Authorization": "Bearer b-key"}
        _, response = await http.call("POST", "/v1/responses", {"input": "x"}, **bob)
        _, conversation = await http.call("POST", "/v1/conversations", {}, **bob)
        first = await http.conversation()
        for _ in range(30):
            await http.conversation()
        for path in (f"/v1/responses/{response['id']}", f"/v1/conversations/{conversation['id']}"):
            assert (await http.call("GET", path, **bob))[0] == 200
        status, gone = await http.call("GET", f"/v1/conversations/{first}")
        assert (status, gone["error"]["code"]) == (404, "conversation_expired")


async def test_bytes_of_one_tenant_do_not_remove_what_others_have_and_too_large_ones_are_refused(
    tmp_path: Path, tenants: dict[str, Any]
) -> None:
    async with http_before(tmp_path / "data", max_stored_bytes=MEGABYTE, **tenants) as http:
        bob = {"Authorization": "Bearer b-key"}
        _, response = await http.call("POST", "/v1/responses", {"input": "x"}, **bob)
        draw = random.Random(1)
        noise = [{"role": "user", "content": draw.randbytes(50).hex()} for _ in range(500)]
        for _ in range(12):
            assert (await http.call("POST", "/v1/conversations", {"items": noise}))[0] == 200
        assert (await http.call("GET", f"/v1/responses/{response['id']}", **bob))[0] == 200
        long = draw.randbytes(MEGABYTE).hex()
        body = {"items": [{"role": "user", "content": long}]}
        status, refused = await http.call("POST", "/v1/conversations", body)
        assert (status, refused["error"]["code"]) == (507, "object_too_large")
        status, refused = await http.call("POST", "/v1/responses", {"input": long})
        assert (status, refused["error"]["code"]) == (413, "object_too_large")
        assert (await http.call("GET", f"/v1/responses/{response['id']}", **bob))[0] == 200


def test_a_file_of_an_earlier_version_gets_the_usage_of_its_tenants(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "file", isolation_level=None)
    connection.execute("PRAGMA foreign_keys = ON")
    connection.executescript(tables.SCHEMA)

    def add(tenant: str, name: str) -> tables.StoredObject:
        kind = tables.ObjectKind.RESPONSE
        owner = tables.add_object(connection, kind, name, tenant, 1.0, {"a": name}, is_open=True)
        tables.set_job(connection, owner, b"job")
        tables.add_items(connection, owner, [{"id": "1"}, {"id": "2"}], is_output=False)
        return owner

    def expected() -> dict[str, tuple[int, int]]:
        sizes: dict[str, tuple[int, int]] = {}
        for seq, tenant in connection.execute("SELECT seq, tenant FROM objects").fetchall():
            queries = (
                "SELECT length(body) + length(events) FROM contents WHERE owner = ?",
                "SELECT length(data) FROM jobs WHERE owner = ?",
                "SELECT length(data) FROM items WHERE owner = ?",
            )
            rows = [row for query in queries for row in connection.execute(query, (seq,))]
            num, num_bytes = sizes.get(tenant, (0, 0))
            sizes[tenant] = (num + 1, num_bytes + sum(size for (size,) in rows))
        return sizes

    first = add("alice", "r1")
    add("bob", "r2")
    for _ in range(2):
        tables.add_missing(connection)
        assert tables.usage(connection) == expected()
    third = add("alice", "r3")
    tables.close_object(connection, first, {"a": "closed"}, b"events" * 100)
    tables.remove_item(connection, third, "1")
    assert tables.usage(connection) == expected()
    tables.remove(connection, third.seq, "deleted")
    assert tables.usage(connection) == expected() and set(expected()) == {"alice", "bob"}
    tables.remove(connection, first.seq, "deleted")
    assert tables.usage(connection) == expected() and set(expected()) == {"bob"}
    connection.close()
