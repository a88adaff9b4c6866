"""Restarts, the watchdog, and the states of a process."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from quadriga.errors import ConfigError
from quadriga.server.processes import supervisor as supervision
from quadriga.server.processes.child import KILL_SIGNAL
from quadriga.server.processes.child_process import ChildProcess, ChildState, StuckReport
from quadriga.server.processes.control_channel import Command, ControlChannel
from quadriga.server.processes.run_dir import make_run_dir
from quadriga.server.processes.supervisor import (
    DEATH_WINDOW_S,
    RestartPolicy,
    SupervisorEvent,
    Watchdog,
)
from scheduler_proc.main import StepWatchdog


def test_the_first_restart_comes_at_once_and_each_further_one_later_up_to_the_limit() -> None:
    restarts = RestartPolicy(9)
    delays = [restarts.delay_after_death("worker_proc", 100.0 + n) for n in range(10)]
    assert delays == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, None]
    assert restarts.delay_after_death("detok_proc", 110.0) == 0.0
    assert restarts.delay_after_death("worker_proc", 111.0 + DEATH_WINDOW_S) == 0.0


def test_with_no_restarts_allowed_the_first_death_is_one_too_many() -> None:
    assert RestartPolicy(0).delay_after_death("worker_proc", 0.0) is None


@dataclass
class PingedChild:
    pinged_at: float | None = None
    commands: list[Command] = field(default_factory=list)

    def send(self, command: Command) -> None:
        self.commands.append(command)


class Watch:
    """A watchdog of 4 s and two children, at a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.watchdog = Watchdog(4.0, lambda: self.now)
        self.lively, self.silent = PingedChild(), PingedChild()

    def check(self) -> list[Any]:
        """Return the overdue children; the lively one answers at once."""
        overdue = self.watchdog.check([self.lively, self.silent])  # type: ignore[list-item]
        self.lively.pinged_at = None
        return overdue

    def sleep(self) -> None:
        """As long as the watchdog allows."""
        seconds = self.watchdog.seconds_to_next()
        assert seconds is not None
        self.now += seconds


def test_only_the_process_that_does_not_answer_within_the_timeout_is_found() -> None:
    watch = Watch()
    found: list[Any] = []
    while not found:
        found = watch.check()
        watch.sleep()
    assert found == [watch.silent]
    assert watch.silent.commands == [Command.HEARTBEAT]
    assert 104.0 <= watch.now <= 106.0


def test_a_process_suspended_together_with_the_watchdog_is_not_found_hung() -> None:
    watch = Watch()
    for _ in range(20):
        assert watch.check() == []
        watch.now += 1000.0  # everything stands still; then the launcher goes on first
        for _ in range(3):
            assert watch.check() == []
            watch.sleep()
        watch.silent.pinged_at = None


def test_a_child_that_stays_silent_after_a_suspension_is_found_within_the_timeout() -> None:
    watch = Watch()
    watch.check()
    watch.now += 1000.0
    went_on_at = watch.now
    while not watch.check():
        watch.sleep()
    assert watch.now - went_on_at <= 5.0


def test_a_watchdog_without_timeout_sends_no_heartbeat() -> None:
    child = PingedChild()
    assert Watchdog(0.0).seconds_to_next() is None
    assert Watchdog(0.0).check([child]) == []  # type: ignore[list-item]
    assert child.commands == []


class StepWatch:
    """A step's deadline of 16 s, at a clock that is set by hand."""

    def __init__(self, seconds: float = 16.0) -> None:
        self.now = 100.0
        self.current_step_started_at: float | None = None
        self.reports: list[str] = []
        self.deadline = StepWatchdog(seconds, self, self, lambda: self.now)  # type: ignore[arg-type]

    def report(self, kind: str, process: str, why: str) -> None:
        self.reports.append(f"{kind} {process}: {why}")

    def check(self) -> None:
        """A round of the scheduler, and its sleep after that."""
        self.deadline.check()
        if self.deadline.wake_at is not None:
            self.now = self.deadline.wake_at


def test_a_step_that_does_not_end_is_reported_once_and_within_its_time() -> None:
    watch = StepWatch()
    watch.check()
    assert watch.deadline.wake_at is None, "an idle scheduler sleeps"
    watch.now = watch.current_step_started_at = 5000.0
    while not watch.reports:
        watch.check()
    assert 5016.0 <= watch.now <= 5017.0
    for _ in range(40):
        watch.check()
    assert watch.reports == ["stuck worker_proc: a step has run for 16 s"]
    assert watch.deadline.wake_at is None
    watch.current_step_started_at = watch.now
    while len(watch.reports) < 2:
        watch.check()


def test_steps_that_end_are_never_reported() -> None:
    watch = StepWatch()
    for _ in range(10):
        watch.current_step_started_at = watch.now
        for _ in range(15):
            watch.check()
    assert watch.reports == []


def test_a_suspension_of_everything_counts_as_one_sixteenth_of_a_steps_time() -> None:
    watch = StepWatch()
    watch.current_step_started_at = watch.now
    for _ in range(15):
        watch.check()
        watch.now += 1000.0
    watch.check()
    assert watch.reports == []
    watch.check()
    assert len(watch.reports) == 1


