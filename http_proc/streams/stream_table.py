"""The resumable streams of a gateway: running ones, and ended ones that may still be read."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from http_proc.gateway import Gateway, without_prefix
from http_proc.protocol.errors import RETRY_AFTER_RESTART_S, RETRY_AFTER_S, ApiError
from http_proc.streams.event_log import EventLog
from http_proc.streams.stream_rows import StreamRow
from quadriga.clock import now
from quadriga.errors import QuadrigaError

# Of all streams: their events, and the bodies of their requests.
MAX_BYTES = 256 * 1024 * 1024
# Ids that are remembered, so that a late reader learns that its stream is over and not unknown.
MAX_EXPIRED_IDS = 4096

Answer = Callable[["ResumableStream"], Awaitable[object]]


@dataclass(slots=True, eq=False)
class ResumableStream:
    """A stream that does not end with its connection.

    Attributes:
        row: its request.
        task: renders the events.
        num_readers: connections that read it.
        timer: drops it.
    """

    row: StreamRow
    log: EventLog = field(default_factory=EventLog)
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
        return self.log.headers is None and self.log.error is not None

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
        self._rows = gateway.stream_rows
        self._streams: dict[str, ResumableStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Ended streams without a reader: the first ones make room for others.
        self._idle: dict[str, ResumableStream] = {}
        self._expired: OrderedDict[str, None] = OrderedDict()
        self.num_resumed = self.num_expired = 0
        self._is_interrupted = False

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_bytes(self) -> int:
        """Size of all streams."""
        return sum(stream.num_bytes for stream in self._streams.values())

    # --- find -------------------------------------------------------------------------------------

    def find(self, name: str) -> ResumableStream | None:
        """Return a stream by its id or the id of its answer."""
        return self._streams.get(name) or self._streams.get(without_prefix(name))

    def missing(self, name: str) -> ApiError:
        """Return the error for a stream that is not there."""
        if name in self._expired or without_prefix(name) in self._expired:
            return ApiError(
                404,
                f"stream {name} has expired: a resumable stream is kept for"
                f" {self.window_s:g} s after its end or its last reader (--resume-window), or"
                " until another one needs its room",
                code="stream_expired",
            )
        return ApiError(
            404,
            f"there is no stream {name}: only streams with resumable: true can be resumed, by the"
            " X-Request-Id or the id of their answer",
            code="stream_not_found",
        )

    # --- start and end ----------------------------------------------------------------------------

    def start(self, row: StreamRow, answer: Answer) -> ResumableStream:
        """Start a stream, whose events `answer` writes to its log.

        Raises:
            ApiError: there is no room for another stream.
        """
        self._make_room()
        stream = self._streams[row.id] = ResumableStream(row)
        self._expired.pop(row.id, None)
        task = stream.task = asyncio.get_running_loop().create_task(self._run(stream, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._on_change(stream)
        return stream

    async def _run(self, stream: ResumableStream, answer: Answer) -> None:
        try:
            stream.log.hold(self._rows.add(stream.row))
            await answer(stream)
        except Exception as error:
            if not isinstance(error, ApiError | QuadrigaError):
                logging.error("stream %s failed", stream.id, exc_info=error)
            stream.log.end(error)
            if stream.has_failed and stream.num_readers:
                self.forget(stream)  # its client gets the error now, and may try again
        finally:
            stream.log.end(_deleted(stream.id))
            if stream.id in self._streams and not self._is_interrupted:
                self._rows.end(stream.id, now())
            self._on_change(stream)

    def _make_room(self) -> None:
        while self._is_full and self._idle:
            self.drop(next(iter(self._idle.values())))
        if self._is_full:
            raise ApiError(
                503,
                f"{len(self)} resumable streams with {self.num_bytes} bytes are kept, and at most"
                f" {self._max_streams} (--max-resumable-streams) or {MAX_BYTES} bytes at one time;"
                " try again, or leave out resumable",
                "server_error",
                code="too_many_streams",
                retry_after=RETRY_AFTER_S,
            )

    @property
    def _is_full(self) -> bool:
        return len(self) >= self._max_streams or self.num_bytes >= MAX_BYTES

    def forget(self, stream: ResumableStream) -> bool:
        """Keep a stream no more; what runs of it goes on. Return whether it was kept."""
        if self._streams.get(stream.id) is not stream:
            return False
        del self._streams[stream.id]
        self._idle.pop(stream.id, None)
        if stream.timer is not None:
            stream.timer.cancel()
        self._rows.remove(stream.id)
        return True

    def drop(self, stream: ResumableStream) -> None:
        """Forget a stream but its id, and end its request if it runs."""
        if self.forget(stream):
            self.note_expired(stream.id)
            stream.cancel()

    def note_expired(self, stream_id: str) -> None:
        """Remember the id of a stream that was dropped."""
        self._expired[stream_id] = None
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
        if self._streams.get(stream.id) is not stream:
            return
        if stream.timer is not None:
            stream.timer.cancel()
            stream.timer = None
        self._idle.pop(stream.id, None)
        if stream.num_readers or self._is_interrupted:
            return
        loop = asyncio.get_running_loop()
        stream.timer = loop.call_later(self.window_s, self._expire, stream)
        if stream.log.is_ended:
            self._idle[stream.id] = stream

    def _expire(self, stream: ResumableStream) -> None:
        self.num_expired += not stream.log.is_ended
        self.drop(stream)


STREAMS = web.AppKey("streams", StreamTable)


def check_owner(row: StreamRow, owner: str) -> None:
    """Raise a 403 for a stream of another owner, as Caller.owner."""
    if row.owner != owner:
        raise ApiError(
            403,
            f"stream {row.id} belongs to another API key: use the key that started it",
            "permission_error",
            code="not_your_stream",
        )


def _deleted(stream_id: str) -> ApiError:
    return ApiError(404, f"stream {stream_id} was deleted", code="stream_expired")
