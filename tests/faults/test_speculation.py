"""Answers with guessed tokens are the same whatever process dies in their middle."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quadriga.client import Client, SamplingParams
from tests.server import Server, running_server, settle

NUM_TOKENS = 200
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
def expected(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Return the answers of a server that guesses nothing."""
    log = tmp_path_factory.mktemp("plain") / "log"
    with (
        running_server(log, *server_flags(llama_dir)) as server,
        Client(server.endpoint) as client,
    ):
        return [answer.token_ids for answer in client.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module", params=["ngram", "self"])
def guessing(
    request: pytest.FixtureRequest, llama_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log, method = tmp_path_factory.mktemp("guessing") / "log", request.param
    with running_server(log, *server_flags(llama_dir), "--speculative-method", method) as server:
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
    info = settle(guessing.endpoint)
    assert info["spec_decode_num_accepted_tokens_total"] > 0
