"""The events of one resumable stream, numbered from 1, for readers that come and go."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from aiohttp import web

from http_proc.event_sink import PIECE_BYTES
from http_proc.responses import END_OF_EVENT


class EventLog:
    """An EventSink that keeps its events in memory: all of them, unless the first are dropped.

    Args:
        on_growth: called after events were appended.

    Attributes:
        headers: of the response; None until they are known.
        num_bytes: size of the events that are kept.
        num_dropped: number of the first events, which are kept no more.
        is_ended: no event follows.
        error: why the stream has ended before its last event; None where it has not.
        last_comment: the last comment.
        num_comments: number of comments so far.
    """

    def __init__(self, on_growth: Callable[[], None] = lambda: None) -> None:
        self._on_growth = on_growth
        self.num_dropped = 0
        self.headers: Mapping[str, str] | None = None
        self.num_bytes = 0
        self.is_ended = False
        self.error: Exception | None = None
        self.last_comment = b""
        self.num_comments = 0
        self._events: list[bytes] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._held_until: Future[None] | None = None

    def __len__(self) -> int:
        return self.num_dropped + len(self._events)

    # --- the writer -------------------------------------------------------------------------------

    def hold(self, until: "Future[None]") -> None:
        """Show no event that follows to readers before a write to the disk has ended."""
        self._held_until = until

    async def _held(self) -> None:
        while (write := self._held_until) is not None:
            await asyncio.shield(asyncio.wrap_future(write))
            if self._held_until is write:
                self._held_until = None

    async def open(self, headers: Mapping[str, str]) -> None:
        """Take the headers."""
        await self._held()
        self.headers = headers
        self._wake()

    async def write(self, data: bytes) -> None:
        """Append whole events, each of which gets its number as its id; none after the end."""
        if self._held_until is not None:
            await self._held()
        if self.is_ended:
            return
        for event in data.removesuffix(END_OF_EVENT).split(END_OF_EVENT):
            numbered = b"id: %d\n%b\n\n" % (len(self) + 1, event)
            self._events.append(numbered)
            self.num_bytes += len(numbered)
        self._on_growth()
        self._wake()

    async def comment(self, line: bytes) -> None:
        """Show a comment to the readers that have read every event; it is not kept."""
        self.last_comment = line
        self.num_comments += 1
        self._wake()

    async def close(self) -> web.StreamResponse:
        """Take the end. The response is not sent."""
        self.end()
        return web.Response()

    def end(self, error: Exception | None = None) -> None:
        """Take the end, unless it is known; `error`: why events are missing."""
        if not self.is_ended:
            self.is_ended, self.error = True, error
            self._wake()

    # --- readers ----------------------------------------------------------------------------------

    async def opened(self) -> Mapping[str, str]:
        """Wait for the headers. Raise the error of a stream that ends before."""
        while self.headers is None:
            if self.error is not None:
                raise self.error
            await self.change()
        return self.headers

    def drop_first(self, num_bytes: int) -> None:
        """Keep the first events no more, of about this size, but always the last event."""
        count = dropped = 0
        while dropped < num_bytes and count < len(self._events) - 1:
            dropped += len(self._events[count])
            count += 1
        del self._events[:count]
        self.num_dropped += count
        self.num_bytes -= dropped

    def since(self, num_read: int) -> list[bytes]:
        """Return events after the first `num_read`: at least one, and about PIECE_BYTES at most.

        They are those of the log, not copies.

        Raises:
            LookupError: the next event was dropped.
        """
        first = last = num_read - self.num_dropped
        if first < 0:
            raise LookupError(f"the first {self.num_dropped} events are kept no more")
        size = 0
        while last < len(self._events) and size < PIECE_BYTES:
            size += len(self._events[last])
            last += 1
        return self._events[first:last]

    async def change(self) -> None:
        """Wait until anything comes: headers, events, a comment, the end."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
