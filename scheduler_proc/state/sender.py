"""Where the scheduler sends messages: a socket, or a list in a test."""

from typing import Protocol

import msgspec


class Sender(Protocol):
    """The sending side of a link to another process."""

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; never block."""
