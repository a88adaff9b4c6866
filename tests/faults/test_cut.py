"""A client whose connection is cut repeatedly gets every answer exactly once."""

import asyncio
import random

import pytest

from quadriga.client import AsyncClient, SamplingParams
from tests.server import Server, settle, wait_until
from tests.tcp_proxy import TcpProxy

REQUESTS = 48
NUM_CUTS = 12
TIMEOUT_S = 40.0
# It is encoded by another process, and truncated to the context.
LONG_TEXT = "The quick brown fox jumps over the lazy dog. " * 100

Answers = list[list[tuple[list[int], str]]]


async def ask(client: AsyncClient, number: int) -> list[tuple[list[int], str]]:
    """Send a request of four kinds: a long text, a stream, a pattern, several choices."""
    kind = number % 4
    params = SamplingParams(
        temperature=0,
        max_new_tokens=(8, 60, 20, 30)[kind],
        ignore_eos=kind != 2,
        regex=f"[a-z]{{{3 + number % 9},12}}" if kind == 2 else None,
        n=2 if kind == 3 else 1,
    )
    prompt = f"{number} {LONG_TEXT}" if kind == 0 else [3 + number] * 8
    handle = client.submit(prompt, params, stream=number % 3 > 0, truncate_prompt=True)
    first = await asyncio.wait_for(handle.completion(), TIMEOUT_S)
    return [(choice.token_ids, choice.text) for choice in (first, *first.others)]


async def undisturbed(endpoint: str) -> Answers:
    async with AsyncClient(endpoint) as client:
        return await asyncio.gather(*(ask(client, number) for number in range(REQUESTS)))


async def while_cutting(endpoint: str, chance: random.Random, pause: float) -> Answers:
    """Cut at random moments, at most `pause` seconds apart, while requests arrive and run."""
    proxy = TcpProxy()

    async def cut() -> None:
        for _ in range(NUM_CUTS):
            await asyncio.sleep(chance.random() * pause)
            proxy.cut()

    async def late(client: AsyncClient, number: int) -> list[tuple[list[int], str]]:
        await asyncio.sleep(chance.random() * pause * NUM_CUTS / 2)
        return await ask(client, number)

    async with proxy.open(endpoint) as cuttable, AsyncClient(cuttable) as client:
        cutting = asyncio.ensure_future(cut())
        answers = await asyncio.gather(*(late(client, number) for number in range(REQUESTS)))
        await cutting
    return answers


@pytest.mark.timeout(150)
@pytest.mark.parametrize("pause", [0.15, 0.6])
def test_every_answer_is_the_undisturbed_one(server: Server, pause: float) -> None:
    expected = asyncio.run(undisturbed(server.endpoint))
    for seed in range(2):
        got = asyncio.run(while_cutting(server.endpoint, random.Random(seed), pause))
        assert [n for n in range(REQUESTS) if got[n] != expected[n]] == []
    wait_until(lambda: settle(server.endpoint)["open_requests"] == 0, TIMEOUT_S)
