"""Budgets of reasoning and grammars after it, through the real processes of a tiny model.

The marks are ordinary text, which the model's tokenizer splits into several tokens.
"""

import asyncio
import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quadriga.client import AsyncClient, Client, Completion, SamplingParams
from tests.faults.inject import fault_environment
from tests.server import Server, running_server, settle, wait_until

PROMPT = [7, 30, 31, 32, 30, 31, 90, 91]
START, END = "<think>", "\n</think>\n\n"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 22, 333]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIMEOUT_S = 60.0
PROCESSES = ("worker_proc", "scheduler_proc", "detok_proc", "tokenizer_proc")


def params(**fields: Any) -> SamplingParams:
    """Return parameters of a request whose prompt ends within the reasoning."""
    return SamplingParams(**{"temperature": 1.0, "max_new_tokens": 150, **fields})


def inside(budget: int | None, **fields: Any) -> SamplingParams:
    return params(thinking_end=END, thinking_token_budget=budget, **fields)


ASKED = [
    inside(25, seed=1, n=3, ignore_eos=True),
    inside(40, temperature=0, ignore_eos=True),
    inside(0, seed=2, n=2, ignore_eos=True),
    inside(60, seed=3, n=3, json_schema=SCHEMA),
    inside(33, temperature=0, json_schema=SCHEMA, logprobs=1),
    inside(50, seed=4, n=2, choice=["yes", "no"], bad_words=["zzz"]),
    params(thinking_start=START, thinking_end=END, thinking_token_budget=9, seed=5, n=4,
           regex="[a-f]{30}"),
    params(seed=6, n=2, ignore_eos=True),
]  # fmt: skip


async def ask(endpoint: str, at_once: bool = True) -> list[list[Completion]]:
    """Ask everything, at once or one after the other; return each choice of each request."""
    async with AsyncClient(endpoint, TIMEOUT_S, reconnect_timeout=TIMEOUT_S) as client:
        answers = [client.generate(PROMPT, wanted) for wanted in ASKED]
        if at_once:
            firsts = await asyncio.gather(*answers)
        else:
            firsts = [await answer for answer in answers]
    return [[first, *first.others] for first in firsts]


def tokens_of(answers: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in choices] for choices in answers]


@pytest.fixture(scope="module")
def answers(server: Server) -> list[list[Completion]]:
    """Return the answers of a server that nothing disturbs."""
    return asyncio.run(ask(server.endpoint))


@pytest.fixture(scope="module")
def retracting(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server whose requests give way to each other, with small chunks."""
    flags = ["--model", str(llama_dir), "--device", "cpu", "--dtype", "float32"]
    flags += ["--worker-threads", "1", "--chunked-prefill-size", "16"]
    log = tmp_path_factory.mktemp("thinking") / "log"
    environment = fault_environment("retract:scheduler:every=10")
    with running_server(log, *flags, environment=environment) as running:
        yield running


def test_the_reasoning_ends_after_its_budget_and_the_answer_goes_on(
    server: Server, answers: list[list[Completion]]
) -> None:
    with Client(server.endpoint) as client:
        closing = client.tokenize(END)
    for index, budget in ((0, 25), (1, 40), (2, 0)):
        for completion in answers[index]:
            ids = completion.token_ids
            assert ids[budget : budget + len(closing)] == closing
            assert completion.text.count(END) == 1
            assert len(ids) == 150, "the answer goes on"


def test_a_grammar_applies_after_the_reasoning(answers: list[list[Completion]]) -> None:
    for completion in (*answers[3], *answers[4]):
        reasoning, answer = completion.text.split(END)
        assert reasoning
        assert completion.finish_reason == "stop"
        assert set(json.loads(answer)) == {"city", "days"}
    for completion in answers[5]:
        assert completion.text.split(END)[1] in ("yes", "no")
    logprobs = answers[4][0].logprobs
    assert logprobs is not None
    assert len(logprobs) == len(answers[4][0].token_ids)


def test_an_answer_that_may_reason_obeys_the_grammar_after_the_reasoning_or_at_once(
    answers: list[list[Completion]],
) -> None:
    for completion in answers[6]:
        text = completion.text
        assert completion.finish_reason == "stop"
        assert set(text.split("</think>")[-1].strip()) <= set("abcdef")
        assert text.startswith(START) == (END in text)


def test_answers_are_the_same_alone_and_whichever_request_is_retracted(
    server: Server, retracting: Server, answers: list[list[Completion]]
) -> None:
    expected = tokens_of(answers)
    assert tokens_of(asyncio.run(ask(server.endpoint, at_once=False))) == expected
    assert tokens_of(asyncio.run(ask(retracting.endpoint))) == expected
    assert settle(retracting.endpoint)["retractions"] > 5


def test_answers_are_the_same_whatever_process_dies(
    llama_dir: Path, tmp_path: Path, answers: list[list[Completion]]
) -> None:
    flags = ["--model", str(llama_dir), "--device", "cpu", "--dtype", "float32"]
    flags += ["--worker-threads", "1", "--max-running-requests", "4"]

    async def ask_and_kill(server: Server, name: str) -> tuple[list[list[Completion]], bool]:
        asked = asyncio.create_task(ask(server.endpoint))
        async with AsyncClient(server.endpoint) as client:
            before = (await client.info())["steps"]
            while (await client.info())["steps"] < before + 40:
                await asyncio.sleep(0.01)
        running = not asked.done()
        os.kill(server.pid_of(name), signal.SIGKILL)
        return await asyncio.wait_for(asked, TIMEOUT_S), running

    with running_server(tmp_path / "log", *flags) as server:
        for name in PROCESSES:
            got, running = asyncio.run(ask_and_kill(server, name))
            assert running, f"nothing ran when {name} was killed"
            assert tokens_of(got) == tokens_of(answers), name
            wait_until(lambda name=name: server.pid_of(name) > 0, TIMEOUT_S)  # type: ignore[misc]


def test_chosen_ids_have_the_log_probabilities_that_the_likeliest_have(server: Server) -> None:
    with Client(server.endpoint) as client:
        top = client.generate(PROMPT, params(temperature=0, max_new_tokens=5, logprobs=20))
        assert top.logprobs is not None
        ids = [token.token_id for token in top.logprobs[0].top]
        wanted = params(temperature=0, max_new_tokens=5, logprob_token_ids=[*reversed(ids), 3])
        chosen = client.generate(PROMPT, wanted)
        both = client.generate(
            PROMPT, params(temperature=0, max_new_tokens=5, logprobs=2, logprob_token_ids=[3, 4])
        )
    assert chosen.token_ids == both.token_ids == top.token_ids
    assert chosen.logprobs is not None
    assert both.logprobs is not None
    first = chosen.logprobs[0]
    assert [token.token_id for token in first.top] == [*reversed(ids), 3]
    likely = [token.logprob for token in top.logprobs[0].top]
    assert all(
        math.isclose(one, other, abs_tol=1e-5)
        for one, other in zip([t.logprob for t in first.top[:-1]], likely[::-1], strict=True)
    )
    for token, most_likely in zip(both.logprobs, top.logprobs, strict=True):
        assert [t.token_id for t in token.top[:2]] == [t.token_id for t in most_likely.top[:2]]
        assert [t.token_id for t in token.top[2:]] == [3, 4]
