"""The gateway as a child of the launcher: start, failed start, drain and crash."""

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from bench.client.server import free_port
from quadriga.client import Client
from quadriga.errors import PromptTooLong
from quadriga.sampling.params import SamplingParams
from quadriga.server.processes.control_channel import (
    EXIT_CHILD_DIED,
    EXIT_FORCED,
    EXIT_OK,
    EXIT_START_FAILED,
)
from tests.server import Server, is_alive, launch, running_server, wait_until

BODY = {"prompt": [5], "max_tokens": 250, "stream": True, "ignore_eos": True}


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def own_server(llama_dir: Path, tmp_path: Path, port: int) -> Iterator[Server]:
    flags = ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1"]
    flags += ["--max-total-tokens", "4096", "--port", str(port), "--max-restarts", "0"]
    flags += ["--log-level", "debug", "--log-slow-requests", "0.001", "--log-stats-interval", "0.2"]
    with running_server(tmp_path / "log", *flags) as server:
        yield server


def post(port: int, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data)
    return urllib.request.urlopen(request, timeout=30)


def test_a_signal_lets_open_streams_end_and_a_taken_port_is_named(
    own_server: Server, port: int, llama_dir: Path
) -> None:
    assert f"http://127.0.0.1:{port}" in own_server.log.read_text()
    second = launch(
        f"tcp://127.0.0.1:{free_port()}", "--model", str(llama_dir), "--port", str(port)
    )
    output, _ = second.communicate(timeout=60)
    assert second.returncode == EXIT_START_FAILED
    assert f"port {port} of 127.0.0.1 is taken" in output.decode()
    assert "--no-http" in output.decode()
    with post(port, BODY) as stream:
        first = stream.readline()
        own_server.process.send_signal(signal.SIGTERM)
        whole = first + stream.read()
    assert whole.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in whole
    assert own_server.process.wait(20) == EXIT_OK


def test_the_log_has_each_request_once_and_the_throughput(own_server: Server, port: int) -> None:
    with Client(own_server.endpoint) as client:
        client.generate([5], SamplingParams(max_new_tokens=9, ignore_eos=True))
        with pytest.raises(PromptTooLong):
            client.generate([5], SamplingParams(max_new_tokens=10**9))
    post(port, BODY | {"stream": False, "max_tokens": 9}).close()
    wait_until(lambda: "generated 9 · queued" in own_server.log.read_text(), 5)
    wait_until(lambda: " tok/s · KV " in own_server.log.read_text(), 5)
    os.kill(own_server.process.pid, signal.SIGTERM)
    assert own_server.process.wait(20) == EXIT_OK
    lines = own_server.log.read_text().splitlines()
    by_ring = [line for line in lines if " scheduler_proc WARNING slow: " in line]
    by_gateway = [line for line in lines if " http_proc WARNING slow: cmpl-" in line]
    refused = [line for line in lines if " · refused · prompt_too_long: " in line]
    assert [len(by_ring), len(by_gateway), len(refused)] == [1, 1, 1]
    assert "stages: tokenize " in by_ring[0] and ", delivery " in by_gateway[0]
    for text in ("starting as process", "worker process", "command of the launcher: drain"):
        assert any(" DEBUG " in line and text in line for line in lines), text


@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [
        (signal.SIGINT, EXIT_FORCED, "the server was stopped at once"),
        (signal.SIGKILL, -signal.SIGKILL, "the server's launcher was killed"),
    ],
)
def test_a_second_signal_and_a_killed_launcher_end_a_stream_with_an_error_event(
    own_server: Server, port: int, number: signal.Signals, code: int, reason: str
) -> None:
    with post(port, BODY | {"n": 64}) as stream:
        first = stream.readline()
        if number is not signal.SIGKILL:
            own_server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "stopping: open requests" in own_server.log.read_text(), 10)
        own_server.process.send_signal(number)
        *_, error, done = (first + stream.read()).strip().split(b"\n\n")
    assert done == b"data: [DONE]"
    body = json.loads(error.removeprefix(b"data: "))
    assert body["error"]["code"] == "server_failed"
    assert reason in body["error"]["message"]
    assert own_server.process.wait(20) == code
    wait_until(lambda: not any(map(is_alive, own_server.pids.values())), 5)


@pytest.mark.parametrize("victim", ["worker_proc", "http_proc"])
def test_a_death_ends_open_requests_and_is_named(
    own_server: Server, port: int, victim: str
) -> None:
    ended: list[bytes | Exception] = []

    def read() -> None:
        try:
            with post(port, BODY | {"n": 64}) as stream:
                started.set()
                ended.append(stream.read())
        except (OSError, HTTPException) as error:
            ended.append(error)

    started = threading.Event()
    thread = threading.Thread(target=read)
    thread.start()
    assert started.wait(20)
    os.kill(own_server.pids[victim], signal.SIGKILL)
    thread.join(20)
    assert own_server.process.wait(20) == EXIT_CHILD_DIED
    assert f"launcher ERROR {victim} died (killed by SIGKILL)" in own_server.log.read_text()
    wait_until(lambda: not any(map(is_alive, own_server.pids.values())), 5)
    (end,) = ended
    if victim == "worker_proc":
        assert isinstance(end, bytes)
        assert end.endswith(b"data: [DONE]\n\n")
        assert b"worker_proc died (killed by SIGKILL)" in end
