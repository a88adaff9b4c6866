"""The limit of open files: raised at the start, and kept out of reach of connections.

At the limit libzmq cannot accept a connection and retries without a pause, which uses up a core.
"""

import contextlib
import logging
import resource
import socket
import time

MAX_OPEN_FILES = 65_536
# Descriptors that connections leave to other uses, and as a fraction of the limit.
MIN_RESERVE = 64
RESERVED_FRACTION = 0.05
WARN_FRACTION = 0.9
WARN_EVERY_S = 60.0


def allow_open_files(wanted: int) -> int:
    """Raise the limit of this process and its children to `wanted`, as far as the system allows.

    Returns:
        The limit, which is never lowered.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    limit = wanted if hard == unlimited else min(wanted, hard)
    if soft == unlimited or soft >= limit:
        return wanted if soft == unlimited else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


class FileWatch:
    """Closes new connections if nearly all descriptors are in use.

    Logs a warning before that, at most once a minute.
    """

    def __init__(self) -> None:
        self._limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        reserve = max(MIN_RESERVE, int(RESERVED_FRACTION * self._limit))
        self._max_descriptor = self._limit - min(reserve, self._limit // 2)
        self._warned_at = float("-inf")

    def on_accept(self, descriptor: int) -> None:
        """Check the descriptor of a new connection, which is the lowest free number."""
        if self._limit == resource.RLIM_INFINITY or descriptor < WARN_FRACTION * self._limit:
            return
        self._warn(descriptor)
        if descriptor >= self._max_descriptor:
            _shut_down(descriptor)

    def _warn(self, descriptor: int) -> None:
        now = time.monotonic()
        if now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            logging.warning(
                "%d of %d files are open, nearly all of them connections: from %d on new ones are"
                " closed; raise the limit (ulimit -n)",
                descriptor + 1,
                self._limit,
                self._max_descriptor,
            )


def _shut_down(descriptor: int) -> None:
    """Shut a connection down; its owner then closes it.

    If it was closed meanwhile and another connection has its number, that one is too many, too.
    """
    with contextlib.suppress(OSError), socket.fromfd(descriptor, socket.AF_INET, 0) as connection:
        connection.shutdown(socket.SHUT_RDWR)
