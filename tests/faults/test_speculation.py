"""Answers with guessed tokens are the same whatever process dies in their middle."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quadriga.client import Client, SamplingParams
from tests.server import Server, running_server, settle
from tests.tiny_models import tiny_llama

# Steps of these weights take long enough that drafts in 4 bits pay.
LARGER: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
NUM_TOKENS = 200
# Guesses are made as far as they pay, which is found out in the first steps of a scheduler.
MAX_FURTHER_ANSWERS = 10
PROMPTS = [[n + 3, 9, 11, n + 3, 9] for n in range(4)]
PARAMS = [
    SamplingParams(
        temperature=n % 2, seed=n, max_new_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0
    )
    for n in range(4)
]


def server_flags(directory: Path) -> list[str]:
    flags = ["--model", str(directory), "--dtype", "float32", "--worker-threads", "1"]
    return [*flags, "--page-size", "4", "--max-total-tokens", "8192"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("larger-llama"), **LARGER)


@pytest.fixture(scope="module")
def expected(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Return the answers of a server that guesses nothing."""
    log = tmp_path_factory.mktemp("plain") / "log"
    with running_server(log, *server_flags(model_dir)) as server, Client(server.endpoint) as client:
        return [answer.token_ids for answer in client.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module", params=["ngram", "self"])
def guessing(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log, method = tmp_path_factory.mktemp("guessing") / "log", request.param
    with running_server(log, *server_flags(model_dir), "--speculative-method", method) as server:
        yield server


@pytest.mark.timeout(120)
@pytest.mark.parametrize("process", ["worker_proc", "scheduler_proc"])
def test_a_process_dies_while_tokens_are_guessed(
    guessing: Server, expected: list[list[int]], process: str
) -> None:
    with Client(guessing.endpoint) as client:
        stream = client.stream(PROMPTS[0], PARAMS[0])
        next(stream)
        answers: list[list[int]] = []
        rest = threading.Thread(
            target=lambda: answers.extend(
                answer.token_ids for answer in client.generate(PROMPTS, PARAMS)
            )
        )
        rest.start()
        next(stream)
        os.kill(guessing.pid_of(process), signal.SIGKILL)
        rest.join(100)
        list(stream)
        assert answers == expected
        for _ in range(MAX_FURTHER_ANSWERS):
            if settle(guessing.endpoint)["spec_decode_num_accepted_tokens_total"]:
                return
            assert client.generate(PROMPTS[0], PARAMS[0]).token_ids == expected[0]
    pytest.fail("no guess was right")
