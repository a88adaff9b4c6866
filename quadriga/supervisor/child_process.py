"""A process of the server as the launcher sees it: the other end of quadriga/runtime/child.py."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quadriga import clock
from quadriga.clock import Countdown
from quadriga.runtime.child import DUMP_SIGNAL
from quadriga.runtime.parent_death import continue_at_parents_death

EXIT_GRACE = 5.0
"""Seconds between the end of a child's lifeline and the end of the child."""
DUMP_SECONDS = 0.3
"""For a process that hangs to write down where."""


@dataclass
class ChildProcess:
    """A process of the server, seen from above.

    asked_at: since when it owes the watchdog an answer, by the watchdog's clock. stuck: whom it has
    reported to be stuck, and why. replaced: why it was put down. reloads: it was ended to be
    started again. is_another: it has the place of one that died.
    """

    name: str
    process: "subprocess.Popen[bytes]"
    control: socket.socket
    ready: dict[str, Any] | None = None
    fatal: str = ""
    phases: list[str] = field(default_factory=list)
    started_at: float = field(default_factory=time.monotonic)
    asked_at: float | None = None
    stuck: tuple[str, str] | None = None
    replaced: str = ""
    reloads: bool = False
    is_another: bool = False
    _partial: bytes = b""

    def read_reports(self) -> bool:
        """Take in what it reported. False at the end of the lifeline: it has died or left."""
        try:
            data = self.control.recv(65536)
        except OSError:
            data = b""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._take_report(json.loads(line))
        return bool(data)

    def _take_report(self, report: dict[str, Any]) -> None:
        kind = report.pop("report")
        if kind == "ready":
            self.ready = report
        elif kind == "fatal":
            self.fatal = report["message"]
        elif kind == "beat":
            self.asked_at = None
        elif kind == "stuck":
            self.stuck = (report["process"], report["why"])
        elif kind == "phase":
            self.phases.append(f"{report['what']} {report['seconds']:.1f} s")

    def order(self, word: str, argument: str = "") -> None:
        """Send an order; a child that is gone cannot follow it."""
        try:
            self.control.sendall(f"{word} {' '.join(argument.split())}\n".encode())
        except OSError:
            return

    def kill_hung(self, why: str) -> None:
        """End it, after it has written to the log where each of its threads stands, if it can. One
        that was stopped by a signal has to go on for that."""
        self.replaced = why
        os.kill(self.process.pid, DUMP_SIGNAL)
        os.kill(self.process.pid, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(DUMP_SECONDS)
        self.process.kill()

    def ends_within(self, countdown: Countdown) -> bool:
        """Wait for its end, or for that of the countdown; return whether it has ended."""
        while self.process.poll() is None and (seconds := countdown.left_to_wait()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        return self.process.poll() is not None

    @property
    def left(self) -> bool:
        """Its lifeline has ended."""
        return self.control.fileno() < 0

    @property
    def refused_to_start(self) -> bool:
        """It ended by its own decision before it was ready: it would do so again."""
        return self.ready is None and not self.replaced and self.process.wait(EXIT_GRACE) >= 0

    def how_it_ended(self) -> str:
        """In words: its own last report, a signal, or an exit code."""
        try:
            code = self.process.wait(EXIT_GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if self.replaced:
            return self.replaced
        if self.fatal:
            return self.fatal
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"


def start_child(name: str, run_dir: Path, flags: list[str], python_path: list[str]) -> ChildProcess:
    """Start `python -m name` in a session of its own, so that no terminal's signals reach it."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", name, "--run-dir", str(run_dir)]
    command += ["--lifeline-fd", str(theirs.fileno()), f"--clock-offset={clock.offset()}", *flags]
    path = os.pathsep.join([*python_path, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        command,
        pass_fds=[theirs.fileno()],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=continue_at_parents_death,
    )
    theirs.close()
    return ChildProcess(name, process, ours)
