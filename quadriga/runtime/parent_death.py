"""A signal from the kernel when the parent of this process dies, even to one that is stopped."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def signal_at_parents_death(number: signal.Signals) -> None:
    """Have this process sent a signal when the thread that started it ends; on Linux only.

    It outlasts an exec, so that it can be called between fork and exec. Not inherited by forks.
    """
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def continue_at_parents_death() -> None:
    """Have this process go on, if it is stopped, when its parent dies: so that it can see that the
    parent is gone, clean up and leave."""
    signal_at_parents_death(signal.SIGCONT)
