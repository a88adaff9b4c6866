"""The limit of open files: raised at the start, and not reached by connections.

At the limit libzmq can take no connection, and tries again without pause, which keeps a core busy.
"""

import contextlib
import logging
import resource
import socket
import time

MAX_OPEN_FILES = 65_536
"""More are not asked for, whatever the system allows."""
MIN_RESERVE = 64
RESERVED_FRACTION = 0.05
"""Descriptors that connections leave to other uses."""
WARN_FRACTION = 0.9
WARN_EVERY_S = 60.0


def allow_open_files(wanted: int) -> int:
    """Raise the limit of this process, and of those that it starts, to so many as far as the system
    allows. Returns the limit, of which nothing is ever taken away."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = wanted if hard == unlimited else min(wanted, hard)
    if soft == unlimited or soft >= most:
        return wanted if soft == unlimited else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


class FileWatch:
    """Ends new connections where nearly all descriptors are in use, and logs a warning before, once
    a minute at most."""

    def __init__(self) -> None:
        self._limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        reserve = max(MIN_RESERVE, int(RESERVED_FRACTION * self._limit))
        self._most = self._limit - min(reserve, self._limit // 2)
        self._warned_at = float("-inf")

    def accepted(self, descriptor: int) -> None:
        """Look at the descriptor of a new connection: the system gives the lowest that is free."""
        if self._limit == resource.RLIM_INFINITY or descriptor < WARN_FRACTION * self._limit:
            return
        self._warn(descriptor)
        if descriptor >= self._most:
            _end(descriptor)

    def _warn(self, descriptor: int) -> None:
        now = time.monotonic()
        if now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            logging.warning(
                "%d of %d files are open, nearly all of them connections: from %d on new ones are"
                " ended; raise the limit (ulimit -n)",
                descriptor + 1,
                self._limit,
                self._most,
            )


def _end(descriptor: int) -> None:
    """Tell both sides of a connection that it is over; its owner then closes it. If it was closed
    before, and another one has its number, that one is over the bound as well."""
    with contextlib.suppress(OSError), socket.fromfd(descriptor, socket.AF_INET, 0) as connection:
        connection.shutdown(socket.SHUT_RDWR)
