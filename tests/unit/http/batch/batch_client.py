"""A client of the endpoints of files and batches."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from http_proc.core.gateway import Gateway
from tests.unit.scripted_ring import ScriptedRing, gateway_before

CHAT = "/v1/chat/completions"


def ring(**facts: Any) -> ScriptedRing:
    return ScriptedRing(["Hel", "lo"], **{"running": 0, "waiting": 0, **facts})


def input_file(count: int, **body: Any) -> bytes:
    fields = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **body}
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": fields}
        for number in range(count)
    ]
    return b"\n".join(json.dumps(line).encode() for line in lines)


class Http:
    """The endpoints of one gateway."""

    def __init__(self, gateway: Gateway, session: aiohttp.ClientSession) -> None:
        self.url = gateway.args.url
        self.session = session

    async def upload(self, data: bytes, purpose: str = "batch") -> tuple[int, Any]:
        form = aiohttp.FormData()
        form.add_field("purpose", purpose)
        form.add_field("file", data, filename="in.jsonl")
        return await self.call("post", "/v1/files", data=form)

    async def call(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.request(method, self.url + path, **options) as answer:
            return answer.status, await answer.json(content_type=None)

    async def content(self, file_id: str) -> bytes:
        async with self.session.get(f"{self.url}/v1/files/{file_id}/content") as answer:
            assert answer.status == 200
            return await answer.read()

    async def start(self, data: bytes, **fields: Any) -> Any:
        _, file = await self.upload(data)
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        status, batch = await self.call("post", "/v1/batches", json={**body, **fields})
        assert status == 200, batch
        return batch

    async def until(self, batch: Any, *statuses: str) -> Any:
        while batch["status"] not in statuses:
            await asyncio.sleep(0.01)
            _, batch = await self.call("get", f"/v1/batches/{batch['id']}")
        return batch


@asynccontextmanager
async def http_before(scripted: ScriptedRing, **flags: Any) -> AsyncIterator[Http]:
    """Yield the endpoints of a gateway."""
    async with (
        gateway_before(scripted, **flags) as (_, gateway),
        aiohttp.ClientSession() as session,
    ):
        yield Http(gateway, session)


def ids(data: bytes) -> Counter[str]:
    return Counter(json.loads(line)["custom_id"] for line in data.splitlines())
