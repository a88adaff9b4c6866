"""Fault injection for tests (--fault); docs/reliability.md lists the faults.

Faults act between a process and the socket of its messages; without the flag no code here runs.
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


def _triggers(fault: Fault, number: int, message: object) -> bool:
    if fault.token is not None:
        new = message.new if isinstance(message, StepPlan) else []
        return any(fault.token == unpack_ids(slot.token_ids[:4])[0] for slot in new)
    return number == fault.after if fault.after else number % fault.every == 0


class _FaultInjector:
    """Applies the faults of one process.

    Args:
        faults: the process's faults.
        retract: retracts a request; for the scheduler only.
    """

    def __init__(self, faults: list[Fault], retract: Callable[[], None]) -> None:
        self._faults = faults
        self._retract = retract
        self._number = 0

    def passes(self, message: object) -> bool:
        """Count a message, apply the faults that it triggers; return whether it is delivered."""
        self._number += 1
        number = self._number
        return all(self._inject(f) for f in self._faults if _triggers(f, number, message))

    def _inject(self, fault: Fault) -> bool:
        """Inject a fault; return whether the message is still delivered."""
        if fault.kind in SIGNALS:
            os.kill(os.getpid(), signal.Signals[SIGNALS[fault.kind]])
        elif fault.kind == "delay":
            time.sleep(fault.ms / 1000)
        elif fault.kind == "retract":
            self._retract()
        return fault.kind != "drop"


class FaultyInbox(Generic[MessageT]):
    """An inbox whose messages trigger faults."""

    def __init__(self, inbox: "Inbox[MessageT]", faults: _FaultInjector) -> None:
        self.socket = inbox.socket
        self._inbox = inbox
        self._faults = faults

    def receive(self) -> MessageT:
        """Block for the next message that is delivered."""
        while not self._faults.passes(message := self._inbox.receive()):
            pass
        return message

    def drain(self, max_messages: int = 1 << 30) -> Iterator[MessageT]:
        """Yield the messages that have arrived and are delivered, without blocking."""
        return filter(self._faults.passes, self._inbox.drain(max_messages))


def faulty_inbox(
    inbox: "Inbox[MessageT]",
    process: str,
    text: str,
    retract: Callable[[], None] = lambda: None,
) -> "Inbox[MessageT] | FaultyInbox[MessageT]":
    """Return the inbox with the faults of --fault, or the inbox itself if this process has none."""
    faults = _faults_of(process, text)
    return FaultyInbox(inbox, _FaultInjector(faults, retract)) if faults else inbox


def faulty_callback(
    callback: Callable[[MessageT], None], process: str, text: str
) -> Callable[[MessageT], None]:
    """Return the callback with the faults of --fault, or itself if this process has none."""
    if not _faults_of(process, text):
        return callback
    faults = _FaultInjector(_faults_of(process, text), lambda: None)

    def deliver(message: MessageT) -> None:
        if faults.passes(message):
            callback(message)

    return deliver


def _faults_of(process: str, text: str) -> list[Fault]:
    return [fault for fault in parse_faults(text) if fault.process == process]
