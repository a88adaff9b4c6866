"""The resumable streams of a gateway: running ones, and ended ones that may still be read.

Each has an EventLog, for readers that come and go.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from http_proc.core.errors import RETRY_AFTER_RESTART_S, RETRY_AFTER_S, ApiError
from http_proc.core.event_log import EventLog
from http_proc.core.gateway import Gateway, Key, without_prefix
from http_proc.core.shares import holding
from http_proc.web.stream_rows import StreamName, StreamRow, StreamRows
from quadriga.clock import now
from quadriga.errors import QuadrigaError

# Of all streams: their events, and the bodies of their requests.
MAX_BYTES = 256 * 1024 * 1024
# More than is needed, so that not every further event drops some.
DROPPED_AT_ONCE_BYTES = 256 * 1024
# Ids that are remembered, so that a late reader learns that its stream is over and not unknown.
MAX_EXPIRED_IDS = 4096

STREAM_ROWS = Key[StreamRows]("stream_rows")

Answer = Callable[["ResumableStream"], Awaitable[object]]


@dataclass(slots=True, eq=False)
class ResumableStream:
    """A stream that does not end with its connection.

    Attributes:
        row: its request.
        task: renders the events.
        num_readers: connections that read it.
        timer: drops it.
        counted_bytes: what the table has counted of its size.
    """

    row: StreamRow
    log: EventLog = field(default_factory=EventLog)
    counted_bytes: int = 0
    task: "asyncio.Task[None] | None" = None
    num_readers: int = 0
    timer: asyncio.TimerHandle | None = None

    @property
    def id(self) -> str:
        """The X-Request-Id of its request."""
        return self.row.id

    @property
    def num_bytes(self) -> int:
        """Size of its events, and of its row."""
        return self.log.num_bytes + len(self.row.body) + len(self.row.decisions)

    @property
    def has_failed(self) -> bool:
        """Whether it has ended before its begin."""
        return self.log.opening is None and self.log.error is not None

    def cancel(self) -> None:
        """End its request, if it runs."""
        if self.task is not None:
            self.task.cancel()


class StreamTable:
    """Start, find and drop streams.

    Attributes:
        num_resumed: number of times that a stream was read again.
        num_expired: number of streams that were dropped before their end for lack of a reader.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.window_s = gateway.args.resume_window
        self._max_streams = gateway.args.max_resumable_streams
        self._rows = gateway[STREAM_ROWS]
        self._shares = gateway.shares
        self._streams: dict[StreamName, ResumableStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Ended streams without a reader: the first ones make room for others.
        self._idle: dict[StreamName, ResumableStream] = {}
        self._expired: OrderedDict[StreamName, None] = OrderedDict()
        self._bytes_of: Counter[str] = Counter()
        self.num_resumed = self.num_expired = 0
        self._is_interrupted = False

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[StreamName]:
        return iter(self._streams)

    @property
    def num_bytes(self) -> int:
        """Size of all streams."""
        return self._bytes_of.total()

    # --- find -------------------------------------------------------------------------------------

    def get(self, name: StreamName) -> ResumableStream | None:
        """Return a stream."""
        return self._streams.get(name)

    def missing(self, name: StreamName) -> ApiError:
        """Return the error for a stream that is not there."""
        if name in self._expired or name._replace(id=without_prefix(name.id)) in self._expired:
            return ApiError(
                404,
                f"stream {name.id} has expired: a resumable stream is kept for"
                f" {self.window_s:g} s after its end or its last reader (--resume-window), or"
                " until another one needs its room",
                code="stream_expired",
            )
        return ApiError(
            404,
            f"there is no resumable stream {name.id}: streams with resumable: true can be resumed,"
            " by the X-Request-Id or the id of their answer",
            code="stream_not_found",
        )

    # --- start and end ----------------------------------------------------------------------------

    def start(self, row: StreamRow, answer: Answer, is_resent: bool = False) -> ResumableStream:
        """Start a stream, whose events `answer` writes to its log.

        Args:
            row: its request.
            answer: writes its events.
            is_resent: it has been accepted by an earlier gateway.

        Raises:
            ApiError: there is no room for another stream.
        """
        self._make_room(row, is_resent)
        stream = ResumableStream(row)
        stream.log = EventLog(lambda: self._on_growth(stream))
        self._streams[row.name] = stream
        self._expired.pop(row.name, None)
        self._on_growth(stream)
        task = stream.task = asyncio.get_running_loop().create_task(self._run(stream, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._on_change(stream)
        return stream

    async def _run(self, stream: ResumableStream, answer: Answer) -> None:
        try:
            stream.log.hold(self._rows.add(stream.row))
            with holding():
                await answer(stream)
        except Exception as error:
            if not isinstance(error, ApiError | QuadrigaError):
                logging.error("stream %s failed", stream.id, exc_info=error)
            stream.log.end(error)
            if stream.has_failed and stream.num_readers:
                self.forget(stream)  # its client gets the error now, and may try again
        finally:
            stream.log.end(_deleted(stream.id))
            if self._streams.get(stream.row.name) is stream and not self._is_interrupted:
                self._rows.end(stream.row.name, now())
            self._on_change(stream)

    def _make_room(self, row: StreamRow, is_resent: bool) -> None:
        """Drop ended streams that no connection reads, for a new one. Raise ApiError without room.

        Running streams are not dropped for others.
        """
        owner = row.owner
        counts, bodies = Counter[str](), Counter[str]()
        for name, stream in self._streams.items():
            if name not in self._idle:
                counts[name.owner] += 1
                bodies[name.owner] += len(stream.row.body)
        has_room = is_resent or (
            self._shares.has_room(owner, counts, self._max_streams)
            and self._shares.has_room(owner, bodies, MAX_BYTES, len(row.body))
        )
        if not has_room:
            raise ApiError(
                503,
                f"{counts.total()} resumable streams are running or being read, {counts[owner]} of"
                f" them yours, with requests of {bodies.total()} bytes, and this server keeps"
                f" {self._max_streams} with {MAX_BYTES} bytes, with a share for each tenant; try"
                " again, or leave out resumable",
                "server_error",
                code="too_many_streams",
                retry_after=RETRY_AFTER_S,
            )
        while len(self) >= self._max_streams and self._idle:
            of_each = Counter([owner, *(name.owner for name in self._streams)])
            self._drop_idle(self._shares.by_party(of_each))

    def _on_growth(self, stream: ResumableStream) -> None:
        """Count what a stream has grown by, and make room for it.

        Ended streams of the tenant that has the most go first, then the first events of its longest
        stream: readers that keep up with it miss nothing.
        """
        if self._streams.get(stream.row.name) is not stream:
            return
        self._count(stream, stream.num_bytes)
        while self.num_bytes > MAX_BYTES:
            parties = self._shares.by_party(self._bytes_of)
            party = self._shares.largest(parties)
            if self._drop_idle({party: parties[party]}):
                continue
            longest = max(
                (one for one in self._streams.values() if self._party(one) == party),
                key=lambda one: one.log.num_bytes,
            )
            num_dropped = longest.log.num_dropped
            longest.log.drop_first(self.num_bytes - MAX_BYTES + DROPPED_AT_ONCE_BYTES)
            if longest.log.num_dropped == num_dropped:
                return  # it has nothing but its last event
            self._count(longest, longest.num_bytes)

    def _count(self, stream: ResumableStream, num_bytes: int) -> None:
        self._bytes_of[stream.row.owner] += num_bytes - stream.counted_bytes
        stream.counted_bytes = num_bytes

    def _party(self, stream: ResumableStream) -> str:
        return self._shares.party(stream.row.owner)

    def _drop_idle(self, parties: Mapping[str, int]) -> bool:
        """Drop the stream that ended first, of the party that has the most of those with any.

        Args:
            parties: what each has.

        Returns:
            Whether there was one.
        """
        idle = {self._party(stream) for stream in self._idle.values()} & parties.keys()
        if not idle:
            return False
        largest = self._shares.largest({party: parties[party] for party in idle})
        self.drop(next(one for one in self._idle.values() if self._party(one) == largest))
        return True

    def forget(self, stream: ResumableStream) -> bool:
        """Keep a stream no more; what runs of it goes on. Return whether it was kept."""
        name = stream.row.name
        if self._streams.get(name) is not stream:
            return False
        self._count(stream, 0)
        del self._streams[name]
        self._idle.pop(name, None)
        if stream.timer is not None:
            stream.timer.cancel()
        self._rows.remove(name)
        return True

    def drop(self, stream: ResumableStream) -> None:
        """Forget a stream but its id, and end its request if it runs."""
        if self.forget(stream):
            self.note_expired(stream.row.name)
            stream.cancel()

    def note_expired(self, name: StreamName) -> None:
        """Remember the name of a stream that was dropped."""
        self._expired[name] = None
        while len(self._expired) > MAX_EXPIRED_IDS:
            self._expired.popitem(last=False)

    def interrupt(self) -> None:
        """Break every connection that reads a stream: another server goes on with the streams."""
        self._is_interrupted = True
        for stream in self._streams.values():
            stream.log.end(
                ApiError(
                    503,
                    "the server has ended, and a server that resumes its journal goes on with this"
                    " stream; try again",
                    "server_error",
                    code="server_failed",
                    retry_after=RETRY_AFTER_RESTART_S,
                )
            )

    async def stop(self) -> None:
        """End what runs. The rows stay."""
        self._is_interrupted = True
        for stream in self._streams.values():
            if stream.timer is not None:
                stream.timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- readers ----------------------------------------------------------------------------------

    @contextmanager
    def reading(self, stream: ResumableStream) -> Iterator[EventLog]:
        """Read a stream in a `with` block; it is kept meanwhile."""
        stream.num_readers += 1
        self._on_change(stream)
        try:
            yield stream.log
        finally:
            stream.num_readers -= 1
            self._on_change(stream)

    def _on_change(self, stream: ResumableStream) -> None:
        """Let the time of a stream without readers run from now on, and stop that of others."""
        if self._streams.get(stream.row.name) is not stream:
            return
        if stream.timer is not None:
            stream.timer.cancel()
            stream.timer = None
        self._idle.pop(stream.row.name, None)
        if stream.num_readers or self._is_interrupted:
            return
        loop = asyncio.get_running_loop()
        stream.timer = loop.call_later(self.window_s, self._expire, stream)
        if stream.log.is_ended:
            self._idle[stream.row.name] = stream

    def _expire(self, stream: ResumableStream) -> None:
        self.num_expired += not stream.log.is_ended
        self.drop(stream)


STREAMS = Key[StreamTable]("streams")


def _deleted(stream_id: str) -> ApiError:
    return ApiError(404, f"stream {stream_id} was deleted", code="stream_expired")
