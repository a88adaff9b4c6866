"""The lines of a server that is ready: they name what works for this model and these flags."""

import os
import re
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from quadriga.server.cli import main as cli
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.processes import first_screen
from quadriga.server.processes.child_process import ChildProcess
from quadriga.server.processes.logs import say
from quadriga.wire.client import DEFAULT_ENDPOINT, PRIVATE_ENDPOINT

WORKER = {"dtype": "bfloat16", "device": "cpu", "tokens": 64, "backend": "native", "threads": 2}


def lines(has_chat: bool = True, endpoint: str = DEFAULT_ENDPOINT, **flags: Any) -> dict[str, str]:
    """Return the lines by their first words."""
    config = ServerConfig().replace(**flags)
    shown = first_screen.usage_lines(config, has_chat, endpoint)
    return dict(line.split(None, 1) for line in shown)


def worker(**fields: Any) -> ChildProcess:
    control, _ = socket.socketpair()
    process: Any = None
    return ChildProcess("worker_proc", process, control, info=WORKER, **fields)


def test_the_line_that_scripts_wait_for_names_model_and_addresses() -> None:
    line = first_screen.ready_line([(ServerConfig(), WORKER)], 2.94, DEFAULT_ENDPOINT)
    assert line == (
        "quadriga ready in 2.9 s · smollm2-135m bfloat16 cpu · zmq tcp://127.0.0.1:5555"
        " · http://127.0.0.1:8000"
    )


def test_phases_that_took_no_time_are_left_out_of_the_summary() -> None:
    line = first_screen.start_summary(
        "", 0.0, worker(phases=["compile kernels 9.1 s", "warm up 0.0 s"])
    )
    assert line == "  compile kernels 9.1 s · KV pool 64 tokens · native backend · 2 threads"


def test_a_chat_model_is_asked_with_messages_and_a_base_model_with_a_prompt() -> None:
    chat, base = lines(), lines(has_chat=False)
    assert "/v1/chat/completions" in chat["curl"] and "messages" in chat["curl"]
    assert "/v1/completions" in base["curl"] and '"prompt"' in base["curl"]
    assert "--plain" not in chat["ask"] and " ask --plain " in base["ask"]


def test_the_ask_line_is_a_command_line_of_quadriga() -> None:
    command = lines(has_chat=False, endpoint="tcp://127.0.0.1:9")["ask"]
    words = shlex.split(command)
    arguments = cli._parser("ask").parse_args(words[words.index("ask") :])
    assert (arguments.plain, arguments.endpoint) == (True, "tcp://127.0.0.1:9")


def test_addresses_are_those_that_a_client_can_reach() -> None:
    assert lines(host="0.0.0.0", port=80)["OpenAI"] == "http://127.0.0.1:80/v1"
    assert lines(host="::")["docs"] == "http://[::1]:8000/docs"
    assert "tcp://127.0.0.1:6" in lines(endpoint="tcp://*:6")["ask"]
    assert "--endpoint" not in lines(endpoint="tcp://0.0.0.0:5555")["ask"]
    assert lines(host="0.0.0.0")["page"] == "http://127.0.0.1:8000/"
    assert "page" not in lines(no_ui=True)
    assert set(lines(no_http=True)) == {"ask", "open"}
    assert "Bearer" in lines(api_key="k")["curl"] and "Bearer" not in lines()["curl"]
    assert "--curve-dir" in lines(curve_dir="keys")["ask"]


def test_a_server_whose_zeromq_socket_is_closed_is_asked_by_http() -> None:
    shown = lines(endpoint="ipc:///tmp/run/public")["ask"]
    assert "--endpoint ipc:///tmp/run/public" in shown
    config = ServerConfig().replace(endpoint=PRIVATE_ENDPOINT, api_key="k", host="0.0.0.0")
    *_, ask = first_screen.usage_lines(config, True, "ipc:///tmp/run/public")
    assert ' ask --endpoint http://127.0.0.1:8000 --api-key $KEY "Name' in ask


def test_the_command_is_as_short_as_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "bin" / "quadriga"
    script.parent.mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert first_screen.command_name() == f"{sys.executable} -m quadriga"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert first_screen.command_name() == "bin/quadriga"
    monkeypatch.setenv("PATH", str(script.parent))
    assert first_screen.command_name() == "quadriga"


def test_a_phase_line_changes_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    line = first_screen.PhaseLine(shown=False)
    line.show([worker(phase="load weights")], 1.0)
    monkeypatch.setattr(sys, "stderr", os.fdopen(theirs, "w"))
    line = first_screen.PhaseLine(shown=True)
    for now in (0.0, 0.1, 0.2, 1.2):
        line.show([worker(phase="load weights")], now)
    line.close()
    sys.stderr.write("end")
    sys.stderr.flush()
    shown = ""
    while not shown.endswith("end"):  # the system passes it on in parts
        shown += os.read(ours, 1000).decode()
    assert re.findall(r"worker_proc: load weights \.\.\. (\d) s", shown) == ["0", "1"]
    os.close(ours)


def test_lines_off_a_terminal_have_time_process_and_severity(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say("quadriga ready in 1.0 s")
    say("error: it broke")
    ready, error = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d launcher INFO quadriga ready in 1\.0 s", ready)
    assert re.fullmatch(r"\d\d:\d\d:\d\d launcher ERROR it broke", error)
