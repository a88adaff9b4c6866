"""--fault: things that go wrong on purpose, for tests. docs/reliability.md has the list.

A fault sits between a process and the socket on which its work comes. Without the flag nothing of
this module is in the way.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from quadriga.config.fault_args import SIGNALS, Fault, parse_faults
from quadriga.wire.messages.arrays import unpack_ids
from quadriga.wire.messages.worker import StepPlan
from quadriga.wire.sockets import Inbox

MessageT = TypeVar("MessageT")


def _strikes(fault: Fault, number: int, message: object) -> bool:
    if fault.token is not None:
        new = message.new if isinstance(message, StepPlan) else []
        return any(fault.token == unpack_ids(one.token_ids[:4])[0] for one in new)
    return number == fault.after if fault.after else number % fault.every == 0


class _Faults:
    """What is to go wrong in one process. retract: does what only the scheduler can."""

    def __init__(self, faults: list[Fault], retract: Callable[[], None]) -> None:
        self._faults = faults
        self._retract = retract
        self._number = 0

    def let_through(self, message: object) -> bool:
        self._number += 1
        number = self._number
        return all(self._strike(f) for f in self._faults if _strikes(f, number, message))

    def _strike(self, fault: Fault) -> bool:
        """Whether the message gets through all the same."""
        if fault.kind in SIGNALS:
            os.kill(os.getpid(), signal.Signals[SIGNALS[fault.kind]])
        elif fault.kind == "delay":
            time.sleep(fault.ms / 1000)
        elif fault.kind == "retract":
            self._retract()
        return fault.kind != "drop"


def _nothing() -> None:
    """Nobody asks another process than the scheduler to retract."""


class FaultyInbox(Generic[MessageT]):
    """An inbox whose messages meet faults on their way."""

    def __init__(self, inbox: "Inbox[MessageT]", faults: _Faults) -> None:
        self.socket = inbox.socket
        self._inbox = inbox
        self._faults = faults

    def receive(self) -> MessageT:
        while not self._faults.let_through(message := self._inbox.receive()):
            pass
        return message

    def drain(self, most: int = 1 << 30) -> Iterator[MessageT]:
        return filter(self._faults.let_through, self._inbox.drain(most))


def faulty_inbox(
    inbox: "Inbox[MessageT]", process: str, text: str, retract: Callable[[], None] = _nothing
) -> "Inbox[MessageT] | FaultyInbox[MessageT]":
    """The inbox itself, where --fault says nothing of this process."""
    faults = _of(process, text)
    return FaultyInbox(inbox, _Faults(faults, retract)) if faults else inbox


def faulty_callback(
    callback: Callable[[MessageT], None], process: str, text: str
) -> Callable[[MessageT], None]:
    """The same for a process that is called with each message."""
    if not _of(process, text):
        return callback
    faults = _Faults(_of(process, text), _nothing)

    def deliver(message: MessageT) -> None:
        if faults.let_through(message):
            callback(message)

    return deliver


def _of(process: str, text: str) -> list[Fault]:
    return [fault for fault in parse_faults(text) if fault.process == process]
