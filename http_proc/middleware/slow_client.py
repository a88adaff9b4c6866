"""Disconnect clients that read next to nothing of their answer."""

import asyncio
import logging

from aiohttp import web

from http_proc.observe.request_metrics import RequestMetrics

CHECK_INTERVAL_S = 30.0
# A check this late means that the gateway itself was suspended, so the client is not to blame.
MAX_CHECK_DELAY_S = CHECK_INTERVAL_S / 4
MIN_BYTES_PER_INTERVAL = 1024


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

    def __enter__(self) -> None:
        self._schedule()

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

    def _disconnect(self) -> None:
        assert self._transport is not None
        logging.warning(
            "disconnected an HTTP client that read less than %d bytes in %g s",
            MIN_BYTES_PER_INTERVAL,
            CHECK_INTERVAL_S,
        )
        self._metrics.num_slow_readers += 1
        self._transport.abort()
