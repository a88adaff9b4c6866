"""Metadata has one bound in all APIs that take it."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.http.calls import send
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
    async with gateway_before(ScriptedRing(["No"]), data_dir=str(tmp_path)) as (_, gateway):
        for metadata, message in REFUSED:
            answer = await send(gateway, path, APIS[path] | {"metadata": metadata})
            error = answer.body["error"]
            assert (answer.status, error["message"], error["param"]) == (400, message, "metadata")
        answer = await send(gateway, path, APIS[path] | {"metadata": LARGEST})
        if path == "/v1/batches":
            assert answer.body["error"]["param"] == "input_file_id", "its metadata is right"
        else:
            assert answer.status == 200 and answer.body.get("metadata", LARGEST) == LARGEST


async def test_a_conversation_is_not_changed_to_more(tmp_path: Path) -> None:
    async with gateway_before(ScriptedRing([]), data_dir=str(tmp_path)) as (_, gateway):
        path = "/v1/conversations"
        talk = (await send(gateway, path, {})).body["id"]
        for metadata, message in REFUSED:
            answer = await send(gateway, f"{path}/{talk}", {"metadata": metadata})
            assert (answer.status, answer.body["error"]["message"]) == (400, message)
