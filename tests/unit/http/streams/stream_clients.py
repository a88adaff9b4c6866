"""Clients that read, leave and resume a stream of a gateway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp

from http_proc.core.gateway import Gateway
from http_proc.web.stream_rows import StreamRows
from tests.unit.scripted_ring import ScriptedRing, chunk, gateway_before

PIECES = ["One", " two", " three", " four"]
CHAT = {"messages": [{"role": "user", "content": "x"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "x"},
}


class OpenRing(ScriptedRing):
    """A ring whose requests go on until the test or an abort ends them."""

    def __init__(self, pieces: list[str]) -> None:
        super().__init__(pieces)
        self.leaves_open = True

    def finish(self, text: str = " end") -> None:
        self.handles[-1].done = True
        self.sinks[-1](chunk(text, self.completion()))

    async def abort(self, request_id: str) -> None:
        self.finish_reason = "abort"
        self.finish("")


@asynccontextmanager
async def streaming(
    gateway: Gateway,
    path: str = "/v1/completions",
    headers: dict[str, str] | None = None,
    **fields: Any,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the response to a request for a resumable stream."""
    body = {"stream": True, "resumable": True} | BODIES[path] | fields
    async with (
        aiohttp.ClientSession() as session,
        session.post(gateway.args.url + path, json=body, headers=headers) as response,
    ):
        yield response


@asynccontextmanager
async def reading(
    gateway: Gateway,
    stream_id: str,
    after: int | None = None,
    headers: dict[str, str] | None = None,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the response to a request for the rest of a stream."""
    query = "" if after is None else f"?starting_after={after}"
    url = f"{gateway.args.url}/v1/streams/{stream_id}{query}"
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        yield response


async def events_of(response: aiohttp.ClientResponse, count: int | None = None) -> list[bytes]:
    """Return the first events of a response, or all; comments are left out."""
    assert response.status == 200, await response.text()
    found: list[bytes] = []
    while count is None or len(found) < count:
        event = await response.content.readuntil(b"\n\n")
        if not event:
            break
        assert event.endswith(b"\n\n")
        if not event.startswith(b":"):
            found.append(event)
    return found


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@asynccontextmanager
async def gateway_on(directory: Path, ring: ScriptedRing, **flags: Any) -> AsyncIterator[Gateway]:
    """Run a gateway that keeps its rows in a directory."""
    with closing(StreamRows(directory)) as rows:
        async with gateway_before(ring, rows, api_key="mine,other", **flags) as (_, gateway):
            yield gateway


MINE, OTHER = ({"Authorization": f"Bearer {key}"} for key in ("mine", "other"))
