"""Web requests belong to the tenants of their keys, users or addresses."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from quadriga.server import tenants
from tests.unit.http.calls import answer_of, key_entry, key_file, send
from tests.unit.http.streams.stream_clients import streaming
from tests.unit.scripted_ring import TIMEOUT_S, ScriptedRing, gateway_before

# Far more than it takes, for a busy machine.
MAX_WAIT_S = 20.0
ASK = {"prompt": "a", "max_tokens": 4}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = key_file(tmp_path, alice="a-key")
    file.write_text(file.read_text() + key_entry("bob", "b-key", "  sub_tenants: true\n"))
    return file


async def ask(
    gateway: Any, body: dict[str, Any] = ASK, path: str = "/v1/completions", **headers: str
) -> int:
    """Return the status of an answer."""
    return (await send(gateway, path, body, **headers)).status


async def test_a_key_says_whose_a_request_is_and_a_wrong_one_is_refused(keys: Path) -> None:
    ring = ScriptedRing(["a"])
    async with gateway_before(ring, keys=str(keys), api_key="shared") as (_, gateway):
        assert await ask(gateway, Authorization="Bearer a-key") == 200
        assert await ask(gateway, X_Api_Key="b-key") == 200
        assert await ask(gateway, Authorization="Bearer shared") == 200
        assert await ask(gateway, Authorization="Bearer a-kez") == 401
        assert await ask(gateway) == 401
    assert ring.tenants == ["alice", "bob", ""]


async def test_with_a_key_file_no_request_passes_without_a_key(keys: Path) -> None:
    ring = ScriptedRing(["a"])
    async with gateway_before(ring, keys=str(keys)) as (_, gateway):
        assert await ask(gateway) == 401
        assert await ask(gateway, Authorization="Bearer ") == 401
    assert ring.tenants == []


async def test_users_are_taken_where_the_key_allows_them(keys: Path) -> None:
    ring = ScriptedRing(["a"])
    async with gateway_before(ring, keys=str(keys)) as (_, gateway):
        bob = {"Authorization": "Bearer b-key"}
        await ask(gateway, ASK | {"user": "u1"}, **bob)
        await ask(gateway, ASK | {"user": "u1"}, X_Quadriga_User="u2", **bob)
        await ask(gateway, ASK | {"user": "a/b c"}, **bob)
        await ask(gateway, ASK | {"user": "u1"}, Authorization="Bearer a-key")
    assert ring.tenants[:2] == ["bob/u1", "bob/u2"]
    assert ring.tenants[2].startswith("bob/") and len(ring.tenants[2]) == len("bob/") + 32
    assert ring.tenants[3] == "alice"


async def test_messages_name_their_user_in_the_metadata(keys: Path) -> None:
    ring = ScriptedRing(["a"])
    messages = [{"role": "user", "content": "a"}]
    body = {"model": "tiny", "max_tokens": 4, "messages": messages}
    async with gateway_before(ring, keys=str(keys)) as (_, gateway):
        bob = {"Authorization": "Bearer b-key"}
        for metadata in ({"user_id": "u1"}, {}, None):
            asked = body | {"metadata": metadata}
            assert await ask(gateway, asked, path="/v1/messages", **bob) == 200
    assert ring.tenants == ["bob/u1", "bob", "bob"]


async def test_a_key_that_is_added_works_and_a_removed_one_is_refused_at_the_next_request(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "CHECK_INTERVAL_S", 0.0)
    ring = ScriptedRing(["a"])
    async with gateway_before(ring, keys=str(keys)) as (_, gateway):
        assert await ask(gateway, Authorization="Bearer a-key") == 200
        keys.write_text(key_entry("carol", "c-key"))
        assert await ask(gateway, Authorization="Bearer a-key") == 401
        assert await ask(gateway, Authorization="Bearer c-key") == 200
        keys.write_text("- name: carol\n")
        assert await ask(gateway, Authorization="Bearer c-key") == 200


async def test_a_removed_key_is_refused_while_every_shared_thread_is_busy(keys: Path) -> None:
    ring, is_over = ScriptedRing(["a"]), threading.Event()
    async with gateway_before(ring, keys=str(keys)) as (_, gateway):
        loop = asyncio.get_running_loop()
        for _ in range(100):
            loop.run_in_executor(None, is_over.wait, TIMEOUT_S)
        assert await ask(gateway, Authorization="Bearer a-key") == 200
        keys.write_text(key_entry("carol", "c-key"))
        removed_at = loop.time()
        try:
            while await ask(gateway, Authorization="Bearer a-key") != 401:
                assert loop.time() - removed_at < MAX_WAIT_S
        finally:
            is_over.set()


async def test_a_key_file_with_an_error_is_shown_by_a_metric(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "CHECK_INTERVAL_S", 0.0)

    async def failed(gateway: Any) -> str:
        lines = (await send(gateway, "/metrics", Authorization="Bearer op")).text.splitlines()
        return next(line for line in lines if line.startswith("quadriga:key_file_failed"))[-3:]

    async with gateway_before(ScriptedRing(["a"], ready=False), keys=str(keys), api_key="op") as (
        _,
        gateway,
    ):
        text = keys.read_text()
        assert await failed(gateway) == "0.0"
        keys.write_text("")
        assert await ask(gateway, Authorization="Bearer a-key") == 200
        assert await failed(gateway) == "1.0"
        keys.write_text(text)
        assert await failed(gateway) == "0.0"


async def test_a_tenants_key_shows_no_name_and_no_usage_of_others(keys: Path) -> None:
    usage = {"alice": [1.0, 2.0, 3.0, 4.0, 0.5], "bob": [50.0, 60.0, 70.0, 80.0, 0.5]}
    ring = ScriptedRing(
        ["a"], ready=False, running=7, generation_tokens_total=84.0, tenants=usage, num_replicas=1
    )

    async def seen(gateway: Any, path: str, key: str) -> str:
        answer = await send(gateway, path, Authorization=f"Bearer {key}")
        assert answer.status == 200
        return answer.text

    async with gateway_before(ring, keys=str(keys), api_key="op") as (_, gateway):
        info = json.loads(await seen(gateway, "/server_info", "a-key"))
        assert info["tenants"] == {"alice": usage["alice"]}
        assert info["context_length"] == 100
        assert not {"running", "generation_tokens_total", "pids"} & info.keys()
        assert json.loads(await seen(gateway, "/server_info", "op"))["tenants"] == usage
        lines = (await seen(gateway, "/metrics", "a-key")).splitlines()
        samples = [line for line in lines if not line.startswith("#")]
        assert len([line for line in samples if "_total{" in line]) == 5
        assert all('tenant="alice"' in line for line in samples)
        everything = await seen(gateway, "/metrics", "op")
        assert "http_requests_live" in everything


async def test_batches_and_background_responses_of_one_tenant_leave_slots_for_others(
    keys: Path, tmp_path: Path
) -> None:
    ring = ScriptedRing(["a"], running=0, waiting=0, leaves_open=True)

    flags = {"max_background_responses": 6, "max_open_batches": 6}
    async with gateway_before(
        ring, keys=str(keys), api_key="op", data_dir=str(tmp_path), **flags
    ) as (_, gateway):
        alice, bob = ({"Authorization": f"Bearer {key}"} for key in ("a-key", "b-key"))
        background = {"input": "a", "background": True}
        asked = [await ask(gateway, background, "/v1/responses", **alice) for _ in range(6)]
        assert asked == [200, 200, 200, 200, 429, 429]
        assert await ask(gateway, background, "/v1/responses", **bob) == 200
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": ASK}
        for headers, expected in ((alice, [200] * 4 + [429]), (bob, [200])):
            form = aiohttp.FormData({"purpose": "batch"})
            form.add_field("file", json.dumps(line), filename="a")
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.post(f"{gateway.args.url}/v1/files", data=form) as response,
            ):
                file = (await response.json())["id"]
            batch = {"input_file_id": file, "endpoint": "/v1/completions"}
            batch["completion_window"] = "24h"
            started = [await ask(gateway, batch, "/v1/batches", **headers) for _ in expected]
            assert started == expected


def test_without_keys_requests_can_belong_to_addresses() -> None:
    ring = ScriptedRing(["a"])
    assert answer_of(ring, "/v1/completions", ASK, tenants_by="address").status == 200
    assert answer_of(ring, "/v1/completions", ASK).status == 200
    assert ring.tenants == ["127.0.0.1", ""]


async def test_a_tenant_ends_only_its_own_requests(keys: Path) -> None:
    ring = ScriptedRing(["a"], leaves_open=True)
    async with gateway_before(ring, keys=str(keys)) as (_, gateway):
        bob, alice = ({"Authorization": f"Bearer {key}"} for key in ("b-key", "a-key"))
        async with streaming(gateway, headers=bob) as response:
            await response.content.readany()
            answer = await send(gateway, "/abort_request", {"abort_all": True}, **alice)
            assert answer.body["aborted"] == 0


async def test_the_cache_of_all_tenants_is_flushed_with_an_operators_key(keys: Path) -> None:
    ring, flushes = ScriptedRing(["a"]), []

    async def flush_cache() -> int:
        flushes.append(1)
        return 3

    ring.flush_cache = flush_cache  # type: ignore[attr-defined]
    async with gateway_before(ring, keys=str(keys), api_key="shared") as (_, gateway):
        path = "/flush_cache"
        assert await ask(gateway, path=path, Authorization="Bearer a-key") == 403
        assert await ask(gateway, path=path, Authorization="Bearer shared") == 200
    assert len(flushes) == 1
