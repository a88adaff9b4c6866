"""The commands, against a real server."""

import subprocess
import sys
from pathlib import Path

import pytest

from quadriga.client import Client, SamplingParams
from quadriga.server.cli.main import main
from tests.server import ROOT, Server


def quadriga(*arguments: str, typed: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "quadriga", *arguments]
    return subprocess.run(
        command, input=typed, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )


def test_ask_prints_what_the_client_library_gives(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--endpoint", server.endpoint, "--max-new-tokens", "5", "--seed", "3"]
    assert main(["ask", *flags, "--temperature", "1", "Hello", "there"]) == 0
    printed = capsys.readouterr().out
    with Client(server.endpoint) as client:
        params = SamplingParams(max_new_tokens=5, seed=3, temperature=1.0)
        answer = client.generate([{"role": "user", "content": "Hello there"}], params)
    assert printed == answer.text + "\n"


def test_a_chat_goes_on_after_an_answer_that_has_no_room(server: Server) -> None:
    long = "word " * 5000
    done = quadriga(
        "chat", "--endpoint", server.endpoint, "--temperature", "0", "--max-new-tokens", "4",
        typed=f"Hello\n{long}\nHello again\n/clear\nHello\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Or start over with /reset" in done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) >= 3 and answers[0] == answers[-1], "the same question again"


def test_a_wrong_key_in_the_file_of_flags_stops_the_server_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text("max-batchsize: 4\n")
    done = quadriga("serve", "--config", str(tmp_path / "server.yaml"))
    assert done.returncode == 2
    assert "no flag 'max-batchsize'; near it: max-batch-size" in done.stderr
    assert done.stderr.count("\n") == 1
