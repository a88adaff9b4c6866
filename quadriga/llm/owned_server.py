"""A server that a program starts for itself; quadriga/supervisor/owner.py is the other end."""

import json
import os
import signal
import socket
import subprocess
import weakref
from contextlib import suppress

from quadriga import errors
from quadriga.errors import QuadrigaError, ServerFailed
from quadriga.programs import command_of

# Seconds in which the launcher kills its processes and removes the run directory.
STOP_TIMEOUT_S = 20.0
EXIT_TIMEOUT_S = 5.0

_running: "weakref.WeakSet[OwnedServer]" = weakref.WeakSet()


class OwnedServer:
    """A launcher with a private endpoint, which stops when this program ends or closes it.

    The two share a socket pair. The kernel closes the program's end even after SIGKILL. The server
    is in a session of its own, so that Ctrl-C reaches the program only.

    Args:
        flags: command line flags of the server.
    """

    def __init__(self, flags: list[str]) -> None:
        self._owner_pid = os.getpid()
        self._is_closed = False
        self._channel, theirs = socket.socketpair()
        _running.add(self)
        with theirs:
            self._process = subprocess.Popen(
                [*command_of("launcher"), "--owner-fd", str(theirs.fileno()), *flags],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the launcher."""
        return self._process.pid

    def wait_until_ready(self) -> str:
        """Wait until the server answers, and return its endpoint.

        Raises:
            QuadrigaError: the server could not start; the class and the message are the server's.
        """
        with self._channel.makefile("r", encoding="utf-8") as reports:
            line = reports.readline()
        if not line:
            raise self._early_end()
        report = json.loads(line)
        if report["report"] == "failed":
            raise errors.from_code(report["code"], report["message"])
        endpoint: str = report["endpoint"]
        return endpoint

    def wait_for_end(self) -> str:
        """Wait until the server ends, and return how it ended; "" if this program closed it."""
        with suppress(OSError):  # the channel was closed before
            self._channel.recv(1)
        return "" if self._is_closed else self._end()

    def _end(self) -> str:
        try:
            code = self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its channel"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    def _early_end(self) -> QuadrigaError:
        return ServerFailed(
            f"the server {self._end()} while it started; its output on stderr may say why"
        )

    def close(self) -> None:
        """Stop the server and wait for its end; a fork of this program only forgets it."""
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() != self._owner_pid:
            self._channel.close()
            return
        with self._channel, suppress(OSError):  # the launcher may have exited
            self._channel.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the other processes exit when the launcher does
            self._process.wait()


def _close_in_fork() -> None:
    """Close the channels in a fork: it would otherwise keep the servers running."""
    for server in list(_running):
        server.close()


os.register_at_fork(after_in_child=_close_in_fork)
