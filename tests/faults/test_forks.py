"""Forks of streams outlive the death of each process: their tokens are those of the stream."""

import http.client
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.client.server import free_port
from tests.server import Server, running_server

PROCESSES = ("http_proc", "tokenizer_proc", "scheduler_proc", "worker_proc", "detok_proc")
TIMEOUT_S = 60.0
NUM_TOKENS = 200
ASKED = {
    "prompt": [7, 30, 31, 32, 30, 31, 90, 91], "max_tokens": NUM_TOKENS, "temperature": 1.0,
    "seed": 3, "ignore_eos": True, "stream": True, "resumable": True,
}  # fmt: skip

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def web_server(
    llama_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, str]]:
    """A server with a gateway, and the gateway's URL."""
    port, directory = free_port(), tmp_path_factory.mktemp("forks")
    flags = ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1",
             "--port", str(port), "--data-dir", str(directory / "data")]  # fmt: skip
    with running_server(directory / "log", *flags) as server:
        yield server, f"http://127.0.0.1:{port}"


def ask(url: str, body: Any = None, name: str = "") -> bytes:
    """Return an answer, of the server that there is within TIMEOUT_S."""
    deadline = time.monotonic() + TIMEOUT_S
    data = None if body is None else json.dumps(body).encode()
    while True:
        request = urllib.request.Request(url, data, {"X-Request-Id": name} if name else {})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                text: bytes = answer.read()
                return text
        except urllib.error.HTTPError as error:
            if error.code not in (429, 502, 503, 504):
                raise
        except (OSError, http.client.HTTPException):  # of a gateway that has died
            pass
        assert time.monotonic() < deadline, "the server does not come back"
        time.sleep(0.1)


def text_of(events: bytes) -> str:
    chunks = [event.partition(b"data: ")[2] for event in events.split(b"\n\n") if event]
    assert chunks[-1] == b"[DONE]"
    return "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks[:-1])


@pytest.mark.parametrize("process", PROCESSES)
def test_an_ended_stream_forks_after_a_death(web_server: tuple[Server, str], process: str) -> None:
    server, url = web_server
    name = f"ended-{process}"
    text = text_of(ask(f"{url}/v1/completions", ASKED, name))
    os.kill(server.pid_of(process), signal.SIGKILL)
    for at in (0, 77, NUM_TOKENS - 1):
        fork = {"at_token": at, "params": {"stream": False}}
        answer = json.loads(ask(f"{url}/v1/streams/{name}/fork", fork))
        assert answer["choices"][0]["text"] == text
        assert answer["usage"]["completion_tokens"] == NUM_TOKENS


@pytest.mark.parametrize("process", PROCESSES)
def test_a_streamed_fork_goes_on_after_a_death(
    web_server: tuple[Server, str], process: str
) -> None:
    server, url = web_server
    name = f"open-{process}"
    text = text_of(ask(f"{url}/v1/completions", ASKED, name))
    killer = threading.Timer(0.05, lambda: os.kill(server.pid_of(process), signal.SIGKILL))
    killer.start()
    streams = f"{url}/v1/streams"
    branches = [f"{name}-{at}" for at in (5, 60, 150)]
    for branch in branches:  # the same fork again, where the connection has broken
        at = int(branch.rpartition("-")[2])
        ask(f"{streams}/{name}/fork", {"at_token": at}, branch)
    killer.join()
    for branch in branches:
        assert text_of(ask(f"{streams}/{branch}")) == text
