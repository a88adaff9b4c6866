"""The channels between the launcher, its children and its owner, and what the end of one means.

In order: exit codes, as docs/troubleshooting.md lists them, the kernel's signal at the death of a
parent, the socket pair that a child inherits from the launcher, and the launcher's channel to the
program that started the server for itself, whose other end is OwnedServer in quadriga/llm/llm.py.

Reports go up, one JSON object per line; commands go down.
"""

import ctypes
import enum
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from quadriga.server.processes.run_dir import remove_run_dir

# Exit codes of the launcher, as docs/troubleshooting.md lists them, and of its children.

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_START_FAILED = 3
EXIT_CHILD_DIED = 4
EXIT_FORCED = 5
EXIT_LAUNCHER_DIED = 6


# A signal from the kernel when the parent process dies; it reaches stopped processes, too.

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def signal_at_parents_death(number: signal.Signals) -> None:
    """Send this process a signal when the thread that started it ends; on Linux only.

    The setting survives an exec, so that it can be made between fork and exec; forks lose it.
    """
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def continue_at_parents_death() -> None:
    """Continue this process, if it is stopped, when its parent dies, so that it can clean up."""
    signal_at_parents_death(signal.SIGCONT)


# Commands go down the control channel one word per line, perhaps with an argument. The end of the
# channel reports a death at once: the launcher sees which child died, and a child whose launcher
# died removes the run directory and exits. A child that was stopped by a signal is continued for
# that (`continue_at_parents_death`).

# Time in which the processes that have clients report the launcher's death to them.
FAIL_TIMEOUT_S = 1.5
LAUNCHER_DIED = "the server's launcher was killed, so the server ends; start it again"


# The argument of a DRAIN.
GATEWAY_GOES_ON = "gateway-goes-on"


class Command(enum.Enum):
    """A command of the launcher to a child.

    Attributes:
        DRAIN: finish open requests, then exit. With GATEWAY_GOES_ON, the gateway still sends
            requests that belong to calls which it is answering, and a second DRAIN follows.
        ABORT: end every request with the argument as the reason, then exit.
        FAIL: tell the clients the argument, which says why the server ends, and exit.
        HEARTBEAT: answer at once.
        RESTARTED: the process named by the argument died, and its successor is ready.
        DIED: the process of a replica that the argument names died, and is restarted.
        LOST: the replica of the argument's number has ended for good; its processes are dead. To
            the gateway: the model of the argument's first word has, for the reason that follows.
        RECALL: move the requests of the replica of the argument's number to the others; answered
            with the report `recalled`.
        JOINED: the replica of the argument's number has joined; the addresses of its scheduler and
            of its results follow the number.
        LEFT: the replica of the argument's number has left; its processes have ended.
        REMOVE: end the replica of the argument's number, whose requests have moved.
        LOAD: the argument is the number of open requests.
        REPORT_LOAD: report the number of open requests at once, and from now on when it changes.
        PAUSE: let the steps in flight end, report `paused`, and send none until a worker is ready
            that was started after the argument, in ns of the system's monotonic clock.
        FAIL_ALL: end every open request with the argument as the error, and go on.
        MODELS: the argument is a map of models to their states, as JSON.
        SOURCES: the argument has a number that grows, and the addresses at which replicas give KV
            pages to other machines (page_sources.py).
        RELOAD: restart the worker, of the replica of the argument's number where there are several.
    """

    DRAIN = "drain"
    ABORT = "abort"
    FAIL = "fail"
    HEARTBEAT = "beat"
    RESTARTED = "restarted"
    DIED = "died"
    LOST = "lost"
    RECALL = "recall"
    JOINED = "joined"
    LEFT = "left"
    REMOVE = "remove"
    LOAD = "load"
    REPORT_LOAD = "report-load"
    RELOAD = "reload"
    PAUSE = "pause"
    FAIL_ALL = "fail-all"
    MODELS = "models"
    SOURCES = "sources"


