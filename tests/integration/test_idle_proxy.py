"""A stream that waits in the queue passes a proxy that closes silent connections."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from bench.client.server import free_port
from tests.faults.idle_proxy import FLAGS, answer_through, idle_proxy
from tests.server import Server, running_server, settle

IDLE_S, WAIT_S = 2.0, 6.0


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def own_server(
    llama_dir: Path, port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = ["--model", str(llama_dir), "--dtype", "float32", *FLAGS]
    flags += ["--port", str(port), "--sse-ping-interval", "1"]
    with running_server(tmp_path_factory.mktemp("proxy") / "log", *flags) as server:
        yield server


@pytest.mark.timeout(60)
def test_a_request_that_waits_longer_than_the_idle_limit_is_answered(
    own_server: Server, port: int
) -> None:
    async def run() -> None:
        async with idle_proxy(port, IDLE_S) as proxy:
            lines = await answer_through(proxy, own_server, WAIT_S)
            assert proxy.num_closed == 0
        comments = [line for line in lines if line.startswith(":")]
        assert len(comments) >= 3 and set(comments) <= {": queued 1", ": prefill 0 %"}
        assert lines[-1] == "data: [DONE]" and lines[-2].startswith('data: {"id"')

    asyncio.run(asyncio.wait_for(run(), 40))


@pytest.mark.timeout(60)
def test_a_client_that_leaves_a_queued_stream_ends_its_request(
    own_server: Server, port: int
) -> None:
    async def run() -> None:
        async with idle_proxy(port, 0.5) as proxy:  # less than the interval of the comments
            with pytest.raises(aiohttp.ClientError):
                # Long enough to be running still when the server hears of the client's end.
                await answer_through(proxy, own_server, 3.0, max_tokens=100)
            assert proxy.num_closed == 1

    asyncio.run(asyncio.wait_for(run(), 40))
    assert settle(own_server.endpoint)["aborts"]["client"] == 1
