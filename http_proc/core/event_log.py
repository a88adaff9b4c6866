"""The events of one stream, numbered from 1, for readers that come and go."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from http_proc.core.streaming import END_OF_EVENT, EventSink, Opening

# What is kept is sent in such pieces, so that a reader that does not read holds one of them.
PIECE_BYTES = 64 * 1024


class EventLog:
    """An EventSink that keeps its events in memory: all of them, unless the first are dropped.

    Args:
        on_growth: called after events were appended.
        has_ids: each event gets its number as its id.

    Attributes:
        opening: what comes before the events; None until it is known.
        events: those that are kept.
        num_bytes: their size.
        num_dropped: number of the first events, which are kept no more.
        is_ended: no event follows.
        error: why the stream has ended before its last event; None where it has not.
        last_comment: the last comment.
        num_comments: number of comments so far.
    """

    def __init__(self, on_growth: Callable[[], None] = lambda: None, has_ids: bool = True) -> None:
        self._on_growth, self._has_ids = on_growth, has_ids
        self.num_dropped = 0
        self.opening: Opening | None = None
        self.num_bytes = 0
        self.is_ended = False
        self.error: Exception | None = None
        self.last_comment = b""
        self.num_comments = 0
        self.events: list[bytes] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._held_until: Future[None] | None = None

    def __len__(self) -> int:
        return self.num_dropped + len(self.events)

    def hold(self, until: "Future[None]") -> None:
        """Show no event that follows to readers before a write to the disk has ended."""
        self._held_until = until

    async def _held(self) -> None:
        while (write := self._held_until) is not None:
            await asyncio.shield(asyncio.wrap_future(write))
            if self._held_until is write:
                self._held_until = None

    async def open(self, opening: Opening) -> None:
        """Take what comes before the events."""
        await self._held()
        self.opening = opening
        self._wake()

    async def write(self, data: bytes | memoryview) -> None:
        """Append whole events; none after the end."""
        if self._held_until is not None:
            await self._held()
        self.append(bytes(data))

    def append(self, data: bytes) -> None:
        """Append whole events at once; none after the end."""
        if self.is_ended:
            return
        for event in data.removesuffix(END_OF_EVENT).split(END_OF_EVENT):
            begin = b"id: %d\n" % (len(self) + 1) if self._has_ids else b""
            kept = begin + event + END_OF_EVENT
            self.events.append(kept)
            self.num_bytes += len(kept)
        self._on_growth()
        self._wake()

    async def comment(self, line: bytes) -> None:
        """Show a comment to the readers that have read every event; it is not kept."""
        self.last_comment = line
        self.num_comments += 1
        self._wake()

    async def close(self) -> None:
        """Take the end."""
        self.end()

    def end(self, error: Exception | None = None) -> None:
        """Take the end, unless it is known; `error`: why events are missing."""
        if not self.is_ended:
            self.is_ended, self.error = True, error
            self._wake()

    async def opened(self) -> Opening:
        """Wait for what comes before the events. Raise the error of a stream that ends before."""
        while self.opening is None:
            if self.error is not None:
                raise self.error
            await self.change()
        return self.opening

    def drop_first(self, num_bytes: int) -> None:
        """Keep the first events no more, of about this size, but always the last event."""
        count = dropped = 0
        while dropped < num_bytes and count < len(self.events) - 1:
            dropped += len(self.events[count])
            count += 1
        del self.events[:count]
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
        while last < len(self.events) and size < PIECE_BYTES:
            size += len(self.events[last])
            last += 1
        return self.events[first:last]

    async def change(self) -> None:
        """Wait until anything comes: the begin, events, a comment, the end."""
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


async def copy_events(log: EventLog, sink: EventSink, num_read: int) -> None:
    """Send the events after the first `num_read`, and those that follow, to the end.

    Raises:
        ConnectionResetError: the end is missing, or the reader is too slow.
    """
    num_comments = log.num_comments
    while True:
        if len(log) > num_read:
            try:
                events = log.since(num_read)
            except LookupError as error:
                raise ConnectionResetError(f"the reader is too slow: {error}") from None
            num_read += len(events)
            for piece in pieces_of(events):
                await sink.write(piece)
        elif log.error is not None:
            raise ConnectionResetError("the stream has ended before its last event")
        elif log.is_ended:
            return
        elif num_comments != log.num_comments:
            num_comments = log.num_comments
            await sink.comment(log.last_comment)
        else:
            await log.change()


def pieces_of(events: Sequence[bytes]) -> Iterator[bytes | memoryview]:
    """Yield events in pieces of at most PIECE_BYTES, without a copy of a long one."""
    data = events[0] if len(events) == 1 else b"".join(events)
    if len(data) <= PIECE_BYTES:
        yield data
        return
    view = memoryview(data)
    for first in range(0, len(view), PIECE_BYTES):
        yield view[first : first + PIECE_BYTES]
