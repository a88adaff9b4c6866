"""Streams that run while a process dies, and the comparison with those that nothing disturbed."""

import asyncio
import os
import threading

import pytest

from quadriga.client import AsyncClient, Completion, SamplingParams
from tests.server import Server

STREAMS = 16
GREEDY = SamplingParams(temperature=0, max_new_tokens=100, ignore_eos=True)
SEEDED = SamplingParams(
    temperature=1.0, seed=5, max_new_tokens=100, ignore_eos=True, logprobs=2, prompt_logprobs=1
)


async def run_streams(endpoint: str, started: asyncio.Event) -> list[Completion]:
    """Run many streams; set `started` when each has its first tokens."""
    streaming = 0
    async with AsyncClient(endpoint) as client:

        async def run_stream(number: int) -> Completion:
            nonlocal streaming
            params = SEEDED if number % 4 == 0 else GREEDY
            text = ""
            async for chunk in client.stream([3 + number] * (5 + number), params):
                streaming += not text
                text += chunk.text or " "
                if streaming == STREAMS:
                    started.set()
            assert chunk.completion is not None
            return chunk.completion

        return list(await asyncio.gather(*(run_stream(number) for number in range(STREAMS))))


async def run_streams_with_a_kill(server: Server, name: str, number: int) -> list[Completion]:
    started = asyncio.Event()
    task = asyncio.create_task(run_streams(server.endpoint, started))
    await started.wait()
    os.kill(server.pid_of(name), number)
    return await task


def same(first: list[Completion], second: list[Completion]) -> bool:
    """Return whether texts and ids are equal, and log-probabilities nearly so."""
    return [(c.token_ids, c.text, c.finish_reason) for c in first] == [
        (c.token_ids, c.text, c.finish_reason) for c in second
    ] and all(
        logprobs_of(c) == pytest.approx(logprobs_of(d), abs=1e-3)
        for c, d in zip(first, second, strict=True)
    )


def logprobs_of(completion: Completion) -> list[float]:
    """Return the log-probabilities of prompt and text, if they were requested."""
    logprobs = [*(completion.prompt_logprobs or ())[1:], *(completion.logprobs or ())]
    return [token.logprob for token in logprobs]


PARAMS = [
    SamplingParams(temperature=temperature, seed=seed, max_new_tokens=120, ignore_eos=True)
    for seed in range(12)
    for temperature in (0.0, 1.0)
]
PROMPTS = [[3 + n, 5, 7 * n % 500 + 3, 9] for n in range(len(PARAMS))]
TIMEOUT_S = 90.0


class ClientLoad(threading.Thread):
    """A client with many requests.

    Attributes:
        started: Set when streams have tokens.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self.started = threading.Event()
        self.completions: list[Completion] = []
        self._endpoint = endpoint
        self.start()

    def run(self) -> None:
        self.completions = asyncio.run(self._run_all())

    async def _run_all(self) -> list[Completion]:
        async with AsyncClient(self._endpoint, TIMEOUT_S, reconnect_timeout=TIMEOUT_S) as client:
            requests = (self._one(client, number) for number in range(len(PARAMS)))
            return await asyncio.gather(*requests)

    async def _one(self, client: AsyncClient, number: int) -> Completion:
        handle = client.submit(PROMPTS[number], PARAMS[number], stream=number % 3 > 0)
        tokens, text = 0, ""
        async for chunk in handle:
            tokens += len(chunk.token_ids)
            text += chunk.text
            if tokens > 40:
                self.started.set()
        assert chunk.completion is not None
        assert (text, tokens) == (chunk.completion.text, len(chunk.completion.token_ids))
        return chunk.completion

    def results(self) -> list[tuple[str, list[int], str]]:
        self.join(TIMEOUT_S)
        assert self.completions, "some request did not finish"
        return [(c.text, c.token_ids, c.finish_reason) for c in self.completions]
