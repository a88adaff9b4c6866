"""The info of the ring, as the gateway's endpoints ask for it: one question for many callers."""

import asyncio
import time
from typing import Any

from quadriga.client.async_client import AsyncClient

INFO_TIMEOUT_S = 2.0


class RingInfo:
    """Asks the ring for its gauges, counters and constants, and keeps the last answer.

    Args:
        ring: the client of the ring.
    """

    def __init__(self, ring: AsyncClient) -> None:
        self._ring = ring
        self._static: dict[str, Any] = {}
        self._task: asyncio.Task[dict[str, Any]] | None = None
        self._asked_at = 0.0

    async def static(self) -> dict[str, Any]:
        """Return an info whose constants are valid, such as the context length.

        Raises:
            QuadrigaError: as `current`.
        """
        if not self._static.get("ready"):
            self._static = await self.current()
        return self._static

    async def current(self, max_age_s: float = 0.0) -> dict[str, Any]:
        """Return an info that is at most `max_age_s` old. Concurrent callers share one question.

        An answer that does not say "ready" is never used again.

        Raises:
            QuadrigaError: the ring has failed, or does not answer in INFO_TIMEOUT_S.
        """
        now = time.monotonic()
        task = self._task
        if task is None or (
            task.done() and (now - self._asked_at > max_age_s or not _says_ready(task))
        ):
            self._asked_at = now
            task = self._task = asyncio.create_task(self._ring.info(INFO_TIMEOUT_S))
            task.add_done_callback(_retrieve_exception)
        return await asyncio.shield(task)


def _says_ready(task: "asyncio.Task[dict[str, Any]]") -> bool:
    return not task.cancelled() and task.exception() is None and bool(task.result()["ready"])


def _retrieve_exception(task: "asyncio.Task[dict[str, Any]]") -> None:
    """Keep asyncio from logging an exception that no caller waits for."""
    if not task.cancelled():
        task.exception()
