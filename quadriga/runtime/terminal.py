"""The terminal of a server: log lines, and a status line below them that changes.

The status line ends with the cursor at its start. A log line clears it first; it appears again with
its next change.
"""

import os
import sys

CLEAR = "\r\x1b[K"
STDERR_FD = 2


def is_foreground() -> bool:
    """Return whether standard error is a terminal and this process runs in its foreground."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return False
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except OSError:
        return False


def open_if_closed() -> None:
    """Open standard error on /dev/null if this process was started without it.

    Descriptor 2 would otherwise become that of some socket.
    """
    if sys.stderr is None:
        while (fd := os.open(os.devnull, os.O_RDWR)) < STDERR_FD:
            pass
        if fd > STDERR_FD:
            os.close(fd)
        os.set_inheritable(STDERR_FD, True)
        sys.stderr = open(STDERR_FD, "w", closefd=False)  # noqa: SIM115


def drop_unwritten() -> None:
    """Discard what could not be written to standard error, on a full disk or a closed pipe.

    Python would flush it again at exit, and change the exit code when that fails.
    """
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR_FD)


def line_start() -> str:
    """Return the prefix of a line on standard error; it clears the status line."""
    return CLEAR if sys.stderr.isatty() else ""


class TransientLine:
    """The status line. A terminal that accepts no output, as after Ctrl-S, blocks nothing."""

    def __init__(self, terminal: str) -> None:
        # A separate open file: O_NONBLOCK would otherwise apply to every user of the terminal.
        self._fd = os.open(terminal, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)

    def show(self, text: str) -> None:
        """Replace the line's text, cut off at the terminal's width."""
        try:
            width = os.get_terminal_size(self._fd).columns
            cut = text[: width - 1] if width else text
            os.write(self._fd, f"\r{cut}\x1b[K\r".encode())
        except OSError:
            return

    def close(self) -> None:
        """Clear the line."""
        self.show("")
        os.close(self._fd)
