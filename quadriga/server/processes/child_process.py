"""A process of the server, seen from the launcher; control_channel.py is the other end.

STARTING --ready--> READY --stop_for_reload--> RELOADING
    |                 |                            |
    +---kill_hung-----+--------> HUNG              |
    +-----abandon-----+           |                |
    |                 |           |                |
    +-----------------+-----------+----------------+---close--> EXITED
"""

import contextlib
import enum
import json
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from quadriga import clock, errors
from quadriga.clock import Countdown
from quadriga.server.processes import child, control_channel
from quadriga.server.processes.process_name import ProcessName
from quadriga.server.processes.spare import SpareWorker

# Seconds between the end of a child's control channel and the end of the child.
EXIT_GRACE_S = 5.0
# Seconds that a process has to log its stacks and to die, before it is killed without them.
STACK_DUMP_TIMEOUT_S = 3.0


class ChildState(enum.Enum):
    """State of a process; the module's docstring has the transitions."""

    STARTING = enum.auto()
    READY = enum.auto()
    HUNG = enum.auto()
    RELOADING = enum.auto()
    EXITED = enum.auto()


class StuckReport(NamedTuple):
    """A process reports that another one is stuck."""

    process: str
    reason: str


class ReplicaChange(NamedTuple):
    """The frontend or the driver of a cluster reports that a replica has changed.

    Attributes:
        replica: its number.
        state: `recalled` (it has no requests any more), or of a cluster `joined`, `died` and
            `restarted` (one of its processes), `lost`, `leaving` (its requests have to move),
            `left`; of a scheduler `paused`. Of no replica: `load`.
        argument: what belongs to it: addresses, the name of the process, the reason, the number of
            open requests, or of a paused scheduler that of the tokens since its worker was ready.
        model: as in ProcessName, of the process that reports it.
    """

    replica: int
    state: str
    argument: str = ""
    model: str = ""


class ModelWish(NamedTuple):
    """The gateway reports what a client wants of a model.

    Attributes:
        name: the model.
        loaded: it is to be loaded, or to be unloaded; None: neither.
        idle_s: seconds without a request after which it is to be unloaded; below 0: never; None:
            that stays.
    """

    name: str
    loaded: bool | None = None
    idle_s: float | None = None


class Exit(NamedTuple):
    """How a process ended.

    Attributes:
        state: the state in which it ended.
        code: exit code, or a negative signal number.
        reason: its own last report, the watchdog's reason, a signal, or an exit code, in words.
        error_code: `code` of the QuadrigaError that ended it.
    """

    state: ChildState
    code: int
    reason: str
    error_code: str = errors.ServerFailed.code


