"""The supervisor: starts the processes of a server, watches them and restarts those that die.

In order: the events that `Supervisor.next_event` returns, the signals that the launcher receives,
the decision when a process may be restarted and which hang, and the supervisor.
"""

import enum
import os
import selectors
import signal
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quadriga import errors
from quadriga.clock import Countdown, RunningTime
from quadriga.errors import ServerFailed
from quadriga.server.config.server_config import LaunchArgs
from quadriga.server.processes.child_process import (
    ChildProcess,
    ChildState,
    Exit,
    ModelWish,
    ProcessStart,
    ReplicaChange,
    start_child,
)
from quadriga.server.processes.control_channel import EXIT_OK, Command
from quadriga.server.processes.logs import say
from quadriga.server.processes.process_name import ProcessName
from quadriga.server.processes.run_dir import make_run_dir, remove_run_dir


class SupervisorEvent(enum.Enum):
    """An event other than a `Death`.

    Attributes:
        RESTARTED: a process that had died runs again, but is not ready yet.
        STOP, RELOAD: the launcher received a signal.
        COMMAND: the descriptor of `watch` is readable.
        TIMEOUT: the timeout of `next_event` is over.
    """

    RESTARTED = enum.auto()
    STOP = enum.auto()
    RELOAD = enum.auto()
    COMMAND = enum.auto()
    TIMEOUT = enum.auto()


@dataclass(frozen=True, slots=True)
class Death:
    """A process exited.

    Attributes:
        name: the process.
        reason: how it ended, in words.
        restart_delay_s: seconds until it may be restarted; None: it must not be.
        is_clean: it had finished its work.
        error_code: `code` of the QuadrigaError that ended it.
        is_reload: it was stopped to be replaced, as a reload does.
    """

    name: str
    reason: str
    restart_delay_s: float | None
    is_clean: bool
    error_code: str = ServerFailed.code
    is_reload: bool = False

    @property
    def start_error(self) -> str:
        """Why the process could not start; a message for the user comes first."""
        prefix = f"{type(errors.from_code(self.error_code, '')).__name__}: "
        if self.reason.startswith(prefix):
            return f"{self.reason.removeprefix(prefix)} ({self.name} could not start)"
        return f"{self.name} could not start: {self.reason}"


class FirstReady(NamedTuple):
    """A process that was started for the first time serves."""

    name: str


class ReadyAgain(NamedTuple):
    """A process that had died serves again."""

    name: str


class ReceivedSignals:
    """SIGINT, SIGTERM and SIGHUP, which wait to be read instead of ending this process."""

    def __init__(self) -> None:
        self._numbers, self._wakeup = socket.socketpair()
        self._numbers.setblocking(False)
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self._had_terminal = _has_terminal()

    def fileno(self) -> int:
        """Return a descriptor that is readable when a signal waits."""
        return self._numbers.fileno()

    def read(self) -> SupervisorEvent:
        """Return what the signals that wait ask for: RELOAD, or else STOP.

        SIGHUP asks for RELOAD, but a terminal that is closed sends it, too.
        """
        numbers = set(self._numbers.recv(4096))
        lost_terminal = self._had_terminal and not _has_terminal()
        is_reload = numbers == {signal.SIGHUP} and not lost_terminal
        return SupervisorEvent.RELOAD if is_reload else SupervisorEvent.STOP

    def close(self) -> None:
        """Collect no further signals: they have no effect."""
        signal.set_wakeup_fd(-1)


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


DEATH_WINDOW_S = 300.0
MIN_DELAY_S, MAX_DELAY_S = 0.1, 5.0
PINGS_PER_TIMEOUT = 4


