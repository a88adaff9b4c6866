"""Prompts at one replica, tokens at another: tenants, resumable streams and forks stay as they are.

A tenant's requests count once wherever they go on, and shares hold where tokens are generated. A
stream that is cut, before its request goes on elsewhere or after it, has each event once.
"""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from bench.client.server import free_port
from quadriga.client import AsyncClient, Client, Completion, SamplingParams
from quadriga.errors import QuotaExceeded
from quadriga.server.tenants import hash_of_key
from quadriga.wire.client import gateway_address
from tests.faults.inject import ALL_APART, fault_environment
from tests.faults.resumed_streams import ResumedStreams, WrongStream
from tests.integration.role_servers import ROLES, facts, served, wait_until_back
from tests.server import Server, kill_tree, launch, stop, wait_until_ready
from tests.tcp_proxy import cut_connections

TIMEOUT_S = 120.0
PROMPTS = [[3 + n, *range(7, 7 + 9 * n), 5] for n in range(10)]
LONG = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)
ONE_TOKEN = SamplingParams(temperature=0, max_new_tokens=1)

pytestmark = pytest.mark.timeout(300)

# --- tenants --------------------------------------------------------------------------------------

ANSWERS = [LONG, SamplingParams(temperature=0.8, seed=4, n=3, max_new_tokens=40, ignore_eos=True)]


class TenantServer(NamedTuple):
    """A server with tenants.

    Attributes:
        endpoint: its public socket.
        usage_log: its file.
    """

    endpoint: str
    usage_log: Path

    def client(self) -> AsyncClient:
        """Return a client that may act as any tenant, as a gateway does."""
        return AsyncClient(self.endpoint, TIMEOUT_S, identity=gateway_address())

    def info(self) -> dict[str, Any]:
        """Return the info of the server at rest."""

        async def ask() -> dict[str, Any]:
            async with self.client() as client:
                while True:
                    info = await client.info()
                    if info["running"] == info["waiting"] == info["pages_held"] == 0:
                        return info
                    await asyncio.sleep(0.05)

        return asyncio.run(asyncio.wait_for(ask(), TIMEOUT_S))


@contextmanager
def served_to(
    directory: Path, model: Path, *flags: str, **tenants: Mapping[str, int]
) -> Iterator[TenantServer]:
    """Serve some tenants, whose prompts are computed apart. tenants: their limits by name."""
    entries = [
        {"name": name, "key": hash_of_key(name.encode()), **fields}
        for name, fields in tenants.items()
    ]
    keys, usage_log = directory / "keys.yaml", directory / "usage.jsonl"
    keys.write_text(json.dumps(entries))
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    flags = ("--model", str(model), "--dtype", "float32", *ROLES, "--keys", str(keys),
             "--insecure", "--usage-log", str(usage_log), *flags)  # fmt: skip
    log = directory / "log"
    process = launch(endpoint, *flags, log=log, environment=fault_environment(ALL_APART))
    try:
        wait_until_ready(process, log)
        yield TenantServer(endpoint, usage_log)
        assert stop(process) == 0
    finally:
        kill_tree(process)


def test_what_a_tenant_uses_counts_once(llama_dir: Path, tmp_path: Path) -> None:
    limit = 8000

    async def ask(client: AsyncClient) -> list[Completion]:
        """Return the choices of every prompt with every kind of parameters, all at once."""
        kinds = [(prompt, params) for prompt in PROMPTS for params in ANSWERS]
        handles = [client.submit(*kind, tenant="alice") for kind in kinds]
        found = [await handle.completion() for handle in handles]
        return [choice for first in found for choice in (first, *first.others)]

    async def use_up(client: AsyncClient) -> tuple[int, str]:
        """Return the tokens of further requests, and why the last one is refused."""
        num_used = 0
        while True:
            try:
                await client.submit([5] * 199, ONE_TOKEN, tenant="alice").completion()
            except QuotaExceeded as refused:
                return num_used, str(refused)
            num_used += 200

    async def run(server: TenantServer) -> tuple[list[Completion], int, str]:
        async with server.client() as client:
            choices = await ask(client)
            return choices, *await use_up(client)

    with served_to(tmp_path, llama_dir, alice={"tokens_per_minute": limit}) as server:
        choices, num_more, refusal = asyncio.run(run(server))
        info = server.info()
    num_prompt = len(ANSWERS) * sum(map(len, PROMPTS))
    num_generated = sum(len(choice.token_ids) for choice in choices)
    assert f"has used {num_prompt + num_generated + num_more} tokens" in refusal
    num_requests = num_more // 200
    requests, prompt_tokens, _cached, generated, _seconds = info["tenants"]["alice"]
    assert requests == len(ANSWERS) * len(PROMPTS) + num_requests
    assert prompt_tokens + generated == num_prompt + num_generated + num_more
    assert info["requests_handed_over"] == len(choices)
    lines = [json.loads(line) for line in server.usage_log.read_text().splitlines()]
    assert len({(line["request"], line["choice"]) for line in lines}) == len(lines)
    assert len(lines) == len(choices) + num_requests
    assert sum(line["tokens_out"] for line in lines) == generated
    assert sum(line["tokens_in"] for line in lines) == prompt_tokens


