"""Forks through the real processes: each equals a fresh run, wherever it begins."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from quadriga.client import AsyncClient, Client, Completion, SamplingParams
from quadriga.errors import InvalidRequest, QuadrigaError
from tests.server import Server

PROMPT = [7, 30, 31, 32, 30, 31, 90, 91]
NUM_TOKENS = 80
SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}, "required": ["größe"]}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.0, "seed": 3},
    "penalties": {"temperature": 0, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
    "rules": {"temperature": 1.2, "seed": 4, "bad_words": ["the"], "min_new_tokens": 30},
    "grammar": {"temperature": 1.0, "seed": 5, "regex": "[a-f]{70}é日"},
    "schema": {"temperature": 1.0, "seed": 6, "json_schema": SCHEMA},
    "stop": {"temperature": 1.0, "seed": 7, "stop": ["e", "a"], "min_new_tokens": 40},
    "thinking": {"temperature": 1.0, "seed": 8, "thinking_end": "x", "thinking_token_budget": 20},
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.endpoint) as connected:
        yield connected


def params(**fields: Any) -> SamplingParams:
    has_end = "regex" in fields or "json_schema" in fields
    return SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=not has_end, **fields)


def places(answer: Completion) -> list[int]:
    """Return some numbers of kept tokens: the ends, and those within."""
    last = len(answer.token_ids) - (answer.token_ids[-1] == answer.matched_stop)
    count = min(last, NUM_TOKENS - 1)
    return sorted({0, 1, 2, count // 3, count // 2, count - 1, count})


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_with_the_same_seed_is_the_rest_of_the_answer(client: Client, kind: str) -> None:
    asked = params(**KINDS[kind])
    answer = client.generate(PROMPT, asked)
    assert len(answer.token_ids) > 8
    for at in places(answer):
        branch = client.fork(answer, at, asked)
        assert branch.token_ids == answer.token_ids, at
        assert (branch.text, branch.finish_reason) == (answer.text, answer.finish_reason), at
        assert branch.matched_stop == answer.matched_stop
        assert branch.usage.completion_tokens == answer.usage.completion_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_is_a_fresh_run_with_the_same_tokens(client: Client, kind: str) -> None:
    answer = client.generate(PROMPT, params(**KINDS[kind]))
    at = len(answer.token_ids) // 2
    plain = params(temperature=0)
    kept = msgspec.structs.replace(plain, first_token_ids=answer.token_ids[:at])
    branch = client.fork(answer, at, plain)
    client.flush_cache()
    fresh = client.generate(PROMPT, kept)
    assert branch.token_ids == fresh.token_ids
    assert branch.token_ids[:at] == answer.token_ids[:at]
    # The model itself says so, too: the kept tokens as a part of the prompt.
    longer = client.generate(
        [*PROMPT, *answer.token_ids[:at]], SamplingParams(
            temperature=0, max_new_tokens=NUM_TOKENS - at, ignore_eos=True
        )
    )  # fmt: skip
    assert branch.token_ids[at:] == longer.token_ids


def test_branches_share_the_pages_of_what_they_keep(client: Client) -> None:
    long = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)
    answer = client.generate(PROMPT, long)
    before = client.info()
    first = client.fork(answer, 190, long, n=4)
    after = client.info()
    assert [branch.token_ids for branch in (first, *first.others)] == [answer.token_ids] * 4
    num_computed = after["step_tokens"]["sum"] - before["step_tokens"]["sum"]
    assert num_computed <= 4 * (after["page_size"] + 10)
    assert first.usage.prompt_tokens == len(PROMPT) >= first.usage.cached_tokens
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == 4 * 10


def test_a_fork_without_parameters_draws_anew(client: Client) -> None:
    answer = client.generate(PROMPT, params(temperature=1.0, seed=3))
    branches = [client.fork(answer, 20) for _ in range(3)]
    assert all(branch.token_ids[:20] == answer.token_ids[:20] for branch in branches)
    assert len({tuple(branch.token_ids) for branch in (answer, *branches)}) == 4
    again = client.fork(branches[0], 30, n=2)
    assert again.token_ids[:30] == branches[0].token_ids[:30]
    assert len(again.others) == 1


def test_new_tokens_have_logprobs_and_given_ones_have_none(client: Client) -> None:
    asked = params(temperature=0, logprobs=2)
    answer = client.generate(PROMPT, asked)
    branch = client.fork(answer, 50, asked)
    assert answer.logprobs is not None and branch.logprobs is not None
    assert [each.logprob for each in branch.logprobs[:50]] == [None] * 50
    assert [each.token_id for each in branch.logprobs] == answer.token_ids
    for one, other in zip(answer.logprobs[50:], branch.logprobs[50:], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    timings = branch.timings
    assert len(timings.token_times) == NUM_TOKENS - 50


def test_prompt_logprobs_come_with_a_fork(client: Client) -> None:
    asked = params(temperature=0, prompt_logprobs=1)
    answer = client.generate(PROMPT, asked)
    branch = client.fork(answer, 50, asked)
    assert branch.token_ids == answer.token_ids
    assert branch.prompt_logprobs is not None and answer.prompt_logprobs is not None
    pairs = zip(branch.prompt_logprobs, answer.prompt_logprobs, strict=True)
    assert all(one.logprob == pytest.approx(other.logprob, abs=1e-4) for one, other in pairs)


def test_a_receipt_of_a_fork_says_what_was_given(client: Client) -> None:
    asked = params(temperature=0, seed=9)
    answer = client.generate(PROMPT, asked, receipt=True)
    branch, again = (client.fork(answer, 10, asked, receipt=True) for _ in range(2))
    assert answer.receipt and branch.receipt and again.receipt
    assert branch.receipt.tokens == answer.receipt.tokens
    assert branch.receipt.params != answer.receipt.params
    assert branch.receipt == msgspec.structs.replace(again.receipt, request_id=branch.request_id)


def test_what_cannot_be_forked_says_why(client: Client) -> None:
    answer = client.generate(PROMPT, params(temperature=0))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"at_token": 81}, "at_token is 81: the answer has 80 tokens"),
        ({"at_token": -1}, "at_token is -1"),
        ({}, "max_new_tokens is 80: it counts the 80 tokens"),
        ({"at_token": 9, "params": params(stop_token_ids=answer.token_ids[4:5])}, "stop token"),
    ]
    for fields, message in wrong:
        with pytest.raises(InvalidRequest, match=message):
            client.fork(answer, **fields)
    with pytest.raises(QuadrigaError, match="first_token_ids does not match the grammar"):
        client.fork(answer, 9, params(regex="[0-9]{70}"))
    with pytest.raises(TypeError, match="temperature"):
        client.fork(answer, 9, temperature=0)  # type: ignore[call-arg]


def test_a_stream_forks_while_it_runs(server: Server) -> None:
    async def run() -> None:
        asked = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)
        async with AsyncClient(server.endpoint) as client:
            early: list[Completion] = []
            async for chunk in client.stream(PROMPT, asked):
                if len(early) < 3:
                    assert chunk.source is not None
                    count = len(chunk.source.token_ids)
                    early.append(await client.fork(chunk, count - 1, asked))
            assert chunk.completion is not None
            late = await client.fork(chunk, 33, asked)
        for branch in (*early, late):
            assert branch.token_ids == chunk.completion.token_ids

    asyncio.run(run())


def post(url: str, body: Any, headers: dict[str, str] | None = None) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), headers or {})
    with urllib.request.urlopen(request, timeout=60) as answer:
        data: bytes = answer.read()
        return data


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 60}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "é"}],
                                  "max_tokens": 60}),
        ("/v1/responses", {"input": "é", "max_output_tokens": 60}),
        ("/v1/messages", {"model": "tiny", "messages": [{"role": "user", "content": "é"}],
                          "max_tokens": 60}),
    ],
)  # fmt: skip
def test_a_fork_over_http_is_the_answer_of_its_api(
    gateway: str, path: str, body: dict[str, Any]
) -> None:
    name = f"fork{path.replace('/', '-')}"
    headers = {"X-Request-Id": name, "X-Resumable": "true"}
    asked = body | {"temperature": 0}
    if path in ("/v1/completions", "/v1/chat/completions"):
        asked |= {"ignore_eos": True, "return_token_ids": True}
    post(f"{gateway}{path}", asked | {"stream": True}, headers)
    whole = json.loads(post(f"{gateway}{path}", asked))
    for at in (0, 1, 7, 20):
        fork = {"at_token": at, "params": {"stream": False}}
        branch = json.loads(post(f"{gateway}/v1/streams/{name}/fork", fork))
        assert said(branch) == said(whole)
    streams = f"{gateway}/v1/streams"
    events = post(f"{streams}/{name}/fork", {"at_token": 20}, {"X-Request-Id": f"{name}-b"})
    again = urllib.request.urlopen(f"{streams}/{name}-b", timeout=60).read()
    assert again == events


def said(body: dict[str, Any]) -> Any:
    """Return what an answer says, without ids and times."""
    for choice in body.get("choices", ()):
        return choice, body["usage"]["completion_tokens"]
    items = [item.get("content") for item in body.get("output", ())]
    return items or body["content"]
