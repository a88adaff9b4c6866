"""Inject faults into the processes of a server; docs/engineering/faults.md lists the faults.

The variables of `fault_environment` make every process call `install` before it opens its sockets.
The processes import this file by itself, without the package `tests`, whose import loads torch.
"""

import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quadriga.errors import ConfigError
from quadriga.server.processes.child import HOOK_VARIABLE
from quadriga.wire.packing import unpack_ids
from quadriga.wire.sockets import NO_LIMIT, Inbox
from quadriga.wire.worker import StepPlan

if TYPE_CHECKING:
    from scheduler_proc.scheduler import Scheduler
    from tokenizer_proc.replicas.replicas import Replicas

MessageT = TypeVar("MessageT")

FAULTS_VARIABLE = "QUADRIGA_TEST_FAULTS"
PROCESSES = ("worker", "scheduler", "detok", "tokenizer")
SIGNALS = {"kill": "SIGKILL", "segv": "SIGSEGV", "stop": "SIGSTOP"}
APART = "apart"
# Of a server that computes every prompt apart, and loads each of its pages as soon as it is there.
APART_PROCESSES = ("tokenizer", "scheduler")
ALL_APART = ",".join(f"{APART}:{process}" for process in APART_PROCESSES)
CHANGE_ROLES_S = 0.05
KINDS = (*SIGNALS, "delay", "drop", "retract", APART)
OPTIONS = ("after", "every", "token", "ms")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to inject, at every message unless an option says otherwise.

    Attributes:
        kind: one of KINDS.
        process: the process that receives the messages, one of PROCESSES.
        after: number of the only message that triggers it, counted from 1 at the process's start.
        every: trigger at each message whose number is a multiple of this one.
        token: trigger at each plan with a new request whose first token this is.
        ms: duration of a delay.
    """

    kind: str
    process: str
    after: int = 0
    every: int = 1
    token: int | None = None
    ms: float = 10.0

    def is_triggered(self, number: int, message: object) -> bool:
        """Return whether message `number` of the process triggers this fault."""
        if self.token is not None:
            new = message.new if isinstance(message, StepPlan) else []
            return any(self.token == unpack_ids(slot.token_ids[:4])[0] for slot in new)
        return number == self.after if self.after else number % self.every == 0


def fault_environment(faults: str) -> dict[str, str]:
    """Return the environment variables of a server with these faults (see `parse_faults`)."""
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        HOOK_VARIABLE: "inject:install",
        FAULTS_VARIABLE: faults,
        "PYTHONPATH": os.pathsep.join(path),
    }


def parse_faults(text: str) -> list[Fault]:
    """Parse comma-separated faults, each KIND:PROCESS[:OPTION=N…]. Raise ConfigError."""
    return [_parse(part) for part in text.split(",") if part]


def _parse(text: str) -> Fault:
    kind, _, rest = text.partition(":")
    process, *options = rest.split(":")
    if kind not in KINDS or process not in PROCESSES:
        raise ConfigError(
            f"fault is {text!r}: it must be KIND:PROCESS, with a kind of {', '.join(KINDS)} and a"
            f" process of {', '.join(PROCESSES)}"
        )
    if kind == "retract" and process != "scheduler":
        raise ConfigError(f"fault is {text!r}: requests are retracted by the scheduler only")
    if kind == APART and process not in APART_PROCESSES:
        raise ConfigError(
            f"fault is {text!r}: {' and '.join(APART_PROCESSES)} have a part in computing apart"
        )
    values: dict[str, Any] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in OPTIONS or not value.removesuffix("steps").isdigit():
            raise ConfigError(f"fault has {option!r}: {'=N, '.join(OPTIONS)}=N are known")
        values[key] = int(value.removesuffix("steps"))
    if not values.get("every", 1):
        raise ConfigError(f"fault is {text!r}: every must be at least 1")
    return Fault(kind, process, **values)


class FaultInjector:
    """Applies the faults of one process."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults
        self._number = 0

    def passes(self, message: object, retract: Callable[[], None] = lambda: None) -> bool:
        """Count a message, apply the faults that it triggers; return whether it is delivered.

        Args:
            message: a message that the process has received.
            retract: retracts a request.
        """
        self._number += 1
        triggered = [f for f in self._faults if f.is_triggered(self._number, message)]
        return all(_inject(fault, retract) for fault in triggered)