@dataclass
class ChildProcess:
    """A process of the server and its control channel.

    Attributes:
        is_restart: it takes the place of one that died.
        info: what it reported when it was ready.
        phases: the phases of its start, with their durations.
        phase: the phase of its start that is under way, since `phase_began_at`; "": none.
        is_abandoned: it ends for good, and its exit is no event.
        pinged_at: watchdog time of the ping that it has not answered; None: it owes no answer.
    """

    name: str
    process: "subprocess.Popen[bytes]"
    control: socket.socket
    is_restart: bool = False
    state: ChildState = ChildState.STARTING
    info: dict[str, Any] = field(default_factory=dict)
    phases: list[str] = field(default_factory=list)
    phase: str = ""
    phase_began_at: float = 0.0
    started_at: float = field(default_factory=time.monotonic)
    pinged_at: float | None = None
    is_abandoned: bool = False
    _error: str = ""
    _error_code: str = errors.ServerFailed.code
    _partial_line: bytes = b""

    @property
    def is_running(self) -> bool:
        """Whether it starts or serves; False once it was killed or has exited."""
        return self.state in (ChildState.STARTING, ChildState.READY)

    @property
    def is_ready(self) -> bool:
        """Whether it serves."""
        return self.state is ChildState.READY

    @property
    def has_exited(self) -> bool:
        """Whether its exit has been handled."""
        return self.state is ChildState.EXITED

    def receive(self) -> list[StuckReport | ReplicaChange | ModelWish] | None:
        """Process its reports; return those that are not about itself.

        Returns:
            None at the end of the control channel: the process has exited.
        """
        try:
            data = self.control.recv(65536)
        except OSError:
            data = b""
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        reports = [self._on_report(json.loads(line)) for line in lines]
        return [report for report in reports if report is not None] if data else None

    def _on_report(self, report: dict[str, Any]) -> StuckReport | ReplicaChange | ModelWish | None:
        """Take in a report about this process; return one that is about others."""
        match report.pop("report"):
            case "ready":
                self.info = report
                if self.state is ChildState.STARTING:
                    self.state = ChildState.READY
            case "fatal":
                if self.state is not ChildState.HUNG:
                    self._error = report["message"]
                    self._error_code = report.get("code", errors.ServerFailed.code)
            case "beat":
                self.pinged_at = None
            case "begin":
                self.phase, self.phase_began_at = report["what"], time.monotonic()
            case "phase":
                self.phase = ""
                self.phases.append(f"{report['what']} {report['seconds']:.1f} s")
            case kind:
                return self._report_of_others(kind, report)
        return None

    def _report_of_others(
        self, kind: str, report: dict[str, Any]
    ) -> StuckReport | ReplicaChange | ModelWish:
        if kind == "stuck":
            return StuckReport(report["process"], report["why"])
        if kind == "model":
            return ModelWish(**report)
        return ReplicaChange(**report, model=ProcessName.parse(self.name).model)

    def send(self, command: control_channel.Command, argument: str = "") -> None:
        """Send a command; nothing happens if the process has exited."""
        with contextlib.suppress(OSError):
            self.control.sendall(f"{command.value} {' '.join(argument.split())}\n".encode())

    def kill_hung(self, reason: str) -> None:
        """Make it log the stacks of its threads and die, or kill it where it cannot do so in time.

        A process that was stopped by a signal is continued for that.
        """
        self.state, self._error = ChildState.HUNG, f"hung: {reason}"
        os.kill(self.process.pid, child.KILL_SIGNAL)
        os.kill(self.process.pid, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STACK_DUMP_TIMEOUT_S)
        self.process.kill()

    def stop_for_reload(self) -> None:
        """Kill it, to be restarted at once; nothing happens unless it runs."""
        if self.is_running:
            self.state = ChildState.RELOADING
            self.process.kill()

    def leave_alone(self) -> None:
        """Let it end by itself, and for good: its exit is no event any more."""
        self.is_abandoned = True

    def abandon(self) -> None:
        """Kill it for good."""
        self.is_abandoned = True
        if not self.has_exited:
            self.state = ChildState.HUNG
            self.process.kill()

    def close(self) -> Exit:
        """Close the control channel at its end, wait for the exit, and return how it ended."""
        self.control.close()
        state, self.state = self.state, ChildState.EXITED
        try:
            code = self.process.wait(EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        killed = f"killed by {signal.Signals(-code).name}" if code < 0 else ""
        reason = self._error or killed or f"exited with code {code}"
        return Exit(state, code, reason, self._error_code)

    def exits_within(self, countdown: Countdown) -> bool:
        """Wait until it exits or the countdown ends; return whether it has exited."""
        while self.process.poll() is None and (seconds := countdown.left_to_wait()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        return self.process.poll() is not None


class ProcessStart(NamedTuple):
    """How a process is started.

    Attributes:
        program: the command that runs it, before its flags.
        run_dir: directory of the server's run.
        model_dir: directory of its model's sockets.
        flags: those of its model.
        spare: takes the place of the program, unless it has died.
    """

    program: list[str]
    run_dir: Path
    model_dir: Path
    flags: list[str]
    spare: SpareWorker | None = None


def start_child(name: str, start: ProcessStart, is_restart: bool) -> ChildProcess:
    """Start a program in a session of its own, so that no terminal's signals reach it.

    Args:
        name: name of the process, by which logs call it.
        start: what is run, and where.
        is_restart: it takes the place of one that died.
    """
    ours, theirs = socket.socketpair()
    place = child.place_flags(ProcessName.parse(name), start.run_dir, start.model_dir)
    command = [*start.program, *place]
    command += [f"--clock-offset={clock.offset()}"]
    command += [*(["--is-restart"] if is_restart else []), *start.flags]
    spare = start.spare and start.spare.take(command, theirs)
    process = spare or subprocess.Popen(
        [*command, "--control-fd", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=control_channel.continue_at_parents_death,
    )
    theirs.close()
    return ChildProcess(name, process, ours, is_restart)
