"""The command as a whole, against a frontend that answers without a ring."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import serving
from bench.cli.command import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NO_SERVER, EXIT_OK, EXIT_USAGE
from bench.client.load_generator import LoadRun, RequestRecord
from bench.client.server import free_port
from bench.load.workload import PlannedRequest
from bench.serving import as_sent, main
from quadriga.programs import install_command
from quadriga.wire.client import Generate
from quadriga.wire.curve import make_client_keys, make_server_keys
from quadriga.wire.packing import unpack_ids
from simulator.trace import TraceRequest, prompt_ids, write_trace
from tests.unit.fake_server import FakeServer, running_fake_server
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]


class ByteTokenizer:
    """A tokenizer with a token for each byte."""

    def encode(self, text: str, add_special_tokens: bool) -> "ByteTokenizer":
        assert not add_special_tokens
        self.ids = [*text.encode()]
        return self

    def get_vocab_size(self) -> int:
        return 256


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running_fake_server() as fake:
        yield fake


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
    headings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("=== ")]
    assert headings == [
        "=== warmup 1/2 ===",
        "=== warmup 2/2 ===",
        "=== run 1/2 ===",
        "=== streaming benchmark ===",
        "=== run 2/2 ===",
        "=== streaming benchmark ===",
        "=== median (lowest to highest) of 2 runs ===",
    ]
    runs = json.loads(path.read_text())["runs"]
    assert [run["summary"]["completion_tokens"] for run in runs] == [6, 6]


def test_a_short_warm_up_and_a_table_are_the_default(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(server, "--num-requests 9") == EXIT_OK
    assert len(server.requests) == serving.NUM_WARMUP_REQUESTS + 9
    out = capsys.readouterr().out
    assert "===" not in out
    assert "TTFT" in out and "requests/s" in out


def test_natural_prompts_are_chats_where_the_model_has_a_template(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench(server, "--num-requests 2") == EXIT_OK
    assert all(isinstance(request.prompt, str) for request in server.requests)
    server.requests.clear()
    monkeypatch.setitem(server.info, "chat", True)
    for flags, is_chat in (("", True), ("--prompt Hi", False)):
        assert bench(server, f"--num-requests 2 {flags}") == EXIT_OK
        assert all(isinstance(request.prompt, list) == is_chat for request in server.requests)
        server.requests.clear()


def test_verbose_prints_all_figures(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(server, "--num-requests 2 --verbose") == EXIT_OK
    out = capsys.readouterr().out
    for heading in ("requests/s, ", "=== streaming benchmark ==="):
        assert heading in out


def test_a_server_that_wants_keys_is_measured_with_those_of_curve_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_server_keys(tmp_path)
    keys = make_client_keys(tmp_path, "ann")
    locked = FakeServer(f"tcp://127.0.0.1:{free_port()}", tmp_path)
    locked.start()
    try:
        assert bench(locked, f"--num-requests 1 --curve-dir {keys}") == EXIT_OK
        monkeypatch.setattr(serving, "CONNECT_TIMEOUT_S", 0.5)
        assert bench(locked, "--num-requests 1") == EXIT_NO_SERVER
    finally:
        locked.stopping = True
        locked.join()


def test_requests_carry_what_the_flags_say(server: FakeServer) -> None:
    flags = "--num-requests 1 --warmup-runs 0 --truncate --no-stop-on-eos --random-input-len 6"
    assert bench(server, f"{flags} --max-new-tokens 5") == EXIT_OK
    (request,) = server.requests
    assert len(request.prompt_token_ids or b"") == 4 * 6
    assert request.truncate_prompt is True
    assert (request.params.max_new_tokens, request.params.ignore_eos) == (5, True)
    assert request.params.temperature == 0.0


def own_ids(request: Generate) -> list[int]:
    return unpack_ids(request.prompt_token_ids or b"").tolist()


def test_a_trace_is_sent_with_what_it_says_of_each_request(
    server: FakeServer, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    chat = [TraceRequest(0.0, ((1, 4),), 2), TraceRequest(0.0, ((2, 3),), 7, follows=0)]
    write_trace(path, [*chat, TraceRequest(0.01, (), 2, 5, priority=9, ids=(7, 8))])
    assert bench(server, f"--trace {path} --warmup-runs 0 --seed 2") == EXIT_OK
    sent = sorted(server.requests, key=lambda request: len(own_ids(request)))
    prompts = [prompt_ids(request, 500, 2).tolist() for request in chat]
    assert [own_ids(request) for request in sent] == [
        [7, 8],
        prompts[0],
        [*prompts[0], 1, 2, *prompts[1]],
    ]
    assert [request.params.max_new_tokens for request in sent] == [2, 2, 7]
    assert [request.priority for request in sent] == [9, 0, 0]


@pytest.mark.parametrize(
    "flags",
    [
        "--random-input-len 4:9 --max-new-tokens 1:9 --turns 2 --request-rate 1000",
        "--random-input-len 4 --prefix-groups 2 --prefix-len 8",
        "--pretok --prompt Hi --unique-prompts --max-new-tokens 3 --submit-interval-ms 1",
    ],
)
def test_a_saved_trace_sends_the_same_again(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    monkeypatch.setattr("bench.cli.options.tokenizer_of", lambda *_: ByteTokenizer())
    path = tmp_path / "t.jsonl"
    flags = f"{flags} --num-requests 4 --repeat-runs 2 --warmup-runs 1"
    assert bench(server, f"{flags} --save-trace {path}") == EXIT_OK
    first = sorted((own_ids(r), r.params.max_new_tokens or 0) for r in server.requests[4:8])
    server.requests.clear()
    assert bench(server, f"--trace {path} --warmup-runs 1") == EXIT_OK
    again = sorted((own_ids(r), r.params.max_new_tokens or 0) for r in server.requests)
    assert all(request in again for request in first)
    warm_up = [own_ids(request) for request in server.requests[:4]]
    assert not [ids for ids, _ in first if ids in warm_up]


def test_times_of_their_own_are_saved_for_requests_without_any() -> None:
    jobs = [
        PlannedRequest(TraceRequest(0.0, (), 3), [7]),
        PlannedRequest(TraceRequest(0.5, ((1, 4),), 3, follows=0), [8]),
    ]
    records = [RequestRecord(0, 100.25, 100.5), RequestRecord(1, 0.0, 0.0)]
    assert as_sent(jobs, LoadRun(records, 100.0, 0.5)) == [
        TraceRequest(0.25, (), 3, ids=(7,)),
        jobs[1].request,
    ]


def test_all_requests_ride_on_one_connection_unless_asked_otherwise(server: FakeServer) -> None:
    bench(server, "--num-requests 4 --warmup-runs 0")
    one_bench = len(server.clients)
    bench(server, "--num-requests 4 --warmup-runs 0 --num-clients 3")
    assert len(server.clients) - one_bench == one_bench + 2


@pytest.mark.parametrize(
    ("command", "name"),
    [("-m bench.serving", "python -m bench.serving"), ("-m quadriga bench", "quadriga bench")],
)
def test_help_shows_the_command_that_was_typed(command: str, name: str) -> None:
    done = subprocess.run(
        [sys.executable, *command.split(), "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.startswith(f"usage: {name} [FLAGS]")


def test_a_failed_request_makes_the_exit_code_1(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(server, "--num-requests 2 --prompt refuse") == EXIT_FAILED
    line = "Failed requests: 2 (first error: QueueFull: no room)"
    assert capsys.readouterr().out.count(line) == 2


def test_pretok_without_the_tokenizer_library_says_what_to_install(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "quadriga.server.models.formats.tokenizer", None)
    assert bench(server, "--pretok") == EXIT_USAGE
    assert install_command("serve") in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_cleanly(server: FakeServer, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "bench.serving", "--endpoint", server.endpoint]
    process = subprocess.Popen(
        [*command, "--prompt", "silent", "--num-requests", "2"],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: len(server.requests) == 2, 20)
    process.send_signal(number)
    _, error = process.communicate(timeout=20)
    assert process.returncode == EXIT_INTERRUPTED
    assert error == "bench.serving: interrupted\n"
    assert server.aborts == 1
