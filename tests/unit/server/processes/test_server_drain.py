"""The stop of a server whose processes only wait: what it sends, and what it kills."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quadriga.clock import Countdown
from quadriga.server.config.server_config import LaunchArgs, ServerConfig
from quadriga.server.processes import server_processes
from quadriga.server.processes.control_channel import EXIT_FORCED, EXIT_OK
from quadriga.server.processes.model_processes import ModelPlan
from quadriga.server.processes.replicas import FRONTEND, RING, WORKER
from quadriga.server.processes.server_processes import ServerDrain, ServerProcesses

READY = """
import json, os, socket, sys
control = socket.socket(fileno=int(sys.argv[sys.argv.index("--control-fd") + 1]))
def report_ready():
    control.sendall(b'{"report": "ready"}\\n')
"""
# Exits at one of its commands, and notes all of them.
FRONTEND_PROCESS = """
lifeline = os.open(LIFELINE, os.O_RDWR)
report_ready()
for line in control.makefile():
    command = line.split()[0]
    if command == "beat":
        continue
    with open(NOTES, "a") as notes:
        notes.write(command + " ")
    if command == LAST_COMMAND:
        break
"""
# Exits when the frontend has gone.
RING_PROCESS = """
lifeline = os.open(LIFELINE, os.O_RDONLY)
report_ready()
os.read(lifeline, 1)
"""
STUCK_PROCESS = """
report_ready()
while control.recv(100):
    pass
"""
SHUTDOWN_TIMEOUT_S = 30.0
START_TIMEOUT_S = 20.0
Start = Callable[..., ServerProcesses]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return what starts a server whose frontend exits at a command."""
    handlers = {number: signal.getsignal(number) for number in (1, 2, 15)}
    started: list[ServerProcesses] = []
    os.mkfifo(tmp_path / "lifeline")

    def start(last_command: str, stuck: str = "") -> ServerProcesses:
        values = {"LIFELINE": "lifeline", "NOTES": "notes"}
        settings = "".join(f"{k} = {str(tmp_path / v)!r}\n" for k, v in values.items())
        settings += f"LAST_COMMAND = {last_command!r}\n"
        for name in (*RING, FRONTEND):
            script = FRONTEND_PROCESS if name == FRONTEND else RING_PROCESS
            script = STUCK_PROCESS if name == stuck else script
            (tmp_path / f"{name}.py").write_text(READY + settings + script)
        processes = ServerProcesses(
            [ModelPlan("", ServerConfig(), [])],
            None,
            LaunchArgs(),
            lambda name: [sys.executable, str(tmp_path / f"{name}.py")],
        )
        started.append(processes)
        processes.start_all()
        countdown = Countdown(START_TIMEOUT_S)
        while processes.not_ready:
            assert processes.next_event(countdown) is None
        return processes

    yield start
    for processes in started:
        processes.clean_up()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def commands(directory: Path) -> list[str]:
    return (directory / "notes").read_text().split()


def test_a_drain_ends_when_every_process_has_exited(start: Start, tmp_path: Path) -> None:
    assert ServerDrain(start("drain"), SHUTDOWN_TIMEOUT_S, has_journal=False).run() == EXIT_OK
    assert commands(tmp_path) == ["drain"]


def test_what_is_left_after_the_timeout_is_aborted(start: Start, tmp_path: Path) -> None:
    assert ServerDrain(start("abort"), 0.2, has_journal=False).run() == EXIT_OK
    assert commands(tmp_path) == ["drain", "abort"]


def test_a_server_that_does_not_abort_in_time_is_stopped_by_force(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_processes, "ABORT_TIMEOUT_S", 0.2)
    assert ServerDrain(start("never"), 0.2, has_journal=False).run() == EXIT_FORCED


@pytest.mark.parametrize("has_journal", [False, True])
def test_a_second_signal_fails_the_clients_unless_another_server_resumes_their_requests(
    start: Start, tmp_path: Path, has_journal: bool
) -> None:
    processes = start("fail")
    os.kill(os.getpid(), signal.SIGTERM)
    assert ServerDrain(processes, SHUTDOWN_TIMEOUT_S, has_journal).run() == EXIT_FORCED
    if has_journal:
        assert processes[FRONTEND].process.poll() is None
    else:
        assert commands(tmp_path) == ["drain", "fail"]


def test_a_worker_that_hangs_is_killed_once_the_clients_have_everything(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_processes, "EXIT_GRACE_S", 0.2)
    processes = start("drain", stuck=WORKER)
    assert ServerDrain(processes, SHUTDOWN_TIMEOUT_S, has_journal=False).run() == EXIT_OK
    assert processes[WORKER].process.returncode == -signal.SIGKILL
