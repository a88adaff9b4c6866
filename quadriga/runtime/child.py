"""What every child process does: signals, ready or fatal report, the lifeline, logging.

The lifeline is a socket pair that a child inherits from the launcher. Upwards go reports, one
JSON object a line; downwards go orders, one word a line. Its end tells each side at once that the
other has died, however that happened: the launcher sees which child is gone, and a child whose
launcher is gone removes the run directory and leaves. One that is stopped by a signal then goes on
for that (quadriga/runtime/parent_death.py).
"""

import argparse
import faulthandler
import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga import clock
from quadriga.config import server_config as configuration
from quadriga.config.server_config import ServerConfig
from quadriga.errors import QuadrigaError
from quadriga.runtime.cpu_affinity import keep_to, shares
from quadriga.runtime.terminal import drop_unwritten, line_start
from quadriga.wire.endpoints import Endpoints
from quadriga.wire.sockets import close_all

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_START_FAILED = 3
EXIT_CHILD_DIED = 4
EXIT_FORCED = 5
EXIT_LAUNCHER_DIED = 6
"""Exit codes of launcher and children, documented in README.md."""

DRAIN = "drain"
ABORT = "abort"
FAIL = "fail"
BEAT = "beat"
REPLACED = "replaced"
"""Orders of the launcher: finish and leave; end every request and leave; tell the clients why;
say that you are there; a process of this name has died, and another one is ready."""
NICENESS = 10
"""Of a process that gives way."""
DUMP_SIGNAL = signal.SIGUSR1
"""Makes a child write the stacks of its threads to the log."""


class ControlChannel:
    """A child's end of the pair. Orders are read by a thread, so that a busy process sees EOF."""

    def __init__(self, connection: socket.socket | None, run_dir: Path) -> None:
        self._connection = connection
        self._run_dir = run_dir
        self._orders: deque[tuple[str, str]] = deque()
        self._wake_receive, self._wake_send = socket.socketpair()
        self._attended = False
        self._sending = threading.Lock()
        if connection is not None:
            threading.Thread(target=self._read, name="lifeline", daemon=True).start()

    def fileno(self) -> int:
        """Readable when an order waits; for a poller."""
        return self._wake_receive.fileno()

    def attend(self) -> None:
        """From now on `read_commands` is called whenever there is something: the launcher is
        answered there, so that it sees that this process goes on, not only that it exists."""
        self._attended = True

    def read_commands(self) -> list[tuple[str, str]]:
        """The (order, argument) pairs that have come."""
        orders = []
        while self._orders:
            self._wake_receive.recv(1)
            order, argument = self._orders.popleft()
            if order == BEAT:
                self.report("beat")
            else:
                orders.append((order, argument))
        return orders

    def report(self, kind: str, **values: Any) -> None:
        """Tell the launcher; without one, tell the person at the terminal."""
        if self._connection is None:
            logging.info("%s %s", kind, json.dumps(values))
            return
        try:
            with self._sending:
                self._connection.sendall(json.dumps({"report": kind, **values}).encode() + b"\n")
        except OSError:
            self._leave()

    def _read(self) -> None:
        assert self._connection is not None
        with self._connection.makefile("r", encoding="utf-8") as lines:
            try:
                for line in lines:
                    order, _, argument = line.rstrip("\n").partition(" ")
                    if order == BEAT and not self._attended:
                        self.report("beat")
                        continue
                    self._orders.append((order, argument))
                    self._wake_send.send(b"!")
            except OSError:
                pass
        self._leave()

    def _leave(self) -> None:
        shutil.rmtree(self._run_dir, ignore_errors=True)
        os._exit(EXIT_LAUNCHER_DIED)


@dataclass(frozen=True, slots=True)
class Child:
    """What a process body gets to work with. again: another one of its name was there before."""

    config: ServerConfig
    endpoints: Endpoints
    control: ControlChannel
    again: bool = False

    def ready(self, **facts: Any) -> None:
        """This process can serve; `facts` go into the launcher's start lines."""
        self.control.report("ready", pid=os.getpid(), **facts)

    def phase(self, what: str, seconds: float) -> None:
        """A phase of the start is over."""
        self.control.report("phase", what=what, seconds=round(seconds, 3))


def run_child(name: str, body: Callable[[Child], None], low_priority: bool = False) -> None:
    """The main of every `python -m <name>`: parse flags, run `body`, report what went wrong.

    low_priority: to the worker, wherever both want a core.
    """
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL)
    arguments = _parse(name)
    if arguments.clock_offset is not None:
        clock.use_offset(arguments.clock_offset)
    control = ControlChannel(_inherited(arguments.lifeline_fd), Path(arguments.run_dir))
    try:
        config = configuration.from_namespace(arguments)
        _set_up_logging(name, config.launch.log_level)
        if arguments.lifeline_fd is not None:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        if low_priority:
            os.nice(NICENESS)
            keep_to(shares(config.worker).others)
        body(Child(config, Endpoints(Path(arguments.run_dir)), control, arguments.again))
    except KeyboardInterrupt:
        pass
    except QuadrigaError as error:
        _fatal(control, f"{type(error).__name__}: {error}")
    except Exception as error:
        with suppress(OSError):  # of a log that takes nothing
            traceback.print_exc()
        _fatal(control, f"{type(error).__name__}: {error}")
    close_all()
    drop_unwritten()


def _fatal(control: ControlChannel, message: str) -> None:
    control.report("fatal", message=message)
    drop_unwritten()
    close_all()
    os._exit(EXIT_START_FAILED)


def _parse(name: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(f"python -m {name}")
    parser.add_argument("--run-dir", required=True, help="directory of this run's sockets (0700)")
    parser.add_argument("--lifeline-fd", type=int, help="inherited socket to the launcher")
    parser.add_argument("--clock-offset", type=float, help="of the server's clock (quadriga/clock)")
    parser.add_argument("--again", action="store_true", help="in place of one that died")
    configuration.add_flags(parser)
    return parser.parse_args()


def _inherited(file_descriptor: int | None) -> socket.socket | None:
    return None if file_descriptor is None else socket.socket(fileno=file_descriptor)


def _set_up_logging(name: str, level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format=f"{line_start()}%(asctime)s {name} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
