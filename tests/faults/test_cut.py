"""A client whose connection is cut again and again has every answer, and none of them twice."""

import asyncio
import random
import time

import pytest

from quadriga.client import AsyncClient, SamplingParams
from tests.server import Server, settle, wait_until
from tests.wire import Wire

REQUESTS = 60
ARRIVE_WITHIN, CUT_FOR = 2.0, 3.0
PATIENCE = 40.0
LONG_TEXT = "The quick brown fox jumps over the lazy dog. " * 100
"""Encoded by a thread, and cut off to what the context holds."""

Answers = list[list[tuple[list[int], str]]]


async def ask(client: AsyncClient, number: int) -> list[tuple[list[int], str]]:
    """Of four kinds: a long text, a stream of some length, a pattern, several choices."""
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
    first = await asyncio.wait_for(handle.completion(), PATIENCE)
    return [(one.token_ids, one.text) for one in (first, *first.others)]


async def undisturbed(endpoint: str) -> Answers:
    async with AsyncClient(endpoint) as client:
        return await asyncio.gather(*(ask(client, number) for number in range(REQUESTS)))


async def while_cutting(endpoint: str, chance: random.Random, pause: float) -> Answers:
    """At random moments, `pause` seconds apart at most, while requests arrive and run."""
    wire = Wire()

    async def cut() -> None:
        end = time.monotonic() + CUT_FOR
        while time.monotonic() < end:
            await asyncio.sleep(chance.random() * pause)
            wire.cut()

    async def late(client: AsyncClient, number: int) -> list[tuple[list[int], str]]:
        await asyncio.sleep(chance.random() * ARRIVE_WITHIN)
        return await ask(client, number)

    async with wire.to(endpoint) as cuttable, AsyncClient(cuttable) as client:
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
    wait_until(lambda: settle(server.endpoint)["open_requests"] == 0, PATIENCE)
