"""Resumable streams: the running ones, and ended ones that may still be read.

Each has an EventLog, for readers that come and go. Streams of a gateway that has died go on if they
ran, and can be read if they had ended: a stream is started again with the body of its request. At
the end are the handlers: of requests that ask for such a stream, and of /v1/streams.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from http_proc.core import event_log, resumption, shares
from http_proc.core.answering import answer
from http_proc.core.call import Call
from http_proc.core.caller import Caller, current_caller
from http_proc.core.errors import RETRY_AFTER_RESTART_S, RETRY_AFTER_S, ApiError, invalid
from http_proc.core.gateway import Gateway, Key, without_prefix
from http_proc.core.served_model import ServedModel, wall_seconds
from http_proc.web.endpoint import STREAM, Endpoint
from http_proc.web.exchange import GATEWAY, ConnectionSink, json_response, receive_call, send_answer
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
        answer: the tokens of its answer so far.
        repeats_end: it had ended at an earlier gateway, and is made again to its end.
    """

    row: StreamRow
    log: event_log.EventLog = field(default_factory=event_log.EventLog)
    counted_bytes: int = 0
    task: "asyncio.Task[None] | None" = None
    num_readers: int = 0
    timer: asyncio.TimerHandle | None = None
    answer: resumption.AnswerTokens = field(default_factory=resumption.AnswerTokens)
    repeats_end: bool = False

    @property
    def id(self) -> str:
        """The X-Request-Id of its request."""
        return self.row.id

    @property
    def num_bytes(self) -> int:
        """Size of its events, of its row, and of its tokens."""
        row, log = self.row, self.log
        return log.num_bytes + len(row.body) + len(row.decisions) + self.answer.num_bytes

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
        stream.log = event_log.EventLog(lambda: self._on_growth(stream))
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
            with shares.holding():
                await answer(stream)
        except Exception as error:
            if not isinstance(error, ApiError | QuadrigaError):
                logging.error("stream %s failed", stream.id, exc_info=error)
            stream.log.end(error)
            if stream.has_failed and stream.num_readers:
                self.forget(stream)  # its client gets the error now, and may try again
        finally:
            gone = ApiError(404, f"stream {stream.id} was deleted", code="stream_expired")
            stream.log.end(gone)
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

    @contextmanager
    def reading(self, stream: ResumableStream) -> Iterator[event_log.EventLog]:
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


def answer_of(gateway: Gateway, call: Call, caller: Caller, is_resent: bool = False) -> Answer:
    """Return what writes the events of a call to a stream.

    Args:
        gateway: its state.
        call: its connection may be gone meanwhile.
        caller: who asks.
        is_resent: an earlier gateway has answered the call.
    """

    async def answer_to(stream: ResumableStream) -> None:
        row, keep_s = stream.row, gateway.args.resume_window
        decisions = msgspec.json.decode(row.decisions)

        def keep() -> None:
            row = stream.row = stream.row._replace(decisions=msgspec.json.encode(decisions))
            stream.log.hold(gateway[STREAM_ROWS].decide(row))

        call.resumption = resumption.Resumption(
            row.key, row.created, keep_s, is_resent, decisions, keep
        )
        stream.answer = call.resumption.answer
        model = gateway.served(row.model, call.record)
        if is_resent:  # a server that answers late must not end a stream that has begun
            await model.until_ready()
        await model.lasting_client.connect()
        await answer(gateway, call, caller, stream.log)

    return answer_to