class ControlChannel:
    """A child's end of the control channel.

    A thread reads the commands, so that a busy process notices the launcher's death, too.

    Args:
        connection: the inherited socket; None: the process was started by hand.
        run_dir: directory of the server, to remove when the launcher dies.
    """

    def __init__(self, connection: socket.socket | None, run_dir: Path) -> None:
        self._connection = connection
        self._run_dir = run_dir
        self._fails_clients = False
        self._commands: deque[tuple[Command, str]] = deque()
        self._wake_receive, self._wake_send = socket.socketpair()
        self._answers_in_loop = False
        self._sending = threading.Lock()
        if connection is not None:
            threading.Thread(target=self._read, name="control", daemon=True).start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when a command waits."""
        return self._wake_receive.fileno()

    def answer_in_loop(self) -> None:
        """Answer heartbeats in `read_commands` from now on.

        The main loop must call it whenever `fileno` is readable. So the launcher sees that the
        loop runs, and not only that the process exists.
        """
        self._answers_in_loop = True

    def fail_clients_at_launcher_death(self) -> None:
        """Give the main loop a FAIL command when the launcher dies, before the process exits.

        The process exits when the loop has carried it out, or after FAIL_TIMEOUT_S.
        """
        self._fails_clients = True

    def read_commands(self) -> list[tuple[Command, str]]:
        """Return the commands that have arrived, each with its argument."""
        commands: list[tuple[Command, str]] = []
        while self._commands:
            self._wake_receive.recv(1)
            command, argument = self._commands.popleft()
            if command is Command.HEARTBEAT:
                self.report("beat")
            else:
                logging.debug("command of the launcher: %s %r", command.value, argument)
                commands.append((command, argument))
        return commands

    def report(self, kind: str, **values: Any) -> None:
        """Send a report to the launcher; without one, log it."""
        if self._connection is None:
            logging.info("%s %s", kind, json.dumps(values))
            return
        try:
            with self._sending:
                self._connection.sendall(_report_line(kind, values))
        except OSError:
            self._exit_without_launcher()

    @staticmethod
    def report_to(connection: socket.socket, kind: str, **values: Any) -> None:
        """Send a report by a channel that nothing reads commands from."""
        with suppress(OSError):
            connection.sendall(_report_line(kind, values))

    def _read(self) -> None:
        assert self._connection is not None
        with self._connection.makefile("r", encoding="utf-8") as lines, suppress(OSError):
            for line in lines:
                word, _, argument = line.rstrip("\n").partition(" ")
                command = Command(word)
                if command is Command.HEARTBEAT and not self._answers_in_loop:
                    self.report("beat")
                else:
                    self._queue(command, argument)
        remove_run_dir(self._run_dir)
        if self._fails_clients:
            self._queue(Command.FAIL, LAUNCHER_DIED)
            time.sleep(FAIL_TIMEOUT_S)
        self._exit_without_launcher()

    def _queue(self, command: Command, argument: str) -> None:
        self._commands.append((command, argument))
        self._wake_send.send(b"!")

    def _exit_without_launcher(self) -> None:
        remove_run_dir(self._run_dir)
        os._exit(EXIT_LAUNCHER_DIED)


def _report_line(kind: str, values: dict[str, Any]) -> bytes:
    return json.dumps({"report": kind, **values}).encode() + b"\n"


# The owner is the program that started the server for itself. Reports to it are `ready` with the
# endpoint, or `failed` with an error. At the end of the channel the owner has ended, however that
# happened, or needs the server no more: the launcher stops at once.


class OwnerChannel:
    """The launcher's end of the channel; without an owner every method does nothing.

    Args:
        file_descriptor: the inherited socket; None: the server was started by hand.

    Attributes:
        is_gone: the owner has ended, or needs the server no more.
    """

    def __init__(self, file_descriptor: int | None) -> None:
        self.is_gone = False
        self._socket: socket.socket | None = None
        if file_descriptor is not None:
            self._socket = socket.socket(fileno=file_descriptor)
            self._socket.set_inheritable(False)
            continue_at_parents_death()
            threading.Thread(target=self._wait_for_end, name="owner", daemon=True).start()

    def __bool__(self) -> bool:
        """Whether the server has an owner."""
        return self._socket is not None

    def report_ready(self, endpoint: str) -> None:
        """Report that the server answers at this address."""
        self._report({"report": "ready", "endpoint": endpoint})

    def report_failure(self, code: str, message: str) -> None:
        """Report why the server cannot start; `code` is that of a QuadrigaError."""
        self._report({"report": "failed", "code": code, "message": message})

    def _report(self, report: dict[str, str]) -> None:
        if self._socket is not None:
            with suppress(OSError):  # the owner is gone, which `_wait_for_end` handles
                self._socket.sendall(json.dumps(report).encode() + b"\n")

    def _wait_for_end(self) -> None:
        """Stop the launcher at the end of the channel, also while it fetches a model."""
        assert self._socket is not None
        with suppress(OSError):
            while self._socket.recv(4096):
                pass
        self.is_gone = True
        os.kill(os.getpid(), signal.SIGTERM)
