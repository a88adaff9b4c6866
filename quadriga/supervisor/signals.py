"""The signals that the launcher receives, as something that a selector can wait for."""

import os
import signal
import socket

from quadriga.supervisor.events import SupervisorEvent


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
