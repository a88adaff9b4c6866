"""Prompts at one replica, tokens at another: every token equals that of a single replica."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quadriga.client import AsyncClient, Completion, SamplingParams
from quadriga.server.processes.run_dir import shared_dir
from quadriga.wire.trace import RequestTrace
from tests.faults.inject import ALL_APART
from tests.integration.equality import lengths_up_to, prompts_of, references, serve_all, ways
from tests.integration.role_servers import (
    FLAGS,
    ROLES,
    facts,
    restart,
    served,
    wait_until_back,
)
from tests.server import Server, running_server, wait_until
from tests.shared_pages import damage_pages, forget_pages
from tests.tiny_adapters import make_adapter

# A tiny model has generated a few tokens before its pages are stored.
NEW_TOKENS = 60
TIMEOUT_S = 120.0
# Ways to compose steps beside those of one replica.
WAYS: dict[str, list[str]] = {
    "chunks of 7": ["--chunked-prefill-size", "7"],
    "retracted at random": ["--chunked-prefill-size", "64"],
    "speculated": ["--speculative-method", "ngram", "--num-speculative-tokens", "5"],
    "narrow": ["--max-batch-size", "3", "--prefill-max-batch-size", "5"],
    "three replicas": ["--dp", "3"],
    "two that compute prompts": ["--dp", "3", "--prefill-replicas", "2"],
    "roles that change": ["--dp", "3", "--prefill-replicas", "auto"],
    "least loaded": ["--load-balance-method", "least-loaded"],
}


def files_of(server: Server) -> list[Path]:
    return sorted(shared_dir(server.run_dir).rglob("*.pages"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "way", ways("chunks of 7", "retracted at random", "speculated", "roles that change")
)
def test_tokens_of_prompts_from_another_replica_are_those_of_transformers(
    way: str, llama_dir: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32)
    longest = model.config.max_position_embeddings - NEW_TOKENS
    prompts = prompts_of(lengths_up_to(longest, 16), 512)
    expected = references(model, prompts, NEW_TOKENS)
    faults = f"{ALL_APART},retract:scheduler:every=5" if "retracted" in way else ALL_APART
    with served(tmp_path / "log", llama_dir, *ROLES, *WAYS[way], faults=faults) as server:
        for _ in range(2):
            assert asyncio.run(serve_all(server.endpoint, prompts, NEW_TOKENS)) == expected
        info = facts(server)
    assert info["requests_handed_over"] >= len(prompts) // 2
    assert info["kv_transfer_pages_total"] > 0
    assert info["kv_transfer_bytes_total"] > 0
    if way == "chunks of 7":  # most pages were loaded while others were computed
        assert info["kv_offload_loads_total"] > info["requests_handed_over"]
    assert info["results_dropped"] == info["requests_moved"] == 0


PROMPTS = [[3 + n, *range(7, 7 + 9 * n), 5] for n in range(10)]
KINDS = [
    SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_new_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=4, n=3, max_new_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0, max_new_tokens=20, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0, max_new_tokens=9, prompt_logprobs=1, ignore_eos=True),
    SamplingParams(temperature=0, max_new_tokens=40, frequency_penalty=0.7, min_new_tokens=9),
    SamplingParams(temperature=0, max_new_tokens=40, regex="[a-z]{3,40}"),
    SamplingParams(temperature=1.0, seed=9, max_new_tokens=1, ignore_eos=True),
]


async def generate(
    endpoint: str, kinds: Sequence[SamplingParams] = KINDS
) -> list[list[Completion]]:
    """Return the completions of every prompt with every kind of parameters, all at once."""
    async with AsyncClient(endpoint, TIMEOUT_S, reconnect_timeout=TIMEOUT_S) as client:
        handles = [client.submit(prompt, params) for prompt in PROMPTS for params in kinds]
        completions = [await handle.completion() for handle in handles]
        return [[first, *first.others] for first in completions]


def answers_of(completions: list[list[Completion]]) -> list[Any]:
    return [
        (c.token_ids, c.text, c.finish_reason, c.usage.prompt_tokens, c.usage.completion_tokens)
        for choices in completions
        for c in choices
    ]


def logprobs_of(completions: list[list[Completion]]) -> list[tuple[list[int], list[float]]]:
    """Return of every answer the ids and the numbers of its log-probabilities, also of prompts."""
    found = []
    for c in [c for choices in completions for c in choices]:
        entries = [*(c.prompt_logprobs or ()), *(c.logprobs or ())]
        likely = [each for entry in entries for each in entry.top]
        ids = [entry.token_id for entry in entries] + [each.token_id for each in likely]
        values = [entry.logprob or 0.0 for entry in entries] + [each.logprob for each in likely]
        found.append((ids, values))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_of_request_is_answered_as_by_one_replica(
    dtype: str, llama_dir: Path, tmp_path: Path
) -> None:
    with running_server(
        tmp_path / "alone", "--model", str(llama_dir), "--dtype", dtype, *FLAGS
    ) as server:
        expected = answers_of(asyncio.run(generate(server.endpoint)))
    with served(tmp_path / "log", llama_dir, *ROLES, dtype=dtype) as server:
        for _ in range(2):
            assert answers_of(asyncio.run(generate(server.endpoint))) == expected
        info = facts(server)
    assert info["requests_handed_over"] > len(PROMPTS)


LOGPROBS = [
    SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, logprobs=2, ignore_eos=True),
    SamplingParams(
        temperature=1.0, seed=5, n=2, max_new_tokens=NEW_TOKENS, logprobs=0, ignore_eos=True
    ),
    SamplingParams(
        temperature=0, max_new_tokens=NEW_TOKENS, prompt_logprobs=1, logprobs=1, ignore_eos=True
    ),
    SamplingParams(
        temperature=0, max_new_tokens=NEW_TOKENS, first_token_ids=[9, 4], logprobs=1,
        ignore_eos=True,
    ),
]  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["chunks of 7", "speculated"])
def test_log_probabilities_go_on_with_their_requests(
    way: str, llama_dir: Path, tmp_path: Path
) -> None:
    with running_server(
        tmp_path / "alone", "--model", str(llama_dir), "--dtype", "float32", *FLAGS
    ) as server:
        expected = asyncio.run(generate(server.endpoint, LOGPROBS))
    with served(tmp_path / "log", llama_dir, *ROLES, *WAYS[way]) as server:
        found = asyncio.run(generate(server.endpoint, LOGPROBS))
        info = facts(server)
    assert answers_of(found) == answers_of(expected)
    for (ids, values), (own_ids, own_values) in zip(
        logprobs_of(expected), logprobs_of(found), strict=True
    ):
        assert ids == own_ids
        assert values == pytest.approx(own_values, abs=1e-4)
    assert info["requests_handed_over"] >= len(PROMPTS) * len(LOGPROBS)
    assert info["kv_transfer_pages_total"] > 0 and info["results_dropped"] == 0


@pytest.mark.timeout(300)
def test_adapters_go_on_with_their_requests_and_share_no_pages(
    llama_dir: Path, tmp_path: Path
) -> None:
    """The same prompts with two adapters and without one, all at once."""
    names = ["", "a", "b"]
    made = [make_adapter(llama_dir, tmp_path / n, seed=i) for i, n in enumerate(names[1:])]
    modules = [f"{n}={path}" for n, path in zip(names[1:], made, strict=True)]
    flags = ["--lora-modules", ",".join(modules), "--max-loras", "2"]

    async def generate_all(endpoint: str) -> list[list[int]]:
        async with AsyncClient(endpoint, TIMEOUT_S, reconnect_timeout=TIMEOUT_S) as client:
            handles = [client.submit(p, KINDS[0], adapter=n) for p in PROMPTS for n in names]
            return [(await handle.completion()).token_ids for handle in handles]

    alone = ["--model", str(llama_dir), "--dtype", "float32", *FLAGS, *flags]
    with running_server(tmp_path / "alone", *alone) as server:
        expected = asyncio.run(generate_all(server.endpoint))
    assert len({str(tokens) for tokens in expected}) == len(expected)
    with served(tmp_path / "log", llama_dir, *ROLES, *flags) as server:
        for _ in range(2):
            assert asyncio.run(generate_all(server.endpoint)) == expected
        info = facts(server)
    assert info["requests_handed_over"] > len(PROMPTS) and info["kv_transfer_pages_total"] > 0


@pytest.mark.timeout(300)
def test_a_trace_has_the_spans_of_both_replicas_in_order(llama_dir: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)

    async def trace(endpoint: str) -> RequestTrace:
        async with AsyncClient(endpoint, TIMEOUT_S) as client:
            completion = await client.generate([3 + n % 400 for n in range(150)], params)
            (found,) = await client.traces([completion.request_id])
            return found

    flags = ["--keep-traces", "all", "--chunked-prefill-size", "64"]
    faults = "apart:tokenizer"  # all pages are loaded at the end
    with served(tmp_path / "log", llama_dir, *ROLES, *flags, faults=faults) as server:
        phases = [span for span in asyncio.run(trace(server.endpoint)).spans if span.parent < 0]
    assert [(span.name, span.attributes.get("replica")) for span in phases] == [
        ("tokenize", None),
        ("queue", 0),
        *[("prefill", 0)] * 3,
        ("decode", 0),
        ("queue", 1),
        ("load KV pages", 1),
        ("queue", 1),
        ("prefill", 1),
        ("decode", 1),
        ("detokenize", 1),
        ("deliver", None),
    ]
    assert int(phases[7].attributes["fetched"]) >= 150 // 4
    for phase, following in pairwise(phases):
        assert phase.began_at <= phase.ended_at == following.began_at


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("damage", "counter"),
    [
        (damage_pages, "kv_offload_damaged_pages_total"),
        (forget_pages, "kv_offload_missed_pages_total"),
    ],
)
def test_pages_that_are_damaged_or_gone_are_computed(
    damage: Callable[[Path, int, int], int], counter: str, llama_dir: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32)
    prompts = prompts_of(lengths_up_to(model.config.max_position_embeddings - NEW_TOKENS, 16), 512)
    expected = references(model, prompts, NEW_TOKENS)
    with served(tmp_path / "log", llama_dir, *ROLES) as server:
        assert asyncio.run(serve_all(server.endpoint, prompts, NEW_TOKENS)) == expected
        before = facts(server)[counter]
        (path,) = files_of(server)
        assert damage(path, 0, 2) > 0
        restart(server, "worker_proc/1", signal.SIGKILL)  # it has none of the pages any more
        for _ in range(60):  # until the frontend gives it requests again
            assert asyncio.run(serve_all(server.endpoint, prompts, NEW_TOKENS)) == expected
            if facts(server)[counter] > before:
                break
        else:
            raise AssertionError(f"{counter} is still {before}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("worker_proc/0", signal.SIGKILL),
        ("worker_proc/1", signal.SIGKILL),
        ("scheduler_proc/0", signal.SIGKILL),
        ("tokenizer_proc", signal.SIGKILL),
        ("worker_proc/0", signal.SIGSTOP),
    ],
)
def test_a_process_of_either_role_may_die_while_prompts_move(
    name: str, number: int, llama_dir: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32)
    prompts = prompts_of(lengths_up_to(model.config.max_position_embeddings - NEW_TOKENS, 32), 512)
    expected = references(model, prompts, NEW_TOKENS)
    with served(tmp_path / "log", llama_dir, *ROLES, "--watchdog-timeout", "5") as server:

        async def serve_with_a_death() -> list[list[int]]:
            answers = asyncio.ensure_future(serve_all(server.endpoint, prompts, NEW_TOKENS))
            await asyncio.sleep(0.3)
            os.kill(server.pid_of(name), number)
            return await answers

        before = server.pid_of(name)
        assert asyncio.run(serve_with_a_death()) == expected
        wait_until_back(server, name, before)
        assert asyncio.run(serve_all(server.endpoint, prompts, NEW_TOKENS)) == expected
        assert facts(server)["requests_handed_over"] > 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("lost", [0, 1])
def test_the_replicas_of_one_role_go_on_without_those_of_the_other(
    lost: int, llama_dir: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32)
    prompts = prompts_of(lengths_up_to(model.config.max_position_embeddings - NEW_TOKENS, 16), 512)
    expected = references(model, prompts, NEW_TOKENS)
    with served(tmp_path / "log", llama_dir, *ROLES, "--max-restarts", "0") as server:
        os.kill(server.pid_of(f"worker_proc/{lost}"), signal.SIGKILL)
        wait_until(lambda: f"replica {lost} is lost" in server.log.read_text(), 30)
        assert asyncio.run(serve_all(server.endpoint, prompts, NEW_TOKENS)) == expected
        assert [one["replica"] for one in facts(server)["replicas"]] == [1 - lost]
