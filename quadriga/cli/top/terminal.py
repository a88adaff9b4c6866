"""A full-screen terminal: an alternate screen without cursor, single keys, and all of it undone."""

import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class FullScreen:
    """Draws frames. Made by `full_screen`."""

    def __init__(self, output: TextIO) -> None:
        self._output = output

    def draw(self, lines: list[str]) -> None:
        """Replace what is shown, without flicker."""
        text = f"{CLEAR_LINE}\r\n".join(lines)
        self._output.write(f"{HOME}{text}{CLEAR_LINE}{CLEAR_BELOW}")
        self._output.flush()


@contextmanager
def full_screen(output: TextIO) -> Iterator[FullScreen]:
    """Take over the terminal in a `with` block, and give it back, also after SIGTERM or SIGHUP."""
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    keys = sys.stdin.fileno() if sys.stdin.isatty() else None
    mode = None if keys is None else termios.tcgetattr(keys)
    try:
        if keys is not None:
            tty.setcbreak(keys)
        output.write(ENTER)
        yield FullScreen(output)
    finally:
        output.write(LEAVE)
        output.flush()
        if keys is not None and mode is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, mode)
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _: FrameType | None) -> None:
    """Unwind the stack, so that the terminal is given back."""
    raise SystemExit(128 + number)


def read_key() -> str:
    """Return the key that was pressed; "" for none."""
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace")
