"""Messages that a dying process had not read, or not passed on, are not lost."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quadriga.client import AsyncClient, Completion, SamplingParams
from quadriga.client.request_handle import RequestHandle
from tests.server import Server, running_server, settle, wait_until

RING = ("worker_proc", "scheduler_proc", "detok_proc", "tokenizer_proc")
REQUESTS = 40
TIMEOUT_S = 40.0
LONG = SamplingParams(temperature=0, max_new_tokens=120, ignore_eos=True)


@pytest.fixture(scope="module")
def own_server(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1"]
    flags += ["--max-total-tokens", "8192", "--max-restarts", "100"]
    with running_server(tmp_path_factory.mktemp("kept") / "log", *flags) as server:
        yield server


def submit_all(client: AsyncClient) -> list[RequestHandle]:
    """Submit greedy and seeded requests, streams and others, of one choice and three."""
    return [
        client.submit(
            [3 + n, 5, 7],
            SamplingParams(
                temperature=n % 2,
                seed=n,
                max_new_tokens=5 + n,
                ignore_eos=True,
                n=1 + n % 5 // 4 * 2,
            ),
            stream=n % 3 > 0,
        )
        for n in range(REQUESTS)
    ]


async def results(handles: list[RequestHandle]) -> list[tuple[list[int], str]]:
    async def complete(handle: RequestHandle) -> Completion:
        return await asyncio.wait_for(handle.completion(), TIMEOUT_S)

    ended = await asyncio.gather(*map(complete, handles))
    return [(c.token_ids, c.text) for first in ended for c in (first, *first.others)]


def send(server: Server, name: str, number: signal.Signals) -> None:
    os.kill(server.pid_of(name), number)


@pytest.fixture(scope="module")
def undisturbed(own_server: Server) -> list[tuple[list[int], str]]:
    async def run() -> list[tuple[list[int], str]]:
        async with AsyncClient(own_server.endpoint) as client:
            return await results(submit_all(client))

    return asyncio.run(run())


@pytest.mark.parametrize("names", [*((name,) for name in RING), RING], ids="+".join)
def test_requests_that_came_while_processes_stood_still_before_they_died_are_answered(
    own_server: Server, undisturbed: list[tuple[list[int], str]], names: tuple[str, ...]
) -> None:
    async def run() -> list[tuple[list[int], str]]:
        async with AsyncClient(own_server.endpoint) as client:
            for name in names:
                send(own_server, name, signal.SIGSTOP)
            handles = submit_all(client)
            await asyncio.sleep(0.3)  # the messages reach the sockets of stopped processes
            for name in names:
                send(own_server, name, signal.SIGKILL)
            return await results(handles)

    assert asyncio.run(run()) == undisturbed
    wait_until(lambda: settle(own_server.endpoint)["open_requests"] == 0, TIMEOUT_S)


def kill_the_detokenizer(server: Server) -> None:
    send(server, "detok_proc", signal.SIGKILL)
    send(server, "tokenizer_proc", signal.SIGCONT)


def kill_the_frontend(server: Server) -> None:
    send(server, "tokenizer_proc", signal.SIGKILL)


def kill_both(server: Server) -> None:
    send(server, "detok_proc", signal.SIGKILL)
    send(server, "tokenizer_proc", signal.SIGKILL)


@pytest.mark.parametrize("strike", [kill_the_detokenizer, kill_the_frontend, kill_both])
def test_ends_that_a_stopped_frontend_did_not_read_are_delivered_later(
    own_server: Server, undisturbed: list[tuple[list[int], str]], strike: Callable[[Server], None]
) -> None:
    async def run() -> list[tuple[list[int], str]]:
        async with AsyncClient(own_server.endpoint) as client:
            handles = submit_all(client)
            await asyncio.wait_for(handles[1].__anext__(), TIMEOUT_S)
            send(own_server, "tokenizer_proc", signal.SIGSTOP)
            await asyncio.sleep(1.0)  # the others end, which the stopped frontend cannot report
            strike(own_server)
            return await results(handles)

    assert asyncio.run(run()) == undisturbed
    wait_until(lambda: settle(own_server.endpoint)["open_requests"] == 0, TIMEOUT_S)


def test_an_abort_that_a_scheduler_did_not_see_before_it_died_is_heeded_by_the_next(
    own_server: Server,
) -> None:
    async def run() -> None:
        async with AsyncClient(own_server.endpoint) as client:
            handles = [client.submit([3 + n, 5], LONG) for n in range(4)]
            await asyncio.wait_for(handles[3].__anext__(), TIMEOUT_S)
            send(own_server, "scheduler_proc", signal.SIGSTOP)
            for handle in handles:
                await client.abort(handle.request_id)
            await asyncio.sleep(0.3)  # the aborts reach the socket of the stopped scheduler
            send(own_server, "scheduler_proc", signal.SIGKILL)
            ended = [await asyncio.wait_for(handle.completion(), TIMEOUT_S) for handle in handles]
            assert {completion.finish_reason for completion in ended} == {"abort"}

    asyncio.run(run())
    assert settle(own_server.endpoint)["pages_held"] == 0
