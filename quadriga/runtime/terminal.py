"""The terminal at which a server was started: lines in it, and one below them that changes.

The changing line ends with the cursor at its beginning. Whoever writes another line clears it
first; it comes again with the next change.
"""

import os
import sys

CLEAR = "\r\x1b[K"
STDERR = 2
"""Its file descriptor."""


def is_ours() -> bool:
    """Whether standard error is a terminal in whose foreground this process runs."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return False
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except OSError:
        return False


def open_if_closed() -> None:
    """Give standard error a place that takes everything, if this process was started without one:
    else the number 2 would become that of some socket."""
    if sys.stderr is None:
        while (fd := os.open(os.devnull, os.O_RDWR)) < STDERR:
            pass
        if fd > STDERR:
            os.close(fd)
        os.set_inheritable(STDERR, True)
        sys.stderr = open(STDERR, "w", closefd=False)  # noqa: SIM115


def drop_unwritten() -> None:
    """Forget what standard error did not take, on a full disk or where its reader has left. Python
    would try it once more at the end, and exit with another code when that fails."""
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)


def line_start() -> str:
    """What stands before a line on standard error."""
    return CLEAR if sys.stderr.isatty() else ""


class ChangingLine:
    """The line below the others. A terminal that takes nothing, as after Ctrl-S, is left alone: it
    holds up nobody."""

    def __init__(self, terminal: str) -> None:
        # An open file of its own: not to block must not become a property of everybody's.
        self._fd = os.open(terminal, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)

    def show(self, text: str) -> None:
        """In place of what it was; cut off at the terminal's width."""
        try:
            width = os.get_terminal_size(self._fd).columns
            cut = text[: width - 1] if width else text
            os.write(self._fd, f"\r{cut}\x1b[K\r".encode())
        except OSError:
            return

    def close(self) -> None:
        """Leave nothing of it behind."""
        self.show("")
        os.close(self._fd)
