"""LineGate: how many lines of batches run at a time, beside everything else.

While no request of others is open, lines run up to --batch-concurrency. Beside others only
--batch-concurrency-beside run, and none is added while a request waits or the running batch is
full. Batches take turns.
"""

import asyncio
import time

from http_proc.gateway import Gateway
from quadriga.errors import QuadrigaError

SAMPLE_INTERVAL_S = 0.25


class LineGate:
    """Admission of lines.

    Attributes:
        max_alone: --batch-concurrency.
        num_running: lines that are admitted and have not been released.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.max_alone = gateway.args.batch_concurrency
        limits = gateway.config.scheduler
        self._max_beside = limits.batch_concurrency_beside
        self._max_batch_size = limits.max_batch_size
        self._turn = asyncio.Lock()  # its waiters are served in order
        self._released = asyncio.Event()
        self._sampled_at = 0.0
        self._is_full = self._has_ring_clients = True
        self._num_waiting = 0
        self.num_running = 0

    async def acquire(self) -> None:
        """Wait until a line may run."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            while not await self._has_room():
                self._released.clear()
                # Before Python 3.12, asyncio.wait_for drops a cancellation that comes with a
                # release.
                timer = loop.call_later(SAMPLE_INTERVAL_S, self._released.set)
                try:
                    await self._released.wait()
                finally:
                    timer.cancel()
            self.num_running += 1

    def release(self) -> None:
        """Note the end of a line."""
        self.num_running -= 1
        self._released.set()

    async def _has_room(self) -> bool:
        if self.num_running >= self.max_alone:
            return False
        if time.monotonic() - self._sampled_at >= SAMPLE_INTERVAL_S:
            try:
                await self._sample()
            except QuadrigaError:  # a process is being replaced
                return False
        if self._is_full:
            return False
        if not self._has_ring_clients and self._gateway.num_open <= self.num_running:
            return True
        return not self._num_waiting and self.num_running < self._max_beside

    async def _sample(self) -> None:
        """Ask the ring for its load."""
        before = self._gateway.num_choices
        info = await self._gateway.ring_info.current()
        self._sampled_at = time.monotonic()
        num_by_http = max(before, self._gateway.num_choices)
        self._is_full = not info["ready"] or info["running"] >= self._max_batch_size
        self._num_waiting = info["waiting"]
        self._has_ring_clients = info["running"] + info["waiting"] > num_by_http
