"""The supervisor with processes that only report: restarts, hangs, reloads, clean exits."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quadriga.clock import Countdown
from quadriga.server.config.server_config import LaunchArgs
from quadriga.server.processes.child_process import ChildState
from quadriga.server.processes.control_channel import Command
from quadriga.server.processes.supervisor import (
    Death,
    FirstReady,
    ReadyAgain,
    Supervisor,
    SupervisorEvent,
)

# Reports that it is ready, then exits at a drain; a silent one answers no heartbeat.
FAKE_PROCESS = """
import json, socket, sys
control = socket.socket(fileno=int(sys.argv[sys.argv.index("--control-fd") + 1]))
control.sendall(json.dumps({"report": "ready", "restart": "--is-restart" in sys.argv}).encode())
control.sendall(b"\\n")
for line in control.makefile():
    if line.startswith("drain"):
        break
    if line.startswith("beat") and "silent" not in __file__:
        control.sendall(b'{"report": "beat"}\\n')
"""
TIMEOUT_S = 20.0
# Longer than a process that answers may wait for a core on a busy machine.
WATCHDOG_S = 2.0


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    for name in ("first", "second", "silent"):
        (tmp_path / f"{name}.py").write_text(FAKE_PROCESS)
    handlers = {number: signal.getsignal(number) for number in (1, 2, 15)}
    args = LaunchArgs(max_restarts=1, watchdog_timeout=WATCHDOG_S)
    supervisor = Supervisor(
        [], lambda name: [sys.executable, str(tmp_path / f"{name}.py")], args, ["second"]
    )
    yield supervisor
    supervisor.clean_up()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def wait_until_ready(supervisor: Supervisor) -> None:
    countdown = Countdown(TIMEOUT_S)
    while supervisor.not_ready:
        event = supervisor.next_event(countdown)
        assert event in (None, SupervisorEvent.RESTARTED) or isinstance(
            event, FirstReady | ReadyAgain
        ), event


def next_death(supervisor: Supervisor) -> Death:
    countdown = Countdown(TIMEOUT_S)
    while True:
        event = supervisor.next_event(countdown)
        if isinstance(event, Death):
            return event
        assert event is None or isinstance(event, FirstReady | ReadyAgain), event


def test_a_process_that_was_killed_is_restarted_until_it_dies_too_often(
    supervisor: Supervisor,
) -> None:
    supervisor.start("first")
    supervisor.start("second")
    wait_until_ready(supervisor)
    assert supervisor["first"].info["restart"] is False
    supervisor["first"].process.kill()
    assert next_death(supervisor) == Death("first", "killed by SIGKILL", 0.0, False)
    assert supervisor["first"].has_exited and supervisor.not_ready == ["first"]
    supervisor.start_later("first", 0.0)
    wait_until_ready(supervisor)
    assert supervisor["first"].info["restart"] is True
    supervisor["first"].process.kill()
    death = next_death(supervisor)
    assert death.restart_delay_s is None
    assert death.reason == "killed by SIGKILL, more than 1 times within five minutes"
    supervisor["second"].process.kill()
    assert next_death(supervisor).restart_delay_s is None, "it must not be restarted"


def test_a_process_that_answers_no_heartbeat_is_killed(supervisor: Supervisor) -> None:
    supervisor.start("silent")
    death = next_death(supervisor)
    assert death == Death("silent", "hung: it does not answer", 0.0, False)


def test_a_reload_restarts_at_once_and_a_drain_is_a_clean_exit(supervisor: Supervisor) -> None:
    supervisor.start("first")
    wait_until_ready(supervisor)
    assert supervisor.next_event(None) == FirstReady("first")
    os.kill(os.getpid(), signal.SIGHUP)
    assert supervisor.next_event(None) in (SupervisorEvent.RELOAD, SupervisorEvent.STOP)
    supervisor["first"].stop_for_reload()
    assert supervisor["first"].state is ChildState.RELOADING
    death = next_death(supervisor)
    assert (death.restart_delay_s, death.is_reload) == (0.0, True)
    assert death.reason == "replaced for the reload"
    supervisor.start_later("first", 0.0)
    wait_until_ready(supervisor)
    supervisor["first"].send(Command.DRAIN)
    assert next_death(supervisor).is_clean
    assert supervisor.all_exited


def test_a_process_that_exits_by_itself_before_it_is_ready_is_not_restarted(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    (tmp_path / "refusing.py").write_text("import sys; sys.exit(3)")
    supervisor.start("refusing")
    assert next_death(supervisor) == Death("refusing", "exited with code 3", None, False)
