"""The processes of a server as the launcher sees them, and what happens to them."""

import contextlib
import enum
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quadriga.clock import Countdown
from quadriga.config.server_config import LaunchArgs
from quadriga.errors import ConfigError
from quadriga.runtime.child import EXIT_OK, REPLACED
from quadriga.runtime.terminal import line_start
from quadriga.supervisor.child_process import EXIT_GRACE, ChildProcess, start_child
from quadriga.supervisor.restart_policy import Restarts
from quadriga.supervisor.watchdog import Watchdog

START_RETRY_S = 1.0
"""Until a process is tried again that the system could not start."""


class SupervisorEvent(enum.Enum):
    """What happened, beside a death. STARTED: a process that had died runs again, not yet ready.
    STOP and RELOAD: a person's signals."""

    STARTED = enum.auto()
    STOP = enum.auto()
    RELOAD = enum.auto()
    TIMEOUT = enum.auto()


@dataclass(frozen=True, slots=True)
class Death:
    """A process ended. how: in words. delay: seconds until it may be started again; None: it must
    not be. in_order: it left by its own decision, having finished."""

    name: str
    how: str
    delay: float | None
    in_order: bool


class Supervisor:
    """Starts processes, watches them and says what happens. Iterates over all that were started.

    python_path: where the processes' own packages are. final: those that are not started again, for
    what dies with them is lost. informed: the one that is told when another was replaced.
    """

    def __init__(
        self,
        flags: list[str],
        python_path: list[str],
        args: LaunchArgs,
        final: list[str],
        notify_on_restart: str,
    ) -> None:
        self._flags = flags
        self._python_path = python_path
        self._final = final
        self._informed = notify_on_restart
        self._children: dict[str, ChildProcess] = {}
        self._due: dict[str, float] = {}
        self._restarts = Restarts(args.max_restarts)
        self._watchdog = Watchdog(args.watchdog_timeout)
        self._selector = selectors.DefaultSelector()
        self._signals = self._catch_signals()
        self._had_terminal = _has_terminal()
        # Once signals are caught: one that came before would leave it behind.
        self._run_dir = _make_run_dir()

    def _catch_signals(self) -> socket.socket:
        """Readable when a person's signal came; its number is the byte."""
        signals, wakeup = socket.socketpair()
        signals.setblocking(False)
        wakeup.setblocking(False)
        self._wakeup = wakeup
        self._selector.register(signals, selectors.EVENT_READ)
        signal.set_wakeup_fd(wakeup.fileno())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        return signals

    def __iter__(self) -> Iterator[ChildProcess]:
        return iter(self._children.values())

    def __getitem__(self, name: str) -> ChildProcess:
        return self._children[name]

    @property
    def not_ready(self) -> list[str]:
        return [child.name for child in self if child.left or not child.ready]

    @property
    def all_ready(self) -> bool:
        return not self.not_ready

    @property
    def all_left(self) -> bool:
        """Every process has ended, and none is to be started again."""
        return not self._due and all(child.left for child in self)

    def start(self, name: str) -> None:
        is_another = name in self._children
        flags = ["--again", *self._flags] if is_another else self._flags
        child = start_child(name, self._run_dir, flags, self._python_path)
        child.is_another = is_another
        self._children[name] = child
        self._selector.register(child.control, selectors.EVENT_READ, child)

    def start_later(self, name: str, delay: float) -> None:
        """In so many seconds, if `next_event` is called by then."""
        self._due[name] = time.monotonic() + delay

    def spare(self, name: str) -> None:
        """If it is not there, or only about to be, it need not come."""
        self._due.pop(name, None)
        child = self._children.get(name)
        if child is not None and not child.left and child.ready is None:
            child.process.kill()

    # --- events -----------------------------------------------------------------------------------

    def next_event(self, timeout: Countdown | None) -> Death | SupervisorEvent | None:
        """Wait for what happens next, at most until the timeout; None for a report, a question of
        the watchdog, or a look at the timeout."""
        if timeout is not None and not timeout.left():
            return SupervisorEvent.TIMEOUT
        now = time.monotonic()
        for name, due in self._due.items():
            if now >= due:
                return self._start_due(name, now)
        for child in self._watchdog.ask(c for c in self if not c.left):
            self._replace(child, "it does not answer")
        for key, _ in self._selector.select(self._seconds_to_wait(timeout, now)):
            if key.data is None:
                return self._take_signal()
            return self._take_reports(key.data)
        return None

    def _start_due(self, name: str, now: float) -> SupervisorEvent | None:
        """Start it; where the system has no room for a process now, try again later."""
        try:
            self.start(name)
        except OSError as error:
            say(f"{name} cannot be started now ({error}): tried again in {START_RETRY_S:g} s")
            self._due[name] = now + START_RETRY_S
            return None
        del self._due[name]
        return SupervisorEvent.STARTED

    def _seconds_to_wait(self, timeout: Countdown | None, now: float) -> float | None:
        waits = [max(0.0, due - now) for due in self._due.values()]
        if timeout is not None:
            waits.append(timeout.left_to_wait())
        if (seconds := self._watchdog.seconds_to_next()) is not None:
            waits.append(seconds)
        return min(waits, default=None)

    def _take_signal(self) -> SupervisorEvent:
        numbers = set(self._signals.recv(4096))
        hung_up = self._had_terminal and not _has_terminal()
        return (
            SupervisorEvent.RELOAD
            if numbers == {signal.SIGHUP} and not hung_up
            else SupervisorEvent.STOP
        )

    def _take_reports(self, child: ChildProcess) -> Death | None:
        was_ready = child.ready is not None
        if not child.read_reports():
            return self._death_of(child)
        if child.ready is not None and not was_ready and child.is_another:
            say(f"{child.name} is there again, {time.monotonic() - child.started_at:.1f} s later")
            self._children[self._informed].order(REPLACED, child.name)
        if child.stuck is not None:
            (name, why), child.stuck = child.stuck, None
            stuck = self._children[name]
            if stuck.ready is not None and not stuck.left:
                self._replace(stuck, why)
        return None

    def _replace(self, child: ChildProcess, why: str) -> None:
        if not child.replaced:
            say(f"{child.name} hangs: {why}. Its stacks, if it can still write them, and its end:")
            child.kill_hung(f"hung: {why}")

    def _death_of(self, child: ChildProcess) -> Death:
        self._selector.unregister(child.control)
        child.control.close()
        how, name = child.how_it_ended(), child.name
        delay: float | None = None
        if child.reloads:
            delay = 0.0
        elif name not in self._final and not child.refused_to_start:
            delay = self._restarts.delay_after_death(name, time.monotonic())
            if delay is None and self._restarts.most:
                how += f", more than {self._restarts.most} times within five minutes"
        return Death(name, how, delay, child.process.wait(EXIT_GRACE) == EXIT_OK)

    def reload(self, name: str) -> None:
        """End a process; it is to be started again as if it had died."""
        self._children[name].reloads = True
        self._children[name].process.kill()

    # --- the end ----------------------------------------------------------------------------------

    def leave_nothing_behind(self) -> None:
        signal.set_wakeup_fd(-1)
        for child in self:
            if child.process.poll() is None:
                child.process.kill()
        for child in self:
            child.process.wait()
        shutil.rmtree(self._run_dir, ignore_errors=True)


def _make_run_dir() -> Path:
    """The directory of a run's sockets and, by default, its journal. Raises ConfigError."""
    try:
        return Path(tempfile.mkdtemp(prefix="quadriga-"))
    except OSError as error:
        raise ConfigError(
            f"no directory for this run can be made ({error}): make room, or set TMPDIR to a"
            " directory that can be written"
        ) from None


def _has_terminal() -> bool:
    """A terminal that is closed sends the same signal as a person who wants a reload."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def say(text: str) -> None:
    """A line for the person who runs the server. A log that takes nothing, as on a full disk, is no
    reason to end the server."""
    with contextlib.suppress(OSError):
        print(f"{line_start()}{text}", file=sys.stderr, flush=True)
