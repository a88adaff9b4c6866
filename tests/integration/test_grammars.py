"""Grammars through the real processes: whatever a model without sense says must obey them."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quadriga.client import AsyncClient, Client, Completion, SamplingParams
from quadriga.errors import InvalidRequest
from tests.faults.inject import fault_environment
from tests.integration.schemas import SCHEMA, check_schema
from tests.server import Server, running_server, settle

PROMPT = [7, 30, 31, 32, 30, 31, 90, 91]
PRIMES = [999983, 999979, 999961, 999959]
TOO_SLOW = [{"type": "integer", "multipleOf": prime} for prime in PRIMES]
NARROWING = {"regex": "[ab]{2}", "allowed_token_ids": [70]}


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_new_tokens": 200, **fields})


ASKED = [
    params(json_schema=SCHEMA, n=4, seed=1),
    params(json_schema=json.dumps(SCHEMA), temperature=0),
    params(regex=r"[a-f]{3}-\d{2,4}", n=4, seed=2),
    params(ebnf='root ::= "(" root ")" | [0-9]', n=4, seed=3, max_new_tokens=60),
    params(choice=["yes", "no", "größe"], n=4, seed=4),
    params(n=2, max_new_tokens=40, seed=5),
]


async def ask(endpoint: str) -> list[list[Completion]]:
    """Everything at once; each choice of each request."""
    async with AsyncClient(endpoint) as client:
        firsts = await asyncio.gather(*(client.generate(PROMPT, p) for p in ASKED))
    return [[first, *first.others] for first in firsts]


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth else {}


@pytest.fixture(scope="module")
def retracting(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose requests have to give way to each other all the time."""
    flags = ["--model", str(llama_dir), "--device", "cpu", "--dtype", "float32"]
    flags += ["--worker-threads", "1"]
    environment = fault_environment("retract:scheduler:every=10")
    log = tmp_path_factory.mktemp("grammars") / "log"
    with running_server(log, *flags, environment=environment) as running:
        yield running


def test_every_answer_obeys_its_grammar(server: Server) -> None:
    schema, greedy, regex, ebnf, choice, free = asyncio.run(ask(server.endpoint))
    for completion in schema + greedy:
        assert completion.finish_reason == "stop"
        check_schema(completion.text)
    assert all(re.fullmatch(r"[a-f]{3}-\d{2,4}", c.text) for c in regex)
    assert len({c.text for c in schema + regex}) > 4, "the model has its say"
    for completion in ebnf:
        depth = completion.text.count(")")
        balanced = re.fullmatch(r"(\(*)\d(\)*)", completion.text)
        assert (completion.finish_reason == "stop") == (balanced is not None)
        assert balanced is None or balanced[1].count("(") == depth
    assert all(c.text in ("yes", "no", "größe") for c in choice)
    assert all(c.finish_reason == "length" for c in free)


def test_tokens_that_a_grammar_forces_take_no_step_each(server: Server) -> None:
    texts = ["The quick brown fox jumps over the lazy dog", "A token is a piece of a word; a word"]
    with Client(server.endpoint) as client:
        before = client.info()["steps"]
        jumped = client.generate(PROMPT, params(choice=texts))
        steps = client.info()["steps"] - before
        with_logprobs = client.generate(PROMPT, params(choice=texts, logprobs=0))
        cut = client.generate(PROMPT, params(choice=texts, max_new_tokens=4))
        pieces = list(client.stream(PROMPT, params(choice=texts, n=3, stop=["fox", "piece"])))
    assert jumped.text in texts and with_logprobs.text in texts
    assert steps < jumped.usage.completion_tokens // 2
    assert with_logprobs.logprobs is not None
    assert len(with_logprobs.logprobs) == len(with_logprobs.token_ids)
    assert cut.usage.completion_tokens == len(cut.token_ids) == 4
    assert cut.finish_reason == "length" and any(text.startswith(cut.text) for text in texts)
    for index in range(3):
        own = "".join(piece.text for piece in pieces if piece.index == index)
        assert own in ("The quick brown ", "A token is a ")
    settle(server.endpoint)


def test_answers_are_the_same_whichever_request_is_retracted(
    server: Server, retracting: Server
) -> None:
    expected = asyncio.run(ask(server.endpoint))
    got = asyncio.run(ask(retracting.endpoint))
    assert [[c.token_ids for c in choices] for choices in got] == [
        [c.token_ids for c in choices] for choices in expected
    ]
    assert settle(retracting.endpoint)["retractions"] > 5


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"regex": "a("}, "unclosed group"),
        ({"json_schema": {"type": "horse"}}, "horse"),
        ({"json_schema": "{"}, "json_schema cannot be compiled"),
        ({"json_schema": {"enum": [b"bytes"]}}, "written as JSON"),
        ({"json_schema": nested(600)}, "json_schema"),
        ({"ebnf": "junk"}, "Expected ::="),
        ({"choice": []}, "at least one text"),
        ({"regex": "a", "choice": ["b"]}, "one grammar"),
        ({"regex": "a" * 200_000}, "131072"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"json_schema": TOO_SLOW[0]}, "simplify"),
    ],
)
def test_a_grammar_that_cannot_be_is_refused_by_name(
    server: Server, fields: dict[str, Any], complaint: str
) -> None:
    with Client(server.endpoint) as client, pytest.raises(InvalidRequest) as refused:
        client.generate(PROMPT, params(**fields))
    assert complaint in str(refused.value)
    assert refused.value.field in fields


def test_slow_grammars_end_in_bounded_time_and_delay_no_other_request(server: Server) -> None:
    async def run() -> tuple[list[Any], bool]:
        async with AsyncClient(server.endpoint) as client:
            refusals = asyncio.gather(
                *(client.generate(PROMPT, params(json_schema=s)) for s in TOO_SLOW),
                return_exceptions=True,
            )
            await client.generate(PROMPT, params(max_new_tokens=20, temperature=0))
            was_first = not refusals.done()
            return await asyncio.wait_for(refusals, 20), was_first

    outcomes, was_first = asyncio.run(run())
    assert all(isinstance(outcome, InvalidRequest) for outcome in outcomes)
    assert was_first


def test_a_request_without_a_token_left_ends_with_an_error(server: Server) -> None:
    with Client(server.endpoint) as client:
        with pytest.raises(InvalidRequest, match="no token is left"):
            client.generate(PROMPT, params(**NARROWING))
        assert client.generate(PROMPT, params(regex="[ab]{2}")).finish_reason == "stop"
    settle(server.endpoint)


def test_a_request_whose_grammar_is_being_checked_can_be_aborted(server: Server) -> None:
    async def run() -> str:
        async with AsyncClient(server.endpoint) as client:
            handle = client.submit(PROMPT, params(regex="[a-z]{30}x*"))
            await client.abort(handle.request_id)
            return (await handle.completion()).finish_reason

    assert asyncio.run(run()) == "abort"
