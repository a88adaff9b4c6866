"""What a client has not read: bounded in messages and in bytes."""

from collections import deque
from collections.abc import Callable

MAX_UNREAD_MESSAGES = 4096
MAX_UNREAD_BYTES = 64 * 1024 * 1024
"""Of one client, beside the few messages that its socket takes; a single larger one may wait."""
MIN_RETRY_S, MAX_RETRY_S = 0.001, 1.0
"""Between two attempts to send to a client whose socket takes nothing."""


class Backlog:
    """Messages in order, for a client whose socket takes no more at the moment.

    Attributes:
        retry_s: seconds until the next attempt; it doubles while the client reads nothing.
    """

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._num_bytes = 0
        self.retry_s = MIN_RETRY_S

    def __bool__(self) -> bool:
        return bool(self._messages)

    def add(self, message: bytes) -> bool:
        """Append a message. Return False, and leave it out, where too much is unread."""
        num_bytes = self._num_bytes + len(message)
        if len(self._messages) >= MAX_UNREAD_MESSAGES or (
            self._messages and num_bytes > MAX_UNREAD_BYTES
        ):
            return False
        self._messages.append(message)
        self._num_bytes = num_bytes
        return True

    def send(self, send: Callable[[bytes], bool]) -> None:
        """Send messages until `send` returns False. Whatever it raises passes through."""
        num_before = len(self._messages)
        while self._messages and send(self._messages[0]):
            self._num_bytes -= len(self._messages.popleft())
        has_progress = len(self._messages) < num_before
        self.retry_s = MIN_RETRY_S if has_progress else min(2 * self.retry_s, MAX_RETRY_S)
