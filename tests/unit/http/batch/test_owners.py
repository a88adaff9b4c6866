"""Files and batches belong to the tenant whose key made them, and lines run as that tenant."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from http_proc.jobs import batch_job
from quadriga.errors import QueueFull
from quadriga.server.tenants import hash_of_key
from tests.unit.http.batch.batch_client import Http, input_file, ring
from tests.unit.scripted_ring import ScriptedHandle, ScriptedRing, gateway_before

ALICE, BOB, OPERATOR = ({"Authorization": f"Bearer {key}"} for key in ("a-key", "b-key", "op"))


@pytest.fixture
def flags(tmp_path: Path) -> dict[str, Any]:
    entries = [("alice", "a-key", ""), ("bob", "b-key", "\n  sub_tenants: true")]
    text = "".join(
        f"- name: {name}\n  key: {hash_of_key(key.encode())}\n  max_files_bytes: 6000{more}\n"
        for name, key, more in entries
    )
    keys = tmp_path / "keys.yaml"
    keys.write_text(text)
    return {"keys": str(keys), "api_key": "op", "data_dir": str(tmp_path / "data")}


@asynccontextmanager
async def clients_before(
    scripted: ScriptedRing, **flags: Any
) -> AsyncIterator[tuple[Http, Http, Http]]:
    """Yield the endpoints as alice, bob and the operator see them."""
    async with (
        gateway_before(scripted, **flags) as (_, gateway),
        aiohttp.ClientSession(headers=ALICE) as alice,
        aiohttp.ClientSession(headers=BOB) as bob,
        aiohttp.ClientSession(headers=OPERATOR) as operator,
    ):
        yield Http(gateway, alice), Http(gateway, bob), Http(gateway, operator)


async def test_a_file_of_another_tenant_is_neither_listed_nor_used(flags: dict[str, Any]) -> None:
    async with clients_before(ring(), **flags) as (alice, bob, operator):
        status, file = await alice.upload(b"mine")
        assert (status, file["tenant"]) == (200, "alice")
        path = f"/v1/files/{file['id']}"
        batch = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
        tries: list[tuple[str, str, dict[str, Any]]] = [
            ("get", path, {}),
            ("get", f"{path}/content", {}),
            ("delete", path, {}),
            ("post", "/v1/batches", {"json": batch | {"completion_window": "24h"}}),
        ]
        for method, of, options in tries:
            status, body = await bob.call(method, of, **options)
            assert (status, body["error"]["code"]) == (403, "not_yours")
        unknown = f"/v1/files/file-{'0' * 32}"
        assert (await bob.call("get", unknown))[0] == 404
        listed = [(await http.call("get", "/v1/files"))[1]["data"] for http in (alice, bob)]
        assert listed == [[file], []]
        assert (await operator.call("get", "/v1/files"))[1]["data"] == [file]
        assert await operator.content(file["id"]) == b"mine"
        assert (await alice.call("delete", path))[0] == 200


async def test_a_batch_and_its_output_are_of_its_tenant_also_after_a_restart(
    flags: dict[str, Any],
) -> None:
    batches = []
    async with clients_before(ring(), **flags) as (_, bob, _):
        batch = await bob.until(await bob.start(input_file(2)), "completed")
        batches.append(batch)
    async with clients_before(ring(), **flags) as (alice, bob, operator):
        (batch,) = batches
        path = f"/v1/batches/{batch['id']}"
        for method, of in (("get", path), ("post", f"{path}/cancel")):
            status, body = await alice.call(method, of)
            assert (status, body["error"]["code"]) == (403, "not_yours")
        output = f"/v1/files/{batch['output_file_id']}"
        assert (await alice.call("get", f"{output}/content"))[0] == 403
        assert (await alice.call("get", "/v1/batches"))[1]["data"] == []
        for http in (bob, operator):
            assert (await http.call("get", "/v1/batches"))[1]["data"] == [batch]
            assert (await http.call("get", output))[1]["tenant"] == "bob"


async def test_lines_run_as_the_tenant_and_the_user_that_made_the_batch(
    flags: dict[str, Any],
) -> None:
    scripted = ring()
    async with clients_before(scripted, **flags) as (alice, bob, operator):
        await alice.until(await alice.start(input_file(1, user="x")), "completed")
        await bob.until(await bob.start(input_file(1, user="u1")), "completed")
        bob.session.headers["X-Quadriga-User"] = "u2"
        await bob.until(await bob.start(input_file(1, user="u1")), "completed")
        await operator.until(await operator.start(input_file(1)), "completed")
    assert scripted.tenants == ["alice", "bob/u1", "bob/u2", ""]


async def test_a_tenant_stores_so_many_bytes(flags: dict[str, Any]) -> None:
    async with clients_before(ring(), **flags) as (alice, bob, operator):
        status, file = await alice.upload(b"x" * 4000)
        assert status == 200
        status, body = await alice.upload(b"x" * 2001)
        assert (status, body["error"]["code"]) == (507, "no_space")
        assert "files of tenant alice would have more than 6000 bytes" in body["error"]["message"]
        assert (await alice.upload(b"x" * 2000))[0] == 200
        assert (await bob.upload(b"x" * 6000))[0] == 200
        assert (await operator.upload(b"x" * 6001))[0] == 200
        assert (await alice.call("delete", f"/v1/files/{file['id']}"))[0] == 200
        assert (await alice.upload(b"x" * 4000))[0] == 200


class QuotaRing(ScriptedRing):
    """A ring that refuses all requests of one tenant."""

    def _answer(self, handle: ScriptedHandle, sink: Any) -> None:
        self.error = QueueFull("no tokens are left", 60.0) if self.tenants[-1] == "alice" else None
        super()._answer(handle, sink)


async def test_a_batch_that_is_over_its_quota_does_not_hold_back_others(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_job, "MIN_RETRY_S", 60.0)
    scripted = QuotaRing(["a"], running=0, waiting=0)
    async with clients_before(scripted, batch_concurrency=2, **flags) as (alice, bob, _):
        stuck = await alice.start(input_file(4))
        while len(scripted.handles) < 2:
            await asyncio.sleep(0.01)
        await bob.until(await bob.start(input_file(3)), "completed")
        _, stuck = await alice.call("get", f"/v1/batches/{stuck['id']}")
        assert stuck["status"] == "in_progress"
        assert scripted.tenants == ["alice"] * 2 + ["bob"] * 3


async def test_output_of_before_there_were_tenants_is_read(
    tmp_path: Path, flags: dict[str, Any]
) -> None:
    async with clients_before(ring(), **flags) as (alice, _, operator):
        _, file = await operator.upload(b"old")
        assert "tenant" not in file
        (path,) = Path(flags["data_dir"]).glob("files/*.json")
        assert "tenant" not in json.loads(path.read_bytes())
        assert (await alice.call("get", f"/v1/files/{file['id']}"))[0] == 403
