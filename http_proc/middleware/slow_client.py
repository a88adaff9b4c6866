"""Watches over what a client takes of its answer: one that takes next to nothing is cut off."""

import asyncio
import logging
from types import TracebackType

from aiohttp import web

from http_proc.observe.request_metrics import RequestMetrics

STALL_SECONDS = 30.0
LATE_SECONDS = STALL_SECONDS / 4
"""A look that comes so much too late finds what happened while this process did not run."""
MIN_BYTES_PER_INTERVAL = 1024
"""A client that takes less than this in STALL_SECONDS of what waits for it is cut off."""


class SlowClientGuard:
    """Around the serving of one request; what waits for the client is in the connection's buffer.

    Within it a write of aiohttp's that waits, waits until the buffer is empty, so that an answer
    is not over before it has gone.
    """

    def __init__(self, request: web.Request, metrics: RequestMetrics) -> None:
        self._writer = request.writer
        self._transport = request.transport
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._waited = 0
        self._sent = 0
        if self._transport is not None:
            # Not 0: a TLS transport that has nothing to send would hold up its writer, too.
            self._transport.set_write_buffer_limits(high=1)

    def __enter__(self) -> None:
        self._look_later()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        waits, sent = self.progress()
        is_late = self._loop.time() > self._due_at + LATE_SECONDS
        if self._waited and waits and sent - self._sent < MIN_BYTES_PER_INTERVAL and not is_late:
            self._cut_off()
            return
        self._waited, self._sent = waits, sent
        self._look_later()

    def _look_later(self) -> None:
        self._due_at = self._loop.time() + STALL_SECONDS
        self._timer = self._loop.call_at(self._due_at, self._look)

    def progress(self) -> tuple[int, int]:
        """Bytes that wait for the client, and those that have gone to it."""
        assert self._transport is not None
        waits = self._transport.get_write_buffer_size()
        return waits, self._writer.output_size - waits

    def _cut_off(self) -> None:
        assert self._transport is not None
        logging.warning(
            "an HTTP client took less than %d bytes in %g s: cut off",
            MIN_BYTES_PER_INTERVAL,
            STALL_SECONDS,
        )
        self._metrics.slow_readers += 1
        self._transport.abort()
