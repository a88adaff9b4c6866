"""A process of the server as the launcher sees it: the other end of quadriga/process.py."""

import json
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from typing import Any

EXIT_GRACE = 5.0
"""Seconds between the end of a child's lifeline and the end of the child."""


@dataclass
class ChildProcess:
    """A process of the server, seen from above."""

    name: str
    process: "subprocess.Popen[bytes]"
    lifeline: socket.socket
    ready: dict[str, Any] | None = None
    fatal: str = ""
    phases: list[str] = field(default_factory=list)
    _partial: bytes = b""

    def read_reports(self) -> bool:
        """Take in what it reported. False at the end of the lifeline: it has died or left."""
        try:
            data = self.lifeline.recv(65536)
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
        elif kind == "phase":
            self.phases.append(f"{report['what']} {report['seconds']:.1f} s")

    def order(self, word: str, argument: str = "") -> None:
        """Send an order; a child that is gone cannot follow it."""
        try:
            self.lifeline.sendall(f"{word} {' '.join(argument.split())}\n".encode())
        except OSError:
            return

    def how_it_ended(self) -> str:
        """In words: its own last report, a signal, or an exit code."""
        try:
            code = self.process.wait(EXIT_GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if self.fatal:
            return self.fatal
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"