def _inject(fault: Fault, retract: Callable[[], None]) -> bool:
    """Inject a fault; return whether the message is still delivered."""
    if fault.kind in SIGNALS:
        os.kill(os.getpid(), signal.Signals[SIGNALS[fault.kind]])
    elif fault.kind == "delay":
        time.sleep(fault.ms / 1000)
    elif fault.kind == "retract":
        retract()
    return fault.kind != "drop"


# --- the classes of the processes -----------------------------------------------------------------


def install(process: str) -> None:
    """Patch the classes of this process so that its messages trigger its faults, if it has any.

    Args:
        process: name of the process, for example worker_proc, or worker_proc/1 of a replica.
    """
    process = re.split("[/@]", process)[0]
    faults = parse_faults(os.environ[FAULTS_VARIABLE])
    own = [fault for fault in faults if f"{fault.process}_proc" == process]
    if not own:
        return
    injector = FaultInjector(own)
    if any(fault.kind == APART for fault in own):
        if process == "tokenizer_proc":
            _compute_prompts_apart()
            _change_roles()
        else:
            _report_every_page()
    if process == "scheduler_proc":
        _patch_scheduler(injector)
    elif process == "tokenizer_proc":
        _patch_frontend(injector)
    else:
        _patch_inbox(injector)


def _patch_inbox(injector: FaultInjector) -> None:
    """Inject faults into the only inbox of the worker or the detokenizer."""
    receive, drain = Inbox.receive, Inbox.drain

    def faulty_receive(self: "Inbox[MessageT]") -> MessageT:
        while not injector.passes(message := receive(self)):
            pass
        return message

    def faulty_drain(self: "Inbox[MessageT]", max_messages: int = NO_LIMIT) -> Iterator[MessageT]:
        return filter(injector.passes, drain(self, max_messages))

    Inbox.receive = faulty_receive  # type: ignore[method-assign]
    Inbox.drain = faulty_drain  # type: ignore[method-assign]


def _patch_scheduler(injector: FaultInjector) -> None:
    """Inject faults into the worker's results."""
    from scheduler_proc.scheduler import Scheduler

    step, numbers = Scheduler.step, itertools.count()

    def faulty_step(
        self: Scheduler, messages: Iterable[Any], results: Iterable[Any]
    ) -> float | None:
        def retract() -> None:
            retract_one(self, next(numbers))

        return step(self, messages, (r for r in results if injector.passes(r, retract)))

    Scheduler.step = faulty_step  # type: ignore[method-assign]


def _patch_frontend(injector: FaultInjector) -> None:
    """Inject faults into the messages of the detokenizer."""
    from tokenizer_proc.replicas.replicas import Replicas

    on_delivery = Replicas.on_delivery

    def faulty_on_delivery(self: "Replicas", number: int, frames: list[bytes]) -> None:
        if injector.passes(frames):
            on_delivery(self, number, frames)

    Replicas.on_delivery = faulty_on_delivery  # type: ignore[method-assign]


def _compute_prompts_apart() -> None:
    """Let every prompt be computed at a replica that does so for others, however short it is."""
    from tokenizer_proc.replicas.roles import RoleRouter

    RoleRouter.stays_here = lambda *_: False  # type: ignore[method-assign]


def _report_every_page() -> None:
    """Let the other replicas load each page of a prompt ahead, however short the prompt is."""
    from scheduler_proc.observe import replica_report

    replica_report.AHEAD_TOKENS, replica_report.AHEAD_PARTS = 1, sys.maxsize


def _change_roles() -> None:
    """Let one and two replicas compute prompts in turn, where roles follow the load."""
    from tokenizer_proc.replicas import role_policy

    looks = itertools.count()
    role_policy.INTERVAL_S = CHANGE_ROLES_S
    role_policy.FollowPrompts.decide = lambda *_: 1 + next(looks) % 2  # type: ignore[method-assign]


def retract_one(scheduler: "Scheduler", number: int) -> None:
    """Retract running request `number`, modulo their count, although there is no need to.

    A quarantined request is left alone.
    """
    from scheduler_proc.state.batch import Plan
    from scheduler_proc.state.request import RetractReason

    core = scheduler.lifecycle.core
    running, plan = list(core.running), Plan(in_flight=False)
    if running and core.quarantine.current is None:
        core.retraction.retract(running[number % len(running)], RetractReason.PAGES, plan)
    scheduler.lifecycle.fail_all(plan.failed)
