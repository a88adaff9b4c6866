"""Every sampling parameter through four real processes; see test_processors.py, too."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.client import AsyncClient, Client, Completion, SamplingParams
from quadriga.client.types import TokenLogprob
from quadriga.errors import InvalidRequest, QueueFull
from tests.faults.inject import fault_environment
from tests.server import Server, running_server, settle

PROMPT = [7, 30, 31, 32, 30, 31, 90, 91, 30, 31, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69]
TOKENS = 16
PROCESSED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.6},
    {"logit_bias": {40: 3.0, 444: -100.0}},
    {"bad_words": ["thought", "ver", "2"]},
    {"allowed_token_ids": list(range(100, 140))},
]


def params(**fields: Any) -> SamplingParams:
    base: dict[str, Any] = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    return SamplingParams(**{**base, **fields})


@torch.inference_mode()
def check_logprobs(model: Any, ids: list[int], actual: list[TokenLogprob], first: int) -> None:
    """Compare the log-probabilities of ids[first:] with those of a model."""
    expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    for place, token in enumerate(actual, start=first):
        assert token.token_id == ids[place]
        if place == 0:
            assert (token.logprob, token.top) == (None, [])
            continue
        assert token.logprob == pytest.approx(float(expected[place - 1, ids[place]]), abs=1e-3)
        values = expected[place - 1].topk(len(token.top)).values.tolist()
        assert [top.logprob for top in token.top] == pytest.approx(values, abs=1e-3)


@pytest.mark.parametrize("prompt_length", [1, 20, 150])
def test_logprobs_of_prompt_and_output_are_those_of_the_plain_model(
    server: Server, model: Any, prompt_length: int
) -> None:
    prompt = (PROMPT * 8)[:prompt_length]
    asked = params(logprobs=3, prompt_logprobs=2, temperature=0.8, seed=3, repetition_penalty=1.3)
    with Client(server.endpoint) as client:
        client.generate(prompt, params())
        whole = client.generate(prompt, asked)
        chunks = list(client.stream(prompt, asked))
    assert whole.logprobs is not None and whole.prompt_logprobs is not None
    ids = prompt + whole.token_ids
    check_logprobs(model, ids, whole.prompt_logprobs, 0)
    check_logprobs(model, ids, whole.logprobs, len(prompt))
    assert {len(token.top) for token in whole.logprobs} == {3}
    assert {len(token.top) for token in whole.prompt_logprobs[1:]} <= {2}
    assert whole.usage.cached_tokens == 0, "a prompt with logprobs is computed"
    assert chunks[0].prompt_logprobs == whole.prompt_logprobs
    assert [token for c in chunks for token in c.logprobs or []] == whole.logprobs


def test_the_bytes_of_the_tokens_joined_are_the_text(server: Server) -> None:
    with Client(server.endpoint) as client:
        completion = client.generate("Grüße", params(logprobs=0, skip_special_tokens=False))
    assert completion.logprobs is not None
    joined = b"".join(token.bytes for token in completion.logprobs)
    assert joined.decode("utf-8", "replace") == completion.text
    assert all(token.top == [] for token in completion.logprobs)


def test_each_choice_is_what_a_request_with_its_seed_gives(server: Server) -> None:
    sampled = {"temperature": 1.0, "seed": 2**63 - 2}
    with Client(server.endpoint) as client:
        alone = [
            client.generate(PROMPT, params(temperature=1.0, seed=seed))
            for seed in (2**63 - 2, 2**63 - 1, 0)
        ]
        together = client.generate(PROMPT, params(**sampled, n=3, logprobs=0))
        chunks = list(client.stream(PROMPT, params(**sampled, n=3)))
    choices = [together, *together.others]
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert [choice.token_ids for choice in choices] == [
        completion.token_ids for completion in alone
    ]
    assert len({tuple(choice.token_ids) for choice in choices}) == 3
    for choice in choices:
        pieces = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.text for chunk in pieces) == choice.text
        assert [chunk.completion is None for chunk in pieces] == [True] * (len(pieces) - 1) + [
            False
        ]
    assert choices[1].usage.cached_tokens == 16, "its prompt is computed once, but for a last page"


def test_leaving_a_request_ends_all_its_choices(server: Server) -> None:
    with Client(server.endpoint) as client:
        for _ in client.stream(PROMPT, params(n=5, max_new_tokens=200, temperature=1.0)):
            break
    settle(server.endpoint)


def test_a_regular_expression_ends_the_text_where_a_match_is_complete(server: Server) -> None:
    with Client(server.endpoint) as client:
        whole = client.generate(PROMPT, params())
        middle = whole.text[len(whole.text) // 2 :][:2]
        pattern = "|".join("".join(f"[{c}]" if c not in "^\\]" else "\\" + c for c in s)
                           for s in (middle, "never seen"))  # fmt: skip
        place = whole.text.index(middle)
        stopped = client.generate(PROMPT, params(stop_regex=pattern))
        kept = client.generate(PROMPT, params(stop_regex=pattern, no_stop_trim=True))
        streamed = "".join(c.text for c in client.stream(PROMPT, params(stop_regex=[pattern])))
    assert stopped.text == streamed == whole.text[:place]
    assert kept.text == whole.text[: place + 2]
    assert (stopped.finish_reason, stopped.matched_stop) == ("stop", pattern)


def test_a_stop_token_is_barred_until_min_new_tokens_and_may_be_kept(server: Server) -> None:
    with Client(server.endpoint) as client:
        whole = client.generate(PROMPT, params())
        stop = whole.token_ids[2]
        early = client.generate(PROMPT, params(stop_token_ids=[stop]))
        late = client.generate(PROMPT, params(stop_token_ids=[stop], min_new_tokens=9))
        kept = client.generate(
            PROMPT, params(stop_token_ids=[stop], include_stop_str_in_output=True)
        )
    assert early.usage.completion_tokens == whole.token_ids.index(stop) + 1
    assert stop not in late.token_ids[:9]
    assert kept.text == whole.text[: len(kept.text)] and len(kept.text) > len(early.text)


def test_a_stop_string_within_the_least_tokens_does_not_count(server: Server) -> None:
    with Client(server.endpoint) as client:
        whole = client.generate(PROMPT, params(min_new_tokens=TOKENS, stop=list("aeiou ")))
    assert (whole.finish_reason, len(whole.token_ids)) == ("length", TOKENS)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 5_000_000}, "n is 5000000: must be from 1 to 128"),
        ({"logprobs": 100_000}, "logprobs is 100000: must be from 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"logit_bias": {512: 1.0}}, "logit_bias holds 512: ids of this model are 0 to 511"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias is nan for id 1"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids holds -1"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"bad_words": ["x" * 65]}, "bad_words is 65 characters"),
        ({"min_new_tokens": 17}, "min_new_tokens is 17"),
        ({"max_new_tokens": None, "min_new_tokens": 255}, "min_new_tokens is 255"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"frequency_penalty": -2.5}, "frequency_penalty is -2.5"),
        ({"presence_penalty": float("inf")}, "presence_penalty is inf"),
        ({"stop_regex": "("}, "it is no regular expression"),
        ({"stop_regex": "a*"}, "matches the empty string"),
        ({"stop_regex": "(a{1000}){1000}"}, "multiply to 1000000"),
        ({"stop_regex": ["a"] * 5}, "stop_regex is 5 strings"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_limit(
    server: Server, fields: dict[str, Any], named: str
) -> None:
    with Client(server.endpoint) as client, pytest.raises(InvalidRequest) as caught:
        client.generate(PROMPT, params(**fields))
    assert named in str(caught.value)
    assert caught.value.field == next(reversed(fields))


def test_a_hostile_expression_ends_only_its_own_request_and_delays_no_other(server: Server) -> None:
    async def both() -> list[Completion]:
        hostile = params(stop_regex="(?:fooaaaaaaaaaaaa){e<=9}q", max_new_tokens=200)
        async with AsyncClient(server.endpoint) as client:
            bad = client.submit(PROMPT, hostile)
            good = client.submit(PROMPT, params())
            with pytest.raises(InvalidRequest, match="takes too long"):
                await bad.completion()
            return [await good.completion()]

    (completion,) = asyncio.run(both())
    assert len(completion.token_ids) == TOKENS
    settle(server.endpoint)


def test_retraction_changes_no_answer(server: Server, llama_dir: Path, tmp_path: Path) -> None:
    kinds = [
        *PROCESSED,
        {"frequency_penalty": 1.2, "presence_penalty": 0.5, "temperature": 0.9, "seed": 5},
        {"min_p": 0.05, "temperature": 1.5, "seed": 6, "repetition_penalty": 1.1},
        {"min_new_tokens": 12, "stop_token_ids": [33, 34, 35], "temperature": 1.0, "seed": 7},
        {"logprobs": 2, "prompt_logprobs": 1, "temperature": 1.0, "seed": 8, "n": 3},
    ]

    async def answers(endpoint: str) -> list[list[Any]]:
        async with AsyncClient(endpoint) as client:
            handles = [
                client.submit(PROMPT * 3, params(**{"max_new_tokens": 40, **kind}))
                for kind in kinds
            ]
            ended = [await handle.completion() for handle in handles]
        return [
            [(c.text, c.token_ids, _rounded(c.logprobs), _rounded(c.prompt_logprobs))
             for c in (completion, *completion.others)]
            for completion in ended
        ]  # fmt: skip

    flags = ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1"]
    flags += ["--chunked-prefill-size", "17", "--max-queued-requests", "20"]
    environment = fault_environment("retract:scheduler:every=3")
    with running_server(tmp_path / "log", *flags, environment=environment) as shaken:
        got = asyncio.run(answers(shaken.endpoint))
        info = settle(shaken.endpoint)
        with Client(shaken.endpoint) as client, pytest.raises(QueueFull):
            client.generate(PROMPT, params(n=21))
    assert info["retractions"] > 0
    assert got == asyncio.run(answers(server.endpoint))


def _rounded(logprobs: list[TokenLogprob] | None) -> list[Any] | None:
    if logprobs is None:
        return None
    return [
        (entry.token_id, entry.logprob and round(entry.logprob, 3), len(entry.top))
        for entry in logprobs
    ]
