"""Disconnect clients that read next to nothing of their answer, and those that hold too much."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from aiohttp import web

from http_proc.observe.request_metrics import RequestMetrics
from http_proc.shares import Shares

CHECK_INTERVAL_S = 30.0
# A check this late means that the gateway itself was suspended, so the client is not to blame.
MAX_CHECK_DELAY_S = CHECK_INTERVAL_S / 4
MIN_BYTES_PER_INTERVAL = 1024


# Of whole answers that wait for their clients, and the least of which one is counted.
MAX_UNREAD_BYTES = 256 * 1024 * 1024
MIN_COUNTED_BYTES = 64 * 1024
# A client has so much time before it counts as slow, unless all have had less.
MIN_READ_S = 0.5


class SlowClientGuard:
    """Watch the connection of one request while its answer is sent.

    Every CHECK_INTERVAL_S in which data was waiting, the client must read at least
    MIN_BYTES_PER_INTERVAL of it. Data waits in the transport's write buffer: the guard makes
    aiohttp's writes wait until that buffer is empty, so that an answer ends when it was sent.
    """

    def __init__(self, request: web.Request, metrics: RequestMetrics) -> None:
        self._writer = request.writer
        self._transport = request.transport
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._last_waiting = 0
        self._last_sent = 0
        if self._transport is not None:
            # Not 0: an idle TLS transport would block its writer as well.
            self._transport.set_write_buffer_limits(high=1)

    def __enter__(self) -> "SlowClientGuard":
        self._schedule()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _schedule(self) -> None:
        self._due_at = self._loop.time() + CHECK_INTERVAL_S
        self._timer = self._loop.call_at(self._due_at, self._check)

    def _check(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        waiting, sent = self.progress()
        is_late = self._loop.time() > self._due_at + MAX_CHECK_DELAY_S
        is_slow = sent - self._last_sent < MIN_BYTES_PER_INTERVAL
        if self._last_waiting and waiting and is_slow and not is_late:
            self._disconnect()
            return
        self._last_waiting, self._last_sent = waiting, sent
        self._schedule()

    def progress(self) -> tuple[int, int]:
        """Return the number of bytes that wait for the client, and of bytes sent to it."""
        assert self._transport is not None
        waiting = self._transport.get_write_buffer_size()
        return waiting, self._writer.output_size - waiting

    @property
    def num_sent(self) -> int:
        """Number of bytes that were sent."""
        return 0 if self._transport is None else self.progress()[1]

    def disconnect(self) -> None:
        """Close the connection of a client whose answer holds memory that others need."""
        if self._transport is not None:
            logging.warning(
                "disconnected the slowest reader: answers that wait for HTTP clients have at most"
                " %d bytes",
                MAX_UNREAD_BYTES,
            )
            self._metrics.num_slow_readers += 1
            self._transport.abort()

    def _disconnect(self) -> None:
        assert self._transport is not None
        logging.warning(
            "disconnected an HTTP client that read less than %d bytes in %g s",
            MIN_BYTES_PER_INTERVAL,
            CHECK_INTERVAL_S,
        )
        self._metrics.num_slow_readers += 1
        self._transport.abort()


class _Sending(NamedTuple):
    """A whole answer that is being sent. began_at: time of the event loop."""

    owner: str
    size: int
    began_at: float


class UnreadAnswers:
    """Bound the bytes of whole answers that wait until their clients have read them.

    Where they need more, the tenant that has the most for its weight loses the connection whose
    client reads most slowly.

    Args:
        shares: the tenants.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._answers: dict[SlowClientGuard, _Sending] = {}

    @property
    def num_bytes(self) -> int:
        """Size of all answers that wait."""
        return sum(answer.size for answer in self._answers.values())

    @contextmanager
    def sending(self, guard: SlowClientGuard, owner: str, size: int) -> Iterator[None]:
        """Count an answer of an owner in a `with` block, in which it is sent."""
        if size < MIN_COUNTED_BYTES:
            yield
            return
        self._answers[guard] = _Sending(owner, size, asyncio.get_running_loop().time())
        self._make_room()
        try:
            yield
        finally:
            self._answers.pop(guard, None)

    def _make_room(self) -> None:
        while len(self._answers) > 1 and self.num_bytes > MAX_UNREAD_BYTES:
            sizes: Counter[str] = Counter()
            for answer in self._answers.values():
                sizes[self._shares.party(answer.owner)] += answer.size
            slowest = self._slowest_of(self._shares.largest(sizes))
            del self._answers[slowest]
            slowest.disconnect()

    def _slowest_of(self, party: str) -> SlowClientGuard:
        now = asyncio.get_running_loop().time()

        def order(guard: SlowClientGuard) -> tuple[bool, float, float]:
            began_at = self._answers[guard].began_at
            age_s = now - began_at
            is_new = age_s < MIN_READ_S
            return is_new, 0.0 if is_new else guard.num_sent / age_s, began_at

        guards = self._answers.items()
        of_party = (guard for guard, one in guards if self._shares.party(one.owner) == party)
        return min(of_party, key=order)