class EarlierStreams:
    """The rows that an earlier gateway has left, until their streams are started again."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._table = gateway[STREAMS]
        self._rows: dict[StreamName, StreamRow] = {}
        self._timers: list[asyncio.TimerHandle] = []

    def open(self) -> None:
        """Read the rows, and start those streams again that had not ended, in their order."""
        for row in self._gateway[STREAM_ROWS].all():
            self._rows[row.name] = row
            ended_at = now() if row.ended_at is None else row.ended_at
            rest_s = ended_at + self._table.window_s - now()
            if self._gateway.models.find(row.model) is None or rest_s <= 0:
                self._expire(row.name)
            elif row.ended_at is not None:
                loop = asyncio.get_running_loop()
                self._timers.append(loop.call_later(rest_s, self._expire, row.name))
        running = [name for name, row in self._rows.items() if row.ended_at is None]
        for name in running:
            self._start(name)
        if running:
            logging.info("resumable streams of the gateway before: %d go on", len(running))

    def has(self, name: StreamName, path: str) -> bool:
        """Return whether there is a stream of this name and path, of this or an earlier gateway."""
        stream = self._table.get(name)
        row = self._rows.get(name) if stream is None else stream.row
        return row is not None and row.path == path

    def _expire(self, name: StreamName) -> None:
        if self._rows.pop(name, None) is not None:
            self._gateway[STREAM_ROWS].remove(name)
            self._table.note_expired(name)

    def find(self, name: StreamName) -> ResumableStream | None:
        """Return a stream of an owner by its id or that of its answer.

        Raises:
            ApiError: it is another owner's.
        """
        bare = name._replace(id=without_prefix(name.id))
        stream = self.named(name) or self.named(bare)
        ids = (name.id, bare.id)
        if stream is None and any(other.id in ids for other in [*self._rows, *self._table]):
            raise ApiError(
                403,
                f"stream {name.id} belongs to another API key: use the key that started it",
                code="not_your_stream",
            )
        return stream

    def named(self, name: StreamName) -> ResumableStream | None:
        """Return a stream of this or an earlier gateway."""
        if self._table.get(name) is None and name in self._rows:
            self._start(name)
        return self._table.get(name)

    def _start(self, name: StreamName) -> None:
        """Start a stream again."""
        row = self._rows[name]
        call = Call(row.path, row.body, row.id, model=row.model)
        caller = Caller(row.tenant, user=row.user, key_hash=row.key_hash)
        answer = answer_of(self._gateway, call, caller, is_resent=True)
        # Nothing of the request that asks for the stream is in the context of its task.
        begun = row._replace(ended_at=None)
        stream = Context().run(self._table.start, begun, answer, is_resent=True)
        stream.repeats_end = row.ended_at is not None
        del self._rows[name]

    def close(self) -> None:
        """Forget no more rows."""
        for timer in self._timers:
            timer.cancel()


EARLIER_STREAMS = Key[EarlierStreams]("earlier_streams")


@asynccontextmanager
async def stream_lifetime(gateway: Gateway) -> AsyncIterator[None]:
    """Keep the streams while the gateway runs."""
    table = gateway[STREAMS] = StreamTable(gateway)
    earlier = gateway[EARLIER_STREAMS] = EarlierStreams(gateway)
    earlier.open()
    yield
    earlier.close()
    await table.stop()


RESUMABLE_HEADER, STREAM_HEADER = "X-Resumable", "X-Stream-Id"
LAST_EVENT_HEADER, STARTING_AFTER = "Last-Event-ID", "starting_after"
FIELD = b'"resumable"'
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class _Fields(msgspec.Struct):
    """The fields of a body that say whether a stream is resumable."""

    stream: bool | None = None
    resumable: bool | None = None
    background: bool | None = None


async def answer_resumably(request: web.Request) -> web.StreamResponse:
    """Answer a call, by a resumable stream where the request asks for it."""
    is_asked = _header(request)
    call = await receive_call(request)
    if is_asked is None and FIELD not in call.body:
        return await send_answer(request, call)
    fields = _fields(call.body)
    if fields.background:  # its stream can be read again at its own path
        return await send_answer(request, call)
    if not (fields.resumable if is_asked is None else is_asked):
        return await send_answer(request, call)
    if not fields.stream:
        raise invalid(
            "resumable is true, and the answer is no stream: send stream: true as well", "resumable"
        )
    return await send_stream(request, call)


async def send_stream(request: web.Request, call: Call) -> web.StreamResponse:
    """Start a stream, or find that of the same request, and send it."""
    gateway, num_read = request.app[GATEWAY], 0
    table, caller = gateway[STREAMS], current_caller()
    stream = _of_same_call(gateway, call)
    if stream is None:
        model = gateway.models.of_body(call.body, call.request_id)
        row = _row(call, model or gateway.models.default)
        if model is not None:  # the name may be moved before the answer begins
            call.model = model.name
        stream = table.start(row, answer_of(gateway, call, caller))
    else:
        num_read = num_read_before(request)
        table.num_resumed += 1
    return await follow(request, table, stream, num_read)


def _of_same_call(gateway: Gateway, call: Call) -> ResumableStream | None:
    """Return the stream of the call that has the same id, and must be the same."""
    stream_id, table = call.request_id, gateway[STREAMS]
    stream = gateway[EARLIER_STREAMS].named(StreamName(current_caller().owner, stream_id))
    if stream is None:
        return None
    if stream.has_failed:
        table.forget(stream)
        return None
    if (stream.row.path, stream.row.body) != (call.path, call.body):
        raise ApiError(
            409,
            f"X-Request-Id {stream_id} is that of another resumable stream: send another id, or"
            f" read that one at /v1/streams/{stream_id}",
            code="stream_exists",
        )
    return stream


def _row(call: Call, model: ServedModel) -> StreamRow:
    caller = current_caller()
    return StreamRow(
        id=call.request_id,
        key=resumption.new_key(),
        path=call.path,
        body=call.body,
        tenant=caller.tenant,
        user=caller.user,
        key_hash=caller.key_hash,
        created=wall_seconds(),
        model=model.name,
    )


async def follow(
    request: web.Request, table: StreamTable, stream: ResumableStream, num_read: int
) -> web.StreamResponse:
    """Send the events of a stream after the first `num_read`, and those that follow."""
    with table.reading(stream) as log:
        opening = await log.opened()
        if log.is_ended and num_read > len(log):
            raise invalid(
                f"{STARTING_AFTER} is {num_read}, and the stream has ended with event {len(log)}",
                STARTING_AFTER,
            )
        if num_read < log.num_dropped:
            raise ApiError(
                404,
                f"the events of stream {stream.id} up to number {log.num_dropped} have made room"
                " for later ones, and the request was for those after number"
                f" {num_read}: read a long stream while it is made, or resume with a later event",
                param=STARTING_AFTER,
                code="stream_expired",
            )
        sink = ConnectionSink(request, {STREAM_HEADER: stream.id})
        await sink.open(opening)
        await event_log.copy_events(log, sink, num_read)
        await sink.close()
    return sink.response


def num_read_before(request: web.Request) -> int:
    """Return how many events the client has: ?starting_after, or Last-Event-ID, or 0."""
    for name, value in (
        (STARTING_AFTER, request.query.get(STARTING_AFTER)),
        (LAST_EVENT_HEADER, request.headers.get(LAST_EVENT_HEADER) or None),
    ):
        if value is None:
            continue
        if not (value.isascii() and value.isdigit() and len(value) < 16):
            raise invalid(f"{name} is {value[:100]!r}: it must be the id of an event", name)
        return int(value)
    return 0


def _header(request: web.Request) -> bool | None:
    """Return what X-Resumable says; None without it."""
    value = request.headers.get(RESUMABLE_HEADER)
    if value is None:
        return None
    if value.lower() not in BOOLEANS:
        raise invalid(f"{RESUMABLE_HEADER} is {value[:100]!r}: it must be true or false")
    return BOOLEANS[value.lower()]


def _fields(body: bytes) -> _Fields:
    """Return the fields of a body. What is wrong with it, the handler of the request will say."""
    try:
        return msgspec.json.decode(body, type=_Fields)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return _Fields()


class StreamDeleted(msgspec.Struct):
    """The response of DELETE /v1/streams/ID."""

    id: str
    deleted: bool = True
    object: str = "stream.deleted"


async def get_stream(request: web.Request) -> web.StreamResponse:
    """Send the events of a resumable stream that its client does not have."""
    table, num_read, stream = (
        request.app[GATEWAY][STREAMS],
        num_read_before(request),
        find_stream(request),
    )
    table.num_resumed += 1
    return await follow(request, table, stream, num_read)


async def delete_stream(request: web.Request) -> web.Response:
    """End the request of a stream, and forget the stream.

    Connections that read it get its end, with the reason abort.
    """
    gateway, stream = request.app[GATEWAY], find_stream(request)
    gateway[STREAMS].forget(stream)
    if not await gateway.abort_resumable(stream.row.key):
        stream.cancel()
    # The next gateway must not find it.
    removal = gateway[STREAM_ROWS].remove(stream.row.name)
    await asyncio.shield(asyncio.wrap_future(removal))
    return json_response(StreamDeleted(stream.id))


def find_stream(request: web.Request) -> ResumableStream:
    """Return the stream of a request. Raise a 404 or 403."""
    name = StreamName(current_caller().owner, request.match_info["id"])
    gateway = request.app[GATEWAY]
    stream = gateway[EARLIER_STREAMS].find(name)
    if stream is None:
        raise gateway[STREAMS].missing(name)
    return stream


STREAM_ENDPOINTS = [
    Endpoint("/v1/streams/{id}", get_stream, "The rest of a resumable stream", STREAM),
    Endpoint("/v1/streams/{id}", delete_stream, "End a resumable stream", StreamDeleted,
             method="delete"),
]  # fmt: skip
