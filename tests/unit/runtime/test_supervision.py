"""How often a process is started again, who is asked whether it is there, and --fault."""

import signal
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from quadriga.config.fault_args import parse_faults
from quadriga.errors import ConfigError
from quadriga.runtime import fault_injection as faults
from quadriga.runtime.child import BEAT, ControlChannel
from quadriga.supervisor import supervisor as children
from quadriga.supervisor.restart_policy import WINDOW, Restarts
from quadriga.supervisor.watchdog import Watchdog
from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.worker import NewSlot, StepPlan
from scheduler_proc.step_watchdog import StepWatchdog


def test_the_first_restart_comes_at_once_and_each_further_one_later_up_to_the_limit() -> None:
    restarts = Restarts(9)
    delays = [restarts.delay_after_death("worker_proc", 100.0 + n) for n in range(10)]
    assert delays == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, None]
    assert restarts.delay_after_death("detok_proc", 110.0) == 0.0
    assert restarts.delay_after_death("worker_proc", 111.0 + WINDOW) == 0.0


def test_with_no_restarts_allowed_the_first_death_is_one_too_many() -> None:
    assert Restarts(0).delay_after_death("worker_proc", 0.0) is None


@dataclass
class AskedChild:
    asked_at: float | None = None
    orders: list[str] = field(default_factory=list)

    def order(self, word: str) -> None:
        self.orders.append(word)


class SlowClientGuard:
    """A watchdog of 4 s and two children, at a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.watchdog = Watchdog(4.0, lambda: self.now)
        self.lively, self.silent = AskedChild(), AskedChild()

    def ask(self) -> list[Any]:
        """Who is found now; who is lively answers at once."""
        found = self.watchdog.ask([self.lively, self.silent])  # type: ignore[list-item]
        self.lively.asked_at = None
        return found

    def sleep(self) -> None:
        """As long as the watchdog allows."""
        seconds = self.watchdog.seconds_to_next()
        assert seconds is not None
        self.now += seconds


def test_who_does_not_answer_within_the_timeout_is_found_and_nobody_else() -> None:
    watch = SlowClientGuard()
    found: list[Any] = []
    while not found:
        found = watch.ask()
        watch.sleep()
    assert found == [watch.silent]
    assert watch.silent.orders == [BEAT]
    assert 104.0 <= watch.now <= 106.0


def test_who_was_suspended_together_with_the_watchdog_is_not_to_blame() -> None:
    watch = SlowClientGuard()
    for _ in range(20):
        assert watch.ask() == []
        watch.now += 1000.0  # everything stands still; then the launcher goes on first
        for _ in range(3):
            assert watch.ask() == []
            watch.sleep()
        watch.silent.asked_at = None


def test_a_child_that_stays_silent_after_a_suspension_is_found_within_the_timeout() -> None:
    watch = SlowClientGuard()
    watch.ask()
    watch.now += 1000.0
    went_on_at = watch.now
    while not watch.ask():
        watch.sleep()
    assert watch.now - went_on_at <= 5.0


def test_a_watchdog_without_timeout_asks_nobody() -> None:
    child = AskedChild()
    assert Watchdog(0.0).seconds_to_next() is None
    assert Watchdog(0.0).ask([child]) == []  # type: ignore[list-item]
    assert child.orders == []


class StepWatch:
    """A step's deadline of 16 s, at a clock that is set by hand: the pipeline's, the lifeline's and
    the scheduler's part."""

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
    monkeypatch.setattr(ControlChannel, "_leave", lambda self: None)
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    control = ControlChannel(theirs, tmp_path)
    ours.sendall(b"beat\n")
    assert b"beat" in ours.recv(100)
    control.attend()
    ours.sendall(b"beat\ndrain\n")
    ours.settimeout(0.05)
    with pytest.raises(TimeoutError):
        ours.recv(100)
    orders: list[tuple[str, str]] = []
    while not orders:
        orders = control.read_commands()
    assert orders == [("drain", "")]
    ours.settimeout(5)
    assert b"beat" in ours.recv(100)
    ours.close()
    for thread in threading.enumerate():
        if thread.name == "lifeline":
            thread.join(5)


@pytest.mark.parametrize(
    "text", ["kill", "kill:gpu", "melt:worker", "kill:worker:when=3", "kill:worker:after=x"]
)
def test_a_fault_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="fault"):
        parse_faults(text)


class Listed:
    """An inbox that has everything already."""

    socket = None

    def __init__(self, messages: list[Any]) -> None:
        self._messages = messages

    def drain(self, most: int = 1 << 30) -> Any:
        return iter(self._messages)


def test_a_fault_strikes_the_process_and_the_message_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(faults.os, "kill", lambda _pid, number: sent.append(number))
    inbox: Any = Listed(["a", "b", "c"])
    assert faults.faulty_inbox(inbox, "detok", "kill:worker") is inbox
    dropped = faults.faulty_inbox(inbox, "detok", "drop:detok:after=2")
    assert list(dropped.drain()) == ["a", "c"]
    stopped = faults.faulty_inbox(inbox, "worker", "stop:worker:after=3steps,delay:worker:ms=0")
    assert list(stopped.drain()) == ["a", "b", "c"]
    assert sent == [signal.SIGSTOP]


def test_a_retraction_is_asked_for_at_each_nth_message_and_all_of_them_get_through() -> None:
    inbox: Any = Listed([1, 2, 3, 4, 5])
    asked: list[str] = []
    fault = "retract:scheduler:every=2"
    retracting = faults.faulty_inbox(inbox, "scheduler", fault, lambda: asked.append("one"))
    assert list(retracting.drain()) == [1, 2, 3, 4, 5]
    assert len(asked) == 2


def test_a_poison_strikes_each_plan_that_brings_a_request_which_begins_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(faults.os, "kill", lambda _pid, number: sent.append(number))
    plans = [
        StepPlan(n, 0, b"", b"", [NewSlot(0, pack_ids(ids), 0, b"", 0.0, -1, 1.0, 0)], b"")
        for n, ids in enumerate([[5, 6], [99, 5], [7, 99], [99]])
    ]
    inbox: Any = Listed(plans)
    list(faults.faulty_inbox(inbox, "worker", "segv:worker:token=99").drain())
    assert sent == [signal.SIGSEGV] * 2


def test_a_run_whose_directory_cannot_be_made_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(**_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(children.tempfile, "mkdtemp", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*make room, or set TMPDIR"):
        children._make_run_dir()


def test_a_process_that_the_system_cannot_start_now_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ring = object.__new__(children.Supervisor)
    ring._due = {"detok_proc": 5.0}
    starts: list[str] = []

    def start(name: str) -> None:
        starts.append(name)
        if len(starts) == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(ring, "start", start)
    assert ring._start_due("detok_proc", 5.0) is None
    assert ring._due == {"detok_proc": 5.0 + children.START_RETRY_S}
    assert "detok_proc cannot be started now ([Errno 11]" in capsys.readouterr().err
    assert ring._start_due("detok_proc", 6.0) is children.SupervisorEvent.STARTED
    assert (ring._due, len(starts)) == ({}, 2)