def test_a_request_that_has_gone_on_elsewhere_is_open_until_its_end(
    llama_dir: Path, tmp_path: Path
) -> None:
    async def run(server: TenantServer) -> None:
        async with server.client() as client:
            for _ in range(3):
                handles = [client.submit(PROMPTS[3], ENDLESS, tenant="alice") for _ in range(3)]
                for handle in handles:
                    await anext(aiter(handle))
                refused = client.submit(PROMPTS[4], ENDLESS, tenant="alice")
                with pytest.raises(QuotaExceeded, match="has 3 open requests"):
                    await refused.completion()
                for handle in handles:
                    assert len((await handle.completion()).token_ids) == ENDLESS.max_new_tokens

    with served_to(tmp_path, llama_dir, alice={"max_open_requests": 3}) as server:
        asyncio.run(run(server))
        assert server.info()["requests_handed_over"] == 9


def test_shares_hold_where_tokens_are_generated(llama_dir: Path, tmp_path: Path) -> None:
    """Each tenant has twice as many streams as a step has rows, and bob the weight 3."""
    tenants = {"alice": {"weight": 1}, "bob": {"weight": 3}}
    num_tokens = Counter[str]()
    counts: list[Counter[str]] = []

    async def stream(client: AsyncClient, tenant: str, number: int) -> None:
        async for chunk in client.submit([5 + number] * 9, ENDLESS, tenant=tenant):
            num_tokens[tenant] += len(chunk.token_ids)
            counts.append(num_tokens.copy())

    async def run(server: TenantServer) -> None:
        async with server.client() as client:
            streams = [stream(client, t, number) for number in range(8) for t in tenants]
            await asyncio.gather(*streams)

    with served_to(tmp_path, llama_dir, "--max-batch-size", "4", **tenants) as server:
        asyncio.run(run(server))
        assert server.info()["requests_handed_over"] == 16
    # By then all have gone on, and none has ended.
    begin = next(n for n in counts if n["bob"] >= 400)
    end = next(n for n in counts if n["bob"] >= 1000)
    shares = end - begin
    assert 2.2 <= shares["bob"] / shares["alice"] <= 3.8, shares


# --- resumable streams ----------------------------------------------------------------------------

NUM_STREAMS = 24


async def read_while_cutting(url: str, server: Server, kill: bool) -> tuple[list[object], int]:
    """Read streams whose connections are cut, while the frontend is killed or nothing.

    Returns:
        Their answers, and the number of connections beside the first of each.
    """
    async with cut_connections(url, seed=3) as proxy_url:
        load = ResumedStreams(proxy_url, TIMEOUT_S, NUM_STREAMS)
        reading = asyncio.ensure_future(load.run())
        if kill:
            await load.started.wait()
            os.kill(server.pid_of("tokenizer_proc"), signal.SIGKILL)
        answers: list[object] = list(await reading)
    return answers, load.num_resumed


@pytest.mark.parametrize("kill", [False, True], ids=["cut", "cut, and the frontend dies"])
def test_streams_that_are_cut_have_every_event_once(
    kill: bool, llama_dir: Path, tmp_path: Path
) -> None:
    port = free_port()
    flags = ["--port", str(port), "--data-dir", str(tmp_path / "data")]
    flags += ["--journal", str(tmp_path / "journal")]
    url = f"http://127.0.0.1:{port}"
    with served(tmp_path / "log", llama_dir, *ROLES, *flags) as server:
        expected = asyncio.run(ResumedStreams(url, TIMEOUT_S, NUM_STREAMS).run())
        assert not [answer for answer in expected if isinstance(answer, WrongStream)]
        num_before = facts(server)["requests_handed_over"]
        before = server.pid_of("tokenizer_proc")
        answers, num_resumed = asyncio.run(read_while_cutting(url, server, kill))
        if kill:
            wait_until_back(server, "tokenizer_proc", before)
            num_before = 0  # this frontend has counted from its start
        info = facts(server)
    assert [n for n in range(NUM_STREAMS) if answers[n] != expected[n]] == []
    assert num_resumed > NUM_STREAMS // 2
    assert info["requests_handed_over"] > num_before or kill


# --- forks ----------------------------------------------------------------------------------------


def test_a_fork_of_an_answer_from_two_replicas_is_the_rest_of_it(
    llama_dir: Path, tmp_path: Path
) -> None:
    kinds = [LONG, msgspec.structs.replace(LONG, temperature=1.0, seed=3)]
    with served(tmp_path / "log", llama_dir, *ROLES) as server:
        with Client(server.endpoint, TIMEOUT_S) as client:
            for params in kinds:
                answer = client.generate(PROMPTS[5], params)
                for at in (0, 1, 17, 59):
                    assert client.fork(answer, at, params).token_ids == answer.token_ids
        info = facts(server)
    assert info["requests_handed_over"] >= 2 * len(kinds)
    assert info["results_dropped"] == 0
