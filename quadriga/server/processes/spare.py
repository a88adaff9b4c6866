"""A worker that waits: its modules are imported, and it becomes the worker of a model when needed.

Imports are most of the start of a worker whose weights are in the page cache. The launcher keeps a
spare worker where models are loaded on demand or take turns, and gives it its command line and its
control channel by a socket. A spare worker that has died is no loss: a worker is started instead.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from quadriga.server.processes import control_channel

# After a load: a spare worker's imports take a core for about a second.
DELAY_S = 2.0
# Bytes of its command line that another one may take the place of.
ROOM = 8192
ARG_START, ARG_END = 45, 46  # of the words of /proc/PID/stat behind the name
PIECE_BYTES = 65536


class SpareWorker:
    """The launcher's end of a spare worker, which is started here.

    Args:
        command: runs it, but for the descriptor of its socket.

    Raises:
        OSError: the system has no room for a process.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), " " * ROOM],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=control_channel.continue_at_parents_death,
            )

    def take(
        self, command: Sequence[str], control: socket.socket
    ) -> "subprocess.Popen[bytes] | None":
        """Make it the process that a command line would start; None: it has died.

        Args:
            command: the command line, but for the descriptor of the control channel.
            control: the process's end of that channel.
        """
        with self._socket, suppress(OSError):
            if self._process.poll() is None:
                message = json.dumps(list(command)).encode() + b"\n"
                socket.send_fds(self._socket, [message[:1]], [control.fileno()])
                self._socket.sendall(message[1:])
                return self._process
        self.close()
        return None

    def close(self) -> None:
        """End it."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


class SpareWorkers:
    """Keeps one spare worker.

    Args:
        command: as of SpareWorker.
        clock: seconds of a steady clock.
    """

    def __init__(self, command: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._command = command
        self._clock = clock
        self._spare: SpareWorker | None = None
        self._starts_at: float | None = None

    def keep(self, is_quiet: bool) -> None:
        """Start a spare worker if there is none, some time after the last load.

        Args:
            is_quiet: no model is being loaded.
        """
        if self._spare is not None or not is_quiet:
            self._starts_at = None
        elif self._starts_at is None:
            self._starts_at = self._clock() + DELAY_S
        elif self._clock() >= self._starts_at:
            self._starts_at = None  # after an error, it is tried again later
            with suppress(OSError):
                self._spare = SpareWorker(self._command)

    def seconds_to_next(self) -> float | None:
        """Return the seconds until `keep` has something to do; None: something has to happen."""
        return None if self._starts_at is None else max(0.0, self._starts_at - self._clock())

    def take(self) -> SpareWorker | None:
        """Return the spare worker, which is no longer kept."""
        spare, self._spare = self._spare, None
        return spare

    def close(self) -> None:
        """End the spare worker."""
        if (spare := self.take()) is not None:
            spare.close()


# --- the spare worker's end -----------------------------------------------------------------------


def receive_command(descriptor: int) -> list[str]:
    """Wait until the launcher needs a worker; return the arguments of its command line.

    The process looks like one that was started by the command line. It ends with the launcher.

    Args:
        descriptor: the inherited socket.
    """
    with socket.socket(fileno=descriptor) as launcher:
        message, descriptors, _, _ = socket.recv_fds(launcher, PIECE_BYTES, 1)
        while message and not message.endswith(b"\n"):
            piece = launcher.recv(PIECE_BYTES)
            message = message + piece if piece else b""
    if not message:
        os._exit(control_channel.EXIT_OK)
    command = [*json.loads(message), "--control-fd", str(descriptors[0])]
    show_command_line(command)
    return command


def show_command_line(command: Sequence[str]) -> None:
    """Make `ps` show another command line of this process, as far as the old one has room for it.

    On Linux only: what /proc shows is the memory in which the process got its arguments.
    """
    if sys.platform != "linux":
        return
    words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(words[ARG_START]), int(words[ARG_END])
    if not 0 < start < end:  # some sandboxes do not say where it is
        return
    text = b"".join(word.encode() + b"\0" for word in command)
    room = end - start - 1
    ctypes.memmove(start, text[:room].ljust(room, b" ") + b"\0", room + 1)
