"""The command as a whole, against a front door that answers by itself."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from bench.server import free_port
from bench.serving import EXIT_FAILED_REQUESTS, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, main
from quadriga import sockets
from quadriga.messages import (
    PROTOCOL_VERSION,
    Abort,
    Chunk,
    Chunks,
    ClientMessage,
    End,
    ErrorInfo,
    Generate,
    GetInfo,
    Info,
    Ping,
    Pong,
    Refused,
    StageTimes,
    Usage,
    pack_ids,
)

ROOT = Path(__file__).resolve().parents[2]


class FakeServer(threading.Thread):
    """Two tokens for every prompt; a text that holds "refuse" is refused, "silent" unanswered."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self.endpoint = endpoint
        self.requests: list[Generate] = []
        self.aborts = 0
        self.clients: set[bytes] = set()
        self.stopping = False
        self._socket = sockets.bind_front_door(endpoint)

    def run(self) -> None:
        decode = msgspec.msgpack.Decoder(ClientMessage).decode
        while not self.stopping:
            if self._socket.poll(20):
                client, frame = self._socket.recv_multipart()
                self.clients.add(client)
                answer = self._answer(decode(frame))
                if answer is not None:
                    self._socket.send_multipart([client, sockets.encode(answer)])
        self._socket.close(linger=0)

    def _answer(self, message: ClientMessage) -> msgspec.Struct | None:
        match message:
            case Ping():
                return Pong(PROTOCOL_VERSION, "one", 2**20)
            case GetInfo():
                return Info(message.request_id, {"model": "fake", "vocab_size": 500, "ready": True})
            case Abort():
                self.aborts += 1
                return None
            case _:
                self.requests.append(message)
                return self._complete(message)

    def _complete(self, request: Generate) -> msgspec.Struct | None:
        if "silent" in str(request.prompt):
            return None
        if "refuse" in str(request.prompt):
            return Refused(request.request_id, ErrorInfo("queue_full", "no room"))
        now = time.time()
        end = End("length", Usage(4, 2, 0), StageTimes(now, now, now, now, now))
        return Chunks([Chunk(request.request_id, 0, "ab", pack_ids([1, 2]), [now, now], end)])


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer(f"tcp://127.0.0.1:{free_port()}")
    fake.start()
    yield fake
    fake.stopping = True
    fake.join()


def bench(server: FakeServer, flags: str) -> int:
    return main(["--endpoint", server.endpoint, *flags.split()])


def test_warm_ups_and_runs_send_prompts_of_their_own(
    server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    flags = "--num-requests 3 --warmup-runs 2 --repeat-runs 2 --prompt Hi --max-new-tokens 2"
    assert bench(server, f"{flags} --json {path}") == EXIT_OK
    sent = [str(request.prompt) for request in server.requests]
    assert sent == ["b Hi"] * 3 + ["c Hi"] * 3 + ["Hi"] * 3 + ["a Hi"] * 3
    headings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("===")]
    assert headings == [
        "=== warmup 1/2 ===",
        "=== warmup 2/2 ===",
        "=== run 1/2 ===",
        "=== streaming benchmark ===",
        "=== run 2/2 ===",
        "=== streaming benchmark ===",
        "=== median (lowest to highest) of 2 runs ===",
    ]
    assert [
        run["summary"]["completion_tokens"] for run in json.loads(path.read_text())["runs"]
    ] == [
        6,
        6,
    ]


def test_requests_carry_what_the_flags_say(server: FakeServer) -> None:
    flags = "--num-requests 1 --warmup-runs 0 --truncate --no-stop-on-eos --random-input-len 6"
    assert bench(server, f"{flags} --max-new-tokens 5") == EXIT_OK
    (request,) = server.requests
    assert len(request.prompt_token_ids or b"") == 4 * 6
    assert request.truncate_prompt is True
    assert (request.params.max_new_tokens, request.params.ignore_eos) == (5, True)
    assert request.params.temperature == 0.0


def test_all_requests_ride_on_one_connection_unless_asked_otherwise(server: FakeServer) -> None:
    bench(server, "--num-requests 4 --warmup-runs 0")
    one_bench = len(server.clients)
    bench(server, "--num-requests 4 --warmup-runs 0 --num-clients 3")
    assert len(server.clients) - one_bench == one_bench + 2


def test_a_failed_request_makes_the_exit_code_1(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(server, "--num-requests 2 --prompt refuse") == EXIT_FAILED_REQUESTS
    line = "Failed requests: 2 (first error: QueueFull: no room)"
    assert capsys.readouterr().out.count(line) == 2


def test_pretok_without_the_tokenizer_library_says_what_to_install(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "quadriga.text", None)
    assert bench(server, "--pretok") == EXIT_USAGE
    assert "pip install 'quadriga[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order(server: FakeServer, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "bench.serving", "--endpoint", server.endpoint]
    process = subprocess.Popen(
        [*command, "--prompt", "silent", "--num-requests", "2"],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 20
    while len(server.requests) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    _, error = process.communicate(timeout=20)
    assert process.returncode == EXIT_INTERRUPTED
    assert error == "bench.serving: interrupted\n"
    assert server.aborts == 1
