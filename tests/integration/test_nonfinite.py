"""A request whose numbers overflow has a named error in every API, and shares no page."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.client.server import free_port
from quadriga.client import Client
from quadriga.errors import NonFiniteLogits
from quadriga.sampling.params import SamplingParams
from tests.server import Server, running_server, settle, wait_until
from tests.tiny_models import let_token_overflow, tiny_llama

BAD = 67
GOOD = [3 + n % 50 for n in range(30)]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)


class Running(NamedTuple):
    server: Server
    url: str
    pages: Path
    bad_text: str


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("overflow")
    directory = let_token_overflow(tiny_llama(root / "model"), BAD)
    vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    (text,) = [text for text, number in vocabulary.items() if number == BAD]
    port = free_port()
    flags = ["--model", str(directory), "--worker-threads", "1", "--dtype", "float32"]
    flags += ["--page-size", "4", "--max-total-tokens", "1024", "--port", str(port)]
    flags += ["--kv-cache-dir", str(root / "kv"), "--chunked-prefill-size", "16"]
    flags += ["--served-model-name", "any"]
    with running_server(root / "log", *flags) as server:
        yield Running(server, f"http://127.0.0.1:{port}", root / "kv", text)


def post(url: str, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode(), dict(response.headers)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read()), dict(error.headers)


def num_nan_logits(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        text = response.read().decode()
    found = re.search(r"^quadriga:nan_logits_total\S* (\S+)", text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def test_a_bad_request_ends_by_name_and_neither_pool_nor_disk_keeps_its_pages(
    running: Running,
) -> None:
    with Client(running.server.endpoint) as client:
        expected = client.generate(GOOD, GREEDY)
        for prompt in ([BAD] * 20, [*GOOD, BAD, *GOOD], [*GOOD, *[BAD] * 3]):
            with pytest.raises(NonFiniteLogits, match="its numbers overflow for this text"):
                client.generate(prompt, GREEDY)
            again = client.generate(GOOD, GREEDY)
            assert again.token_ids == expected.token_ids
        settle(running.server.endpoint)
        with pytest.raises(NonFiniteLogits):
            client.generate([BAD] * 20, GREEDY)
        info = client.info()
    assert info["errors"] == {NonFiniteLogits.code: 4}
    assert num_nan_logits(running.url) == 4
    # Full pages of 30 good tokens and 7 known ones of their answer, and of the good beginnings.
    wait_until(lambda: len(list(running.pages.rglob("*.kv"))) == client_pages(running), 60)
    assert client_pages(running) == 9


def client_pages(running: Running) -> int:
    with Client(running.server.endpoint) as client:
        return int(client.info()["kv_offload_pages"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [BAD] * 5, "logprobs": 2}),
        ("/v1/completions", {"prompt": [BAD] * 5, "temperature": 0.7, "n": 2}),
        ("/v1/chat/completions", {"messages": "chat"}),
        ("/v1/responses", {"input": "text"}),
        ("/v1/messages", {"messages": "chat", "max_tokens": 5}),
        ("/api/generate", {"prompt": "text", "stream": False}),
        ("/generate", {"input_ids": [BAD] * 5}),
    ],
)
def test_each_api_answers_with_its_own_form_of_the_error(
    path: str, body: dict[str, Any], running: Running
) -> None:
    before, text = num_nan_logits(running.url), running.bad_text * 3
    values = {"chat": [{"role": "user", "content": text}], "text": text}
    sent = {name: values.get(v, v) if isinstance(v, str) else v for name, v in body.items()}
    model = {} if path == "/generate" else {"model": "any"}
    status, answer, headers = post(f"{running.url}{path}", {**model, **sent})
    assert status == 500, answer
    assert "NaN or infinite" in json.dumps(answer)
    assert headers["X-Should-Retry"] == "false"
    assert num_nan_logits(running.url) >= before + 1


def test_a_grammar_is_not_blamed(running: Running) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    message = {"role": "user", "content": running.bad_text * 3}
    status, answer, _headers = post(
        f"{running.url}/v1/chat/completions",
        {"model": "any", "messages": [message], "response_format": schema, "max_tokens": 5},
    )
    assert status == 500
    assert answer["error"]["code"] == NonFiniteLogits.code
    assert "grammar" not in answer["error"]["message"]


def test_a_stream_ends_with_the_error(running: Running) -> None:
    body = {"model": "any", "prompt": [BAD] * 5, "stream": True}
    status, answer, _headers = post(f"{running.url}/v1/completions", body)
    text = answer if isinstance(answer, str) else json.dumps(answer)
    assert NonFiniteLogits.code in text
    assert status in (200, 500)
