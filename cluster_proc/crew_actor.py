"""The actor that starts a crew, or a rank crew, on its machine, and passes commands and reports on.

Ray gets this module by value (crews.py), so that it imports nothing of this project: a machine
needs an installation only, wherever that is.
"""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

KILL_AFTER_S = 10.0


class CrewActor:
    """A crew's process, seen from its actor.

    Args:
        programs: path of quadriga/programs.py at the driver. If there is none on this machine,
            that of its installation is used.
        module: of the crew.
        arguments: of the crew, but for this machine's address.
    """

    def __init__(self, programs: str, module: str, arguments: list[str]) -> None:
        import ray

        if not Path(programs).exists():
            spec = importlib.util.find_spec("quadriga")
            if spec is None or spec.origin is None:
                raise RuntimeError("quadriga is not installed on this machine")
            programs = str(Path(spec.origin).parent / "programs.py")
        self._control, theirs = socket.socketpair()
        self._partial_line = b""
        command = [sys.executable, programs, module, *arguments]
        command += ["--node-host", ray.util.get_node_ip_address()]
        self._process = subprocess.Popen(
            [*command, "--control-fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    def next_reports(self) -> list[str]:
        """Block for reports of the crew, one line of JSON each. None follow an empty list."""
        while True:
            data = self._control.recv(65536)
            if not data:
                return []
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            if lines:
                return [line.decode() for line in lines]

    def send(self, line: str) -> None:
        """Send a command to the crew; nothing happens if it has left."""
        with contextlib.suppress(OSError):
            self._control.sendall(line.encode() + b"\n")

    def stop(self) -> None:
        """End the crew and its processes, and wait until the crew has left."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.kill(self._process.pid, signal.SIGKILL)