def test_without_a_timeout_no_step_is_reported_and_nothing_is_woken_for() -> None:
    watch = StepWatch(0.0)
    watch.current_step_started_at = watch.now
    watch.check()
    watch.now += 10_000.0
    watch.check()
    assert watch.reports == [] and watch.deadline.wake_at is None


def test_an_attended_process_answers_only_where_it_takes_its_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ControlChannel, "_exit_without_launcher", lambda self: None)
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    control = ControlChannel(theirs, tmp_path)
    ours.sendall(b"beat\n")
    assert b"beat" in ours.recv(100)
    control.answer_in_loop()
    ours.sendall(b"beat\ndrain\n")
    ours.settimeout(0.05)
    with pytest.raises(TimeoutError):
        ours.recv(100)
    commands: list[tuple[Command, str]] = []
    while not commands:
        commands = control.read_commands()
    assert commands == [(Command.DRAIN, "")]
    ours.settimeout(5)
    assert b"beat" in ours.recv(100)
    ours.close()
    for thread in threading.enumerate():
        if thread.name == "control":
            thread.join(5)


def test_a_run_whose_directory_cannot_be_made_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(**_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*make room, or set TMPDIR"):
        make_run_dir()


def test_a_process_that_the_system_cannot_start_now_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ring = object.__new__(supervision.Supervisor)
    ring._restart_at = {"detok_proc": 5.0}
    starts: list[str] = []

    def start(name: str) -> None:
        starts.append(name)
        if len(starts) == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(ring, "start", start)
    assert ring._restart("detok_proc", 5.0) is None
    assert ring._restart_at == {"detok_proc": 5.0 + supervision.START_RETRY_S}
    assert "detok_proc cannot be started now ([Errno 11]" in capsys.readouterr().err
    assert ring._restart("detok_proc", 6.0) is SupervisorEvent.RESTARTED
    assert (ring._restart_at, len(starts)) == ({}, 2)


class Children(Iterator[tuple[ChildProcess, socket.socket]]):
    """Makes children that run `sleep`, each with the socket on which it reports."""

    def __init__(self) -> None:
        self._children: list[ChildProcess] = []

    def __next__(self) -> tuple[ChildProcess, socket.socket]:
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        self._children.append(ChildProcess("worker_proc", process, ours))
        return self._children[-1], theirs

    def close(self) -> None:
        for child in self._children:
            child.process.kill()
            child.process.wait()
            child.control.close()


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    made.close()


def test_a_child_goes_from_start_to_exit_through_its_reports(children: Children) -> None:
    child, reports = next(children)
    assert child.is_running and not child.is_ready
    reports.sendall(b'{"report": "begin", "what": "load"}\n')
    assert child.receive() == [] and child.phase == "load"
    reports.sendall(b'{"report": "phase", "what": "load", "seconds": 1.5}\n{"report": "rea')
    assert child.receive() == [] and child.phase == ""
    reports.sendall(b'dy", "tokens": 9}\n')
    assert child.receive() == [] and child.is_ready
    assert (child.info, child.phases) == ({"tokens": 9}, ["load 1.5 s"])
    reports.sendall(b'{"report": "stuck", "process": "detok_proc", "why": "slow"}\n')
    assert child.receive() == [StuckReport("detok_proc", "slow")]
    reports.close()
    child.process.kill()
    assert child.receive() is None
    assert child.close()[:3] == (ChildState.READY, -signal.SIGKILL, "killed by SIGKILL")
    assert child.has_exited and not child.is_running


def test_a_child_that_hung_keeps_the_reason_and_cannot_become_ready(children: Children) -> None:
    child, reports = next(children)
    child.kill_hung("it does not answer")
    reports.sendall(b'{"report": "ready"}\n{"report": "fatal", "message": "late"}\n')
    child.receive()
    assert child.state is ChildState.HUNG and not child.is_running
    child.stop_for_reload()
    assert child.state is ChildState.HUNG
    assert child.close().reason == "hung: it does not answer"


def test_a_stopped_process_that_hung_logs_its_stacks_before_it_dies() -> None:
    code = "from quadriga.server.processes.child import log_stacks_on_signals as log; log();"
    code += "import time; print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        child = ChildProcess("worker_proc", process, socket.socketpair()[0])
        child.kill_hung("it does not answer")
        assert process.wait(10) == -KILL_SIGNAL
        assert b"most recent call first" in process.stderr.read()


def test_a_reload_and_a_fatal_error_are_seen_at_the_exit(children: Children) -> None:
    child, reports = next(children)
    reports.sendall(b'{"report": "ready"}\n')
    child.receive()
    child.stop_for_reload()
    assert child.close().state is ChildState.RELOADING
    other, reports = next(children)
    reports.sendall(b'{"report": "fatal", "message": "ModelError: none", "code": "model"}\n')
    other.receive()
    other.process.kill()
    end = other.close()
    assert (end.state, end.reason) == (ChildState.STARTING, "ModelError: none")
    assert end.error_code == "model"
