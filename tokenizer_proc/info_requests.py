"""Bound on the questions that travel the ring: an answer costs every process some work."""

import time
from collections import deque
from collections.abc import Callable

from quadriga.errors import QueueFull

MAX_OF_CLIENT = 32
MAX_OF_ALL = 256
"""Questions that were sent into the ring and are not answered."""
EXPIRY_S = 10.0
"""After which a question counts as lost: with a process that died."""
RETRY_AFTER_S = 1.0


class InfoRequests:
    """Count the GetInfo and FlushCache messages that are not answered, for each client."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent_at: dict[bytes, deque[float]] = {}

    def begin(self, client: bytes) -> None:
        """Count a question. Raises QueueFull where the client, or all of them, have too many."""
        self._expire(client)
        of_client = self._sent_at.get(client, ())
        num_all = sum(map(len, self._sent_at.values()))
        for count, limit, whose in (
            (len(of_client), MAX_OF_CLIENT, "of this client "),
            (num_all, MAX_OF_ALL, ""),
        ):
            if count >= limit:
                raise QueueFull(
                    f"{count} questions {whose}are not answered yet, the most that may be; wait for"
                    f" the answers, or try again in {RETRY_AFTER_S:g} s",
                    RETRY_AFTER_S,
                )
        self._sent_at.setdefault(client, deque()).append(self._clock())

    def end(self, client: bytes) -> None:
        """Take back the oldest question of a client: it is answered."""
        sent_at = self._sent_at.get(client)
        if sent_at:
            sent_at.popleft()
            if not sent_at:
                del self._sent_at[client]

    def forget(self, client: bytes) -> None:
        """Take back all questions of a client that is gone."""
        self._sent_at.pop(client, None)

    def _expire(self, client: bytes) -> None:
        expired_at = self._clock() - EXPIRY_S
        while (sent_at := self._sent_at.get(client)) and sent_at[0] <= expired_at:
            self.end(client)