class RestartPolicy:
    """Exponential backoff per process, up to `max_restarts` within DEATH_WINDOW_S."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self._died_at: defaultdict[str, deque[float]] = defaultdict(deque)

    def delay_after_death(self, name: str, now: float) -> float | None:
        """Record a death and return the restart delay in seconds; None: do not restart.

        The first death is followed by a restart at once, each further one by twice the delay.

        Args:
            name: the process that died.
            now: seconds of a clock that never goes back.
        """
        died_at = self._died_at[name]
        died_at.append(now)
        while died_at[0] < now - DEATH_WINDOW_S:
            died_at.popleft()
        if len(died_at) > self.max_restarts:
            return None
        if len(died_at) == 1:
            return 0.0
        return min(MAX_DELAY_S, MIN_DELAY_S * 2.0 ** (len(died_at) - 2))


class Watchdog:
    """Pings the processes and finds those that do not answer within the timeout.

    Args:
        timeout_s: seconds of running time, so that a suspension of the watchdog and the processes
            together does not count; 0 switches the watchdog off.
        clock: a monotonic clock.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._interval_s = timeout_s / PINGS_PER_TIMEOUT
        self._time = RunningTime(self._interval_s, clock)
        self._next_at = 0.0

    def seconds_to_next(self) -> float | None:
        """Return the seconds until the next call of `check`; None: never."""
        return max(0.0, self._next_at - self._time.now()) if self._timeout_s else None

    def check(self, children: Iterable[ChildProcess]) -> list[ChildProcess]:
        """Ping the processes that have answered; return those whose answer is overdue."""
        now = self._time.now()
        if not self._timeout_s or now < self._next_at:
            return []
        self._next_at = now + self._interval_s
        overdue = []
        for child in children:
            if child.pinged_at is None:
                child.pinged_at = now
                child.send(Command.HEARTBEAT)
            elif now - child.pinged_at >= self._timeout_s:
                overdue.append(child)
        return overdue


START_RETRY_S = 1.0


