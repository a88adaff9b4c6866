"""The unmodified `openai` package over stored responses, with a real server and its deaths."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from bench.client.server import free_port
from tests.server import Server, running_server, wait_until

BUILT_IN = "smollm2-135m"
TIMEOUT_S = 150.0
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
    "strict": False,
}
STORY: Any = {
    "model": BUILT_IN,
    "input": "Write a long story about the sea.",
    "max_output_tokens": 60,
    "temperature": 0,
    "background": True,
    "extra_body": {"ignore_eos": True},
}

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    directory, port = tmp_path_factory.mktemp("stored"), free_port()
    flags = ["--model", BUILT_IN, "--dtype", "float32", "--port", str(port)]
    with running_server(directory / "log", *flags) as server:
        yield server, f"http://127.0.0.1:{port}/v1"


@pytest.fixture
def client(started: tuple[Server, str]) -> Iterator[Any]:
    _, url = started
    with openai.OpenAI(base_url=url, api_key="none", max_retries=5, timeout=60) as client:
        yield client


def ended(client: Any, response_id: str) -> Any:
    """Poll a response until it has ended, as programs do."""
    deadline = time.monotonic() + TIMEOUT_S
    while (response := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline, response.status
        time.sleep(0.2)
    return response


def kill_gateway(started: tuple[Server, str]) -> None:
    """Kill the gateway and wait for the next one."""
    server, _ = started
    pid = server.pid_of("http_proc")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.pid_of("http_proc") not in (0, pid), 30)


def test_a_tool_is_called_and_answered_through_the_chain(client: Any) -> None:
    ask = {"model": BUILT_IN, "temperature": 0, "max_output_tokens": 60, "tools": [WEATHER]}
    first = client.responses.create(
        **ask, input="What is the weather in Rome?",
        tool_choice={"type": "function", "name": "get_weather"},
    )  # fmt: skip
    (call,) = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 31 C."}
    second = client.responses.create(**ask, input=[output], previous_response_id=first.id)
    assert second.status == "completed" and second.output_text
    kinds = [item.type for item in client.responses.input_items.list(second.id, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output"]
    # The chain is the same prompt as the whole conversation.
    user = {"role": "user", "content": "What is the weather in Rome?"}
    whole = client.responses.create(**ask, input=[user, call.to_dict(), output], store=False)
    assert whole.output_text == second.output_text
    assert whole.usage.input_tokens == second.usage.input_tokens


def test_a_stream_is_replayed_with_its_pieces(client: Any) -> None:
    ask = {"model": BUILT_IN, "input": "Name the capital of France.", "temperature": 0}
    sent = [event.to_dict() for event in client.responses.create(**ask, stream=True)]
    response_id = sent[0]["response"]["id"]
    again = client.responses.retrieve(response_id, stream=True)
    assert [event.to_dict() for event in again] == sent
    rest = client.responses.retrieve(response_id, stream=True, starting_after=5)
    assert [event.to_dict() for event in rest] == sent[6:]
    assert client.responses.retrieve(response_id).to_dict() == sent[-1]["response"]


def test_a_conversation_goes_on(client: Any) -> None:
    talk = client.conversations.create(metadata={"topic": "geography"})
    ask = {"model": BUILT_IN, "temperature": 0, "conversation": talk.id, "max_output_tokens": 40}
    client.responses.create(**ask, input="Name the capital of France.")
    client.responses.create(**ask, input="And of Italy?")
    texts = [item.content[0].text for item in client.conversations.items.list(talk.id, order="asc")]
    assert texts[::2] == ["Name the capital of France.", "And of Italy?"]
    assert len(texts) == 4 and "Paris" in texts[1]
    client.conversations.delete(talk.id)
    with pytest.raises(openai.NotFoundError, match="was deleted"):
        client.conversations.retrieve(talk.id)


def test_stored_responses_outlive_the_gateway(started: tuple[Server, str], client: Any) -> None:
    ask = {"model": BUILT_IN, "temperature": 0, "max_output_tokens": 20}
    first = client.responses.create(**ask, input="Name the capital of France.")
    kill_gateway(started)
    assert client.responses.retrieve(first.id) == first
    second = client.responses.create(**ask, input="Sure?", previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.total_tokens


def test_responses_in_the_background_outlive_the_gateway(
    started: tuple[Server, str], client: Any
) -> None:
    undisturbed = ended(client, client.responses.create(**STORY).id)
    assert undisturbed.status == "incomplete" and undisturbed.usage.output_tokens == 60
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


def test_a_stop_of_the_server_leaves_open_responses_to_the_next(tmp_path: Path) -> None:
    port = free_port()
    flags = ["--model", BUILT_IN, "--dtype", "float32", "--port", str(port)]
    flags += ["--data-dir", str(tmp_path / "data")]
    url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=5, timeout=60) as opened:
        client: Any = opened
        with running_server(tmp_path / "log", *flags):
            created = client.responses.create(**STORY)
        with running_server(tmp_path / "log", *flags):
            response = ended(client, created.id)
            assert response.status == "incomplete" and response.usage.output_tokens == 60
