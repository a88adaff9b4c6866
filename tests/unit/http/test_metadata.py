"""Metadata has one bound in all APIs that take it."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.unit.scripted_ring import ScriptedRing, gateway_before

APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/conversations": {},
    "/v1/batches": {
        "input_file_id": "file-1",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    },
}
LARGEST = {f"{number:064}": "x" * 512 for number in range(16)}
REFUSED: list[tuple[dict[str, str], str]] = [
    (LARGEST | {"one": "more"}, "metadata has 17 pairs: at most 16 are taken; leave out 1"),
    ({"k" * 65: ""}, f"metadata has the key '{'k' * 65}' with 65 characters: at most 64 are taken;"
     " shorten it"),
    ({"a": "b" * 513}, "metadata has 'a' with 513 characters: at most 512 are taken; shorten it"),
]  # fmt: skip


@pytest.mark.parametrize("path", APIS)
async def test_metadata_has_one_bound(tmp_path: Path, path: str) -> None:
    async with (
        gateway_before(ScriptedRing(["No"]), data_dir=str(tmp_path)) as (_, gateway),
        aiohttp.ClientSession() as session,
    ):

        async def ask(metadata: dict[str, str] | None) -> tuple[int, Any]:
            body = APIS[path] | {"metadata": metadata}
            async with session.post(gateway.args.url + path, json=body) as answer:
                return answer.status, await answer.json()

        for metadata, message in REFUSED:
            status, body = await ask(metadata)
            error = body["error"]
            assert (status, error["message"], error["param"]) == (400, message, "metadata")
        status, body = await ask(LARGEST)
        if path == "/v1/batches":
            assert body["error"]["param"] == "input_file_id", "its metadata is right"
        else:
            assert status == 200 and body.get("metadata", LARGEST) == LARGEST


async def test_a_conversation_is_not_changed_to_more(tmp_path: Path) -> None:
    async with gateway_before(ScriptedRing([]), data_dir=str(tmp_path)) as (_, gateway):
        url = f"{gateway.args.url}/v1/conversations"
        async with aiohttp.ClientSession() as session:
            async with session.post(url, json={}) as made:
                talk = (await made.json())["id"]
            for metadata, message in REFUSED:
                async with session.post(f"{url}/{talk}", json={"metadata": metadata}) as answer:
                    error = (await answer.json())["error"]
                    assert (answer.status, error["message"]) == (400, message)
