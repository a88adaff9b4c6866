"""A signal from the kernel when the parent process dies; it reaches stopped processes, too."""

import ctypes
import signal
import sys

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
