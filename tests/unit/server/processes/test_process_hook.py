"""The hook of a process, and the faults that tests inject with it."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from quadriga.errors import ConfigError
from quadriga.server.processes import child
from quadriga.wire.packing import pack_ids
from quadriga.wire.sockets import Inbox
from quadriga.wire.worker import NewSlot, StepPlan
from scheduler_proc.scheduler import Scheduler
from tests.faults import inject
from tokenizer_proc.replicas.replicas import Replicas

MESSAGES = ["a", "b", "c"]

called_with: list[str] = []


def test_the_hook_is_called_with_the_name_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(child.HOOK_VARIABLE, f"{__name__}:called_with.append")
    child._call_hook("detok_proc")
    assert called_with == ["detok_proc"]


@pytest.mark.parametrize("hook", ["no_such_module:f", "os:no_such_function", "os.path join", ":"])
def test_a_hook_that_cannot_be_imported_is_refused_in_one_line(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(child.HOOK_VARIABLE, hook)
    with pytest.raises(ConfigError, match=r"QUADRIGA_PROCESS_HOOK is .*MODULE:FUNCTION") as raised:
        child._call_hook("detok_proc")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "kill",
        "kill:gpu",
        "melt:worker",
        "kill:worker:when=3",
        "kill:worker:after=x",
        "retract:worker",
        "delay:detok:every=0",
    ],
)
def test_a_fault_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="fault"):
        inject.parse_faults(text)


Install = Callable[[str, str], "Inbox[Any]"]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs faults in this process and returns an inbox of MESSAGES.

    The patches are undone after the test.
    """
    messages = iter(MESSAGES)
    monkeypatch.setattr(Inbox, "receive", lambda _: next(messages))
    monkeypatch.setattr(Inbox, "drain", lambda _, max_messages=3: iter(MESSAGES[:max_messages]))
    monkeypatch.setattr(Scheduler, "step", Scheduler.step)
    monkeypatch.setattr(Replicas, "on_delivery", Replicas.on_delivery)

    def install_faults(faults: str, process: str) -> "Inbox[Any]":
        monkeypatch.setenv(inject.FAULTS_VARIABLE, faults)
        inject.install(process)
        return object.__new__(Inbox)

    return install_faults


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of the signals that the faults send."""
    sent: list[int] = []
    monkeypatch.setattr("os.kill", lambda _pid, number: sent.append(number))
    return sent


def test_a_process_without_faults_is_not_patched(install: Install) -> None:
    drain, receive = Inbox.drain, Inbox.receive
    install("kill:worker,drop:tokenizer", "detok_proc")
    install("kill:worker", "worker_proc rank 1")
    assert (Inbox.drain, Inbox.receive) == (drain, receive)


def test_a_dropped_message_is_not_drained(install: Install) -> None:
    inbox = install("drop:detok:after=2", "detok_proc")
    assert list(inbox.drain()) == ["a", "c"]


def test_a_dropped_message_is_not_received(install: Install) -> None:
    inbox = install("drop:worker:after=2", "worker_proc")
    assert [inbox.receive(), inbox.receive()] == ["a", "c"]


def test_a_signal_is_sent_at_the_message_that_the_fault_names(
    install: Install, signals: list[int]
) -> None:
    inbox = install("stop:worker:after=3steps,delay:worker:ms=0", "worker_proc")
    assert list(inbox.drain(2)) == ["a", "b"]
    assert signals == []
    assert list(inbox.drain(1)) == ["a"]
    assert signals == [signal.SIGSTOP]


def test_a_poison_request_triggers_the_fault_in_each_plan_that_starts_it(
    signals: list[int],
) -> None:
    plans = [
        StepPlan(n, 0, b"", b"", [NewSlot(0, pack_ids(ids), 0, b"", 0.0, -1, 1.0, 0)], b"")
        for n, ids in enumerate([[5, 6], [99, 5], [7, 99], [99]])
    ]
    injector = inject.FaultInjector(inject.parse_faults("segv:worker:token=99"))
    assert all(injector.passes(plan) for plan in plans)
    assert signals == [signal.SIGSEGV] * 2


def test_every_nth_result_retracts_a_request_and_is_still_processed(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    processed: list[str] = []
    retracted: list[int] = []
    monkeypatch.setattr(Scheduler, "step", lambda _, _messages, results: processed.extend(results))
    monkeypatch.setattr(inject, "retract_one", lambda _, number: retracted.append(number))
    install("retract:scheduler:every=2", "scheduler_proc")
    Scheduler.step(object.__new__(Scheduler), [], ["a", "b", "c", "d", "e"])  # type: ignore[list-item]
    assert processed == ["a", "b", "c", "d", "e"]
    assert retracted == [0, 1]


def test_a_delivery_to_the_frontend_may_be_dropped(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivered: list[list[bytes]] = []
    monkeypatch.setattr(
        Replicas, "on_delivery", lambda _, _number, frames: delivered.append(frames)
    )
    install("drop:tokenizer:after=1", "tokenizer_proc")
    replicas = object.__new__(Replicas)
    replicas.on_delivery(0, [b"first"])
    replicas.on_delivery(0, [b"second"])
    assert delivered == [[b"second"]]
