"""A server with keys: what the port, the closed ZeroMQ socket and the one that is a file answer."""

import json
import os
import signal
import stat
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from bench.client.server import free_port
from quadriga.client import Client
from quadriga.sampling.params import SamplingParams
from quadriga.server.processes.control_channel import EXIT_START_FAILED, EXIT_USAGE
from tests.server import Server, launch, run_launcher, running_server, wait_until

BODY = {"prompt": [5], "max_tokens": 4, "ignore_eos": True}
GREEDY = SamplingParams(max_new_tokens=4, ignore_eos=True, temperature=0.0)


def completion(port: int, key: str = "") -> tuple[int, Any]:
    """Return status and body of an answer of the gateway."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(BODY).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def socket_of(server: Server) -> Path:
    return Path(server.endpoint.removeprefix("ipc://"))


def test_a_socket_that_is_a_file_serves_its_user_beside_a_gateway_with_keys(
    llama_dir: Path, tmp_path: Path
) -> None:
    port, path = free_port(), tmp_path / "zmq"
    flags = ["--model", str(llama_dir), "--dtype", "float32", "--port", str(port)]
    flags += ["--max-total-tokens", "4096", "--host", "0.0.0.0", "--api-key", "k"]
    with running_server(tmp_path / "log", *flags, endpoint=f"ipc://{path}") as server:
        doors = f"open    http 0.0.0.0:{port} with keys · zmq {path} for this user only"
        wait_until(lambda: doors in server.log.read_text(), 20, server.log.read_text)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert completion(port)[0] == 401
        status, body = completion(port, "k")
        assert status == 200 and body["usage"]["completion_tokens"] == 4
        second = launch(server.endpoint, "--model", str(llama_dir))
        output, _ = second.communicate(timeout=60)
        assert second.returncode == EXIT_START_FAILED
        assert f"{server.endpoint} is the socket of another server" in output.decode()
        with Client(server.endpoint) as client:
            before = client.generate([5], GREEDY)
            os.kill(server.pid_of("tokenizer_proc"), signal.SIGKILL)
            assert client.generate([5], GREEDY).token_ids == before.token_ids
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        wait_until(lambda: completion(port, "k")[0] == 200, 20)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("zmq")] == []


def test_with_keys_no_zmq_socket_is_reachable_but_in_the_private_directory_of_the_run(
    llama_dir: Path, tmp_path: Path
) -> None:
    port, log = free_port(), tmp_path / "log"
    flags = ["--model", str(llama_dir), "--dtype", "float32", "--port", str(port)]
    flags += ["--max-total-tokens", "4096", "--api-key", "k"]
    process = launch("ipc", *flags, log=log)
    try:
        doors = f"open    http 127.0.0.1:{port} with keys · zmq closed"
        wait_until(lambda: doors in log.read_text(), 90, log.read_text)
        assert completion(port)[0] == 401 and completion(port, "k")[0] == 200
    finally:
        process.terminate()
        process.wait(20)


def test_open_doors_are_refused_before_anything_is_loaded(llama_dir: Path) -> None:
    code, output = run_launcher("--port", str(free_port()), "--host", "0.0.0.0")
    assert (
        code == EXIT_USAGE and "ERROR --host is 0.0.0.0, which other machines may reach" in output
    )
    code, output = run_launcher("--port", str(free_port()), "--api-key", "k")
    assert code == EXIT_USAGE and "clients need no key, and HTTP clients need one" in output