class Supervisor:
    """Starts processes, watches them and reports events. Iterates over all started processes.

    Args:
        flags: command line flags of every process.
        program_of: returns the command that runs a process, before its flags.
        args: limits of restarts and of the watchdog.
        no_restart: processes that are not restarted, since their state cannot be rebuilt.
    """

    def __init__(
        self,
        flags: list[str],
        program_of: Callable[[str], list[str]],
        args: LaunchArgs,
        no_restart: list[str],
    ) -> None:
        self._flags = flags
        self._program_of = program_of
        self._no_restart = no_restart
        self._children: dict[str, ChildProcess] = {}
        self._restart_at: dict[str, float] = {}
        self._reported: deque[FirstReady | ReadyAgain | ReplicaChange | ModelWish] = deque()
        self._policy = RestartPolicy(args.max_restarts)
        self._watchdog = Watchdog(args.watchdog_timeout)
        self._selector = selectors.DefaultSelector()
        self._signals = ReceivedSignals()
        self._selector.register(self._signals, selectors.EVENT_READ, self._signals)
        # Made once signals are caught: an earlier signal would leave it behind.
        self._run_dir = make_run_dir()

    def __iter__(self) -> Iterator[ChildProcess]:
        return iter(self._children.values())

    def __contains__(self, name: str) -> bool:
        """Return whether a process of this name was started."""
        return name in self._children

    def __getitem__(self, name: str) -> ChildProcess:
        return self._children[name]

    @property
    def run_dir(self) -> Path:
        """Directory of the run's sockets."""
        return self._run_dir

    @property
    def not_ready(self) -> list[str]:
        """Names of the processes that do not serve."""
        return [child.name for child in self if not (child.is_ready or child.is_abandoned)]

    @property
    def all_exited(self) -> bool:
        """Whether every process has exited and none is to be restarted."""
        return not self._restart_at and all(child.has_exited for child in self)

    def watch(self, descriptor: int) -> None:
        """Report in `next_event` whenever a descriptor is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, SupervisorEvent.COMMAND)

    def start(self, name: str) -> None:
        """Start a process, or restart one that has exited. Raise OSError if the system cannot."""
        is_restart = name in self._children
        child = start_child(name, self._start_of(ProcessName.parse(name)), is_restart)
        self._children[name] = child
        self._selector.register(child.control, selectors.EVENT_READ, child)

    def _start_of(self, name: ProcessName) -> ProcessStart:
        """Return how a process is started."""
        program = self._program_of(name.program)
        return ProcessStart(program, self._run_dir, self._run_dir, self._flags)

    def start_later(self, name: str, delay_s: float) -> None:
        """Restart a process in `next_event` once the delay is over."""
        self._restart_at[name] = time.monotonic() + delay_s

    def cancel_start(self, name: str) -> None:
        """Cancel the start of a process that is not ready yet."""
        self._restart_at.pop(name, None)
        child = self._children.get(name)
        if child is not None and child.state is ChildState.STARTING:
            child.process.kill()

    def abandon(self, names: Iterable[str]) -> None:
        """Kill processes for good, as far as they were started, and wait until they are gone."""
        children = []
        for name in names:
            self._restart_at.pop(name, None)
            if name in self:
                children.append(self[name])
        for child in children:
            child.abandon()
        for child in children:
            child.process.wait()

    # --- events -----------------------------------------------------------------------------------

    def next_event(
        self, timeout: Countdown | None
    ) -> Death | SupervisorEvent | FirstReady | ReadyAgain | ReplicaChange | ModelWish | None:
        """Wait for the next event, at most until the timeout.

        Returns:
            None after a report or a ping, and in between so that a suspension of this process
            does not use up the timeout.
        """
        if timeout is not None and not timeout.left():
            return SupervisorEvent.TIMEOUT
        if self._reported:
            return self._reported.popleft()
        now = time.monotonic()
        for name, restart_at in self._restart_at.items():
            if now >= restart_at:
                return self._restart(name, now)
        for child in self._watchdog.check(child for child in self if child.is_running):
            self._kill_hung(child, "it does not answer")
        for key, _ in self._selector.select(self._seconds_to_wait(timeout, now)):
            if isinstance(key.data, SupervisorEvent):
                return key.data
            if isinstance(key.data, ReceivedSignals):
                return key.data.read()
            return self._on_reports(key.data)
        return None

    def _restart(self, name: str, now: float) -> SupervisorEvent | None:
        """Restart a process; try again later if the system has no room for a process."""
        try:
            self.start(name)
        except OSError as error:
            say(f"{name} cannot be started now ({error}): tried again in {START_RETRY_S:g} s")
            self._restart_at[name] = now + START_RETRY_S
            return None
        del self._restart_at[name]
        return SupervisorEvent.RESTARTED

    def _seconds_to_wait(self, timeout: Countdown | None, now: float) -> float | None:
        waits = [max(0.0, restart_at - now) for restart_at in self._restart_at.values()]
        if timeout is not None:
            waits.append(timeout.left_to_wait())
        if (seconds := self._watchdog.seconds_to_next()) is not None:
            waits.append(seconds)
        return min(waits, default=None)

    def _on_reports(self, child: ChildProcess) -> Death | None:
        was_ready = child.is_ready
        reports = child.receive()
        if reports is None:
            self._selector.unregister(child.control)
            was_abandoned = child.is_abandoned
            exit_ = child.close()
            return None if was_abandoned else self._death_of(child.name, exit_)
        if child.is_ready and not was_ready and not child.is_restart:
            self._reported.append(FirstReady(child.name))
        elif child.is_ready and not was_ready:
            seconds = time.monotonic() - child.started_at
            say(
                f"{child.name} is ready again after {seconds:.1f} s",
                event="process_restarted", child=child.name, seconds=round(seconds, 3),
            )  # fmt: skip
            self._reported.append(ReadyAgain(child.name))
        for report in reports:
            if isinstance(report, ReplicaChange | ModelWish):
                self._reported.append(report)
                continue
            name = ProcessName.parse(child.name)._replace(program=report.process)
            other = self._children[str(name)]
            if other.is_ready:
                self._kill_hung(other, report.reason)
        return None

    def _kill_hung(self, child: ChildProcess, reason: str) -> None:
        say(
            f"{child.name} hangs: {reason}. It is killed; the stacks of its threads, if it can:",
            event="process_hung", child=child.name, reason=reason,
        )  # fmt: skip
        child.kill_hung(reason)

    def _death_of(self, name: str, exit_: Exit) -> Death:
        reason = exit_.reason
        # A process that exits by itself before it is ready would do so again.
        refused = exit_.state is ChildState.STARTING and exit_.code >= 0
        delay_s: float | None = None
        is_reload = exit_.state is ChildState.RELOADING
        if is_reload:
            delay_s, reason = 0.0, "replaced for the reload"
        elif name not in self._no_restart and not refused:
            delay_s = self._policy.delay_after_death(name, time.monotonic())
            if delay_s is None and self._policy.max_restarts:
                reason += f", more than {self._policy.max_restarts} times within five minutes"
        return Death(name, reason, delay_s, exit_.code == EXIT_OK, exit_.error_code, is_reload)

    # --- stop -------------------------------------------------------------------------------------

    def clean_up(self) -> None:
        """Kill every process that still runs and remove the run directory."""
        self._signals.close()
        for child in self:
            if child.process.poll() is None:
                child.process.kill()
        for child in self:
            child.process.wait()
        remove_run_dir(self._run_dir)
