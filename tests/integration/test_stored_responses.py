"""The unmodified `openai` package over stored responses, with a real server and its deaths."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from bench.client.server import free_port
from tests.server import Server, running_server, wait_until
from tests.tiny_models import tiny_llama

MODEL = "tiny"
NUM_TOKENS = 1000
TIMEOUT_S = 150.0
STORY: Any = {
    "model": MODEL,
    "input": "Write a long story about the sea.",
    "max_output_tokens": NUM_TOKENS,
    "temperature": 0,
    "background": True,
    "extra_body": {"ignore_eos": True},
}

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("model")
    tiny_llama(directory, max_position_embeddings=2 * NUM_TOKENS)
    return ["--model", str(directory), "--served-model-name", MODEL, "--dtype", "float32",
            "--worker-threads", "1", "--max-total-tokens", "16384"]  # fmt: skip


@pytest.fixture(scope="module")
def started(
    flags: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, str]]:
    directory, port = tmp_path_factory.mktemp("stored"), free_port()
    flags = [*flags, "--port", str(port)]
    with running_server(directory / "log", *flags) as server:
        yield server, f"http://127.0.0.1:{port}/v1"


@pytest.fixture
def client(started: tuple[Server, str]) -> Iterator[Any]:
    _, url = started
    with openai.OpenAI(base_url=url, api_key="none", max_retries=5, timeout=60) as client:
        yield client


def ended(client: Any, response_id: str) -> Any:
    """Poll a response until it has ended, as programs do."""

    def response() -> Any:
        found = client.responses.retrieve(response_id)
        return None if found.status in ("queued", "in_progress") else found

    return wait_until(response, TIMEOUT_S)


def kill_gateway(started: tuple[Server, str]) -> None:
    """Kill the gateway and wait for the next one."""
    server, _ = started
    pid = server.pid_of("http_proc")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.pid_of("http_proc") not in (0, pid), 30)


def test_a_stream_is_replayed_with_its_pieces(client: Any) -> None:
    ask = {"model": MODEL, "input": "Name the capital of France.", "max_output_tokens": 40}
    sent = [event.to_dict() for event in client.responses.create(**ask, stream=True)]
    response_id = sent[0]["response"]["id"]
    again = client.responses.retrieve(response_id, stream=True)
    assert [event.to_dict() for event in again] == sent
    rest = client.responses.retrieve(response_id, stream=True, starting_after=5)
    assert [event.to_dict() for event in rest] == sent[6:]
    assert client.responses.retrieve(response_id).to_dict() == sent[-1]["response"]


def test_stored_responses_outlive_the_gateway(started: tuple[Server, str], client: Any) -> None:
    ask = {"model": MODEL, "temperature": 0, "max_output_tokens": 20}
    first = client.responses.create(**ask, input="Name the capital of France.")
    kill_gateway(started)
    assert client.responses.retrieve(first.id) == first
    second = client.responses.create(**ask, input="Sure?", previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens


def test_responses_in_the_background_outlive_the_gateway(
    started: tuple[Server, str], client: Any
) -> None:
    undisturbed = ended(client, client.responses.create(**STORY).id)
    assert undisturbed.status == "incomplete" and undisturbed.usage.output_tokens == NUM_TOKENS
    stream = client.responses.create(**STORY, stream=True)
    seen = [next(stream) for _ in range(10)]
    made = [seen[0].response.id, *(client.responses.create(**STORY).id for _ in range(3))]
    kill_gateway(started)
    for response_id in made:
        response = ended(client, response_id)
        assert response.status == "incomplete"
        assert response.output_text == undisturbed.output_text
    last = seen[-1].sequence_number
    rest = client.responses.retrieve(made[0], stream=True, starting_after=last)
    deltas = [event.delta for event in [*seen, *rest] if event.type.endswith("text.delta")]
    assert "".join(deltas) == undisturbed.output_text


def test_a_response_in_the_background_is_cancelled(client: Any) -> None:
    stream = client.responses.create(**STORY, stream=True)
    response_id = next(stream).response.id
    cancelled = client.responses.cancel(response_id)
    assert cancelled.status == "cancelled"
    assert [event.type for event in stream][-1] == "response.incomplete"
    assert client.responses.retrieve(response_id).to_dict() == cancelled.to_dict()


def test_a_stop_of_the_server_leaves_open_responses_to_the_next(
    flags: list[str], tmp_path: Path
) -> None:
    port = free_port()
    flags = [*flags, "--port", str(port), "--data-dir", str(tmp_path / "data")]
    url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=5, timeout=60) as opened:
        client: Any = opened
        with running_server(tmp_path / "log", *flags):
            created = client.responses.create(**STORY)
        with running_server(tmp_path / "log", *flags):
            response = ended(client, created.id)
            assert response.status == "incomplete" and response.usage.output_tokens == NUM_TOKENS
