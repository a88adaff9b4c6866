"""Greedy tokens of a whole server beside those of transformers, in many ways to compose steps."""

import asyncio
import random
from pathlib import Path
from typing import Any

from quadriga.client import AsyncClient, SamplingParams
from tests import EVERYTHING
from tests.faults.inject import fault_environment
from tests.references import greedy_of
from tests.server import running_server, settle

NEW_TOKENS = 12
NUM_PROMPTS = 32
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)


def lengths_up_to(most: int, num: int = NUM_PROMPTS) -> list[int]:
    """Return so many lengths: 1, 2, ..., most, denser where they are small."""
    steps = num - 1
    spread = {max(1, round(most ** (i / steps))) for i in range(num)} | {2, 3}
    return ([*sorted(spread), most] * num)[-num:]


def prompts_of(lengths: list[int], vocab_size: int) -> list[list[int]]:
    chosen = random.Random(5)
    return [[chosen.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


async def serve_all(endpoint: str, prompts: list[list[int]]) -> list[list[int]]:
    """Every prompt at once in random order, with as many requests between them that are aborted."""
    order = list(range(len(prompts)))
    chosen = random.Random(6)
    chosen.shuffle(order)
    async with AsyncClient(endpoint) as client:
        handles, doomed = {}, []
        for index in order:
            handles[index] = client.submit(prompts[index], GREEDY)
            doomed.append(client.submit(prompts[chosen.randrange(len(prompts))], GREEDY))
        for number, handle in enumerate(doomed):
            await asyncio.sleep(0.002 * (number % 3))
            handle.abort()
        completions = [await handles[index].completion() for index in range(len(prompts))]
    return [completion.token_ids for completion in completions]


WAYS = {
    "default": [],
    "narrow": ["--max-batch-size", "3", "--prefill-max-batch-size", "5"],
    "chunks of 1, mixed": ["--chunked-prefill-size", "1"],
    "chunks of 7, prefill first": [
        "--chunked-prefill-size", "7", "--batch-mode", "prefill-first", "--max-batch-size", "4",
    ],
    "chunks of 64, decode first": ["--chunked-prefill-size", "64", "--decode-first"],
    "chunks of 512, alternate": ["--chunked-prefill-size", "512", "--batch-mode", "alternate"],
    "whole prompts, mixed, no cache": ["--chunked-prefill-size", "-1", "--disable-radix-cache"],
    "retracted at random": ["--chunked-prefill-size", "64"],
    "retracted, no cache": ["--no-prefix-cache"],
    "static": ["--batching", "static", "--max-batch-size", "6"],
    "speculated": ["--speculative-method", "ngram", "--num-speculative-tokens", "5"],
    "drafted": ["--speculative-method", "self"],
    "longest prefix first": ["--schedule-policy", "lpm", "--fair-clients"],
}  # fmt: skip
RETRACTION = fault_environment("retract:scheduler:every=5")


def check(model: Any, prompts: list[list[int]], log: Path, way: str, *flags: str) -> None:
    expected = references(model, prompts)
    retracts = way.startswith("retracted")
    environment = RETRACTION if retracts else {}
    flags = (*flags, *WAYS[way], "--dtype", "float32")
    with running_server(log, *flags, environment=environment) as server:
        for temperature_of_cache in ("cold", "warm"):
            got = asyncio.run(serve_all(server.endpoint, prompts))
            info = settle(server.endpoint, 60)
            wrong = [len(p) for p, e, g in zip(prompts, expected, got, strict=True) if e != g]
            assert not wrong, (
                f"{temperature_of_cache}: {len(wrong)} of {len(prompts)} differ;"
                f" prompt lengths {wrong}"
            )
    if way == "speculated":  # so small a model is seldom worth a draft
        assert info["spec_decode_num_accepted_tokens_total"] > 0
    if "--max-total-tokens" not in flags:  # in a small pool both are left to chance
        assert (info["cached_tokens_total"] > 0) == info["prefix_cache"]
        assert (info["retractions"] > 0) == retracts


_references: dict[str, list[list[int]]] = {}


def references(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Of each prompt alone; worked out once for each model."""
    key = f"{model.config.model_type} {model.num_parameters()} {prompts}"
    if key not in _references:
        _references[key] = greedy_of(model, prompts, NEW_TOKENS)
    return _references[key]


def ways(*quick: str) -> list[str]:
    return list(WAYS) if EVERYTHING else list(quick)


async def generate(endpoint: str, prompts: list[list[int]]) -> list[list[int]]:
    async with AsyncClient(endpoint) as client:
        handles = [client.submit(prompt, GREEDY) for prompt in prompts]
        return [(await handle.completion()).token_ids for handle in handles]
