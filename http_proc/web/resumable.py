"""Answer requests with resumable streams, where they ask for that, and send them to clients.

Streams of a gateway that has died go on if they ran, and can be read if they had ended: a stream is
started again with the body of its request, by the handler that answered it first. At the end are
the handlers and the table of /v1/streams.
"""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator

import aiohttp
import msgspec
from aiohttp import web

from http_proc.core.caller import Caller, current_caller, set_caller
from http_proc.core.errors import ApiError, invalid
from http_proc.core.gateway import GATEWAY, REQUEST_ID, Gateway, wall_seconds, without_prefix
from http_proc.core.observe import RECORD, RequestLogRecord
from http_proc.core.resumption import Resumption, new_key, set_resumption
from http_proc.core.stream_rows import StreamName, StreamRow
from http_proc.core.streaming import SINK, json_response, write_pieces
from http_proc.web.endpoint import STREAM, Endpoint, Handler
from http_proc.web.loopback import LoopbackServer
from http_proc.web.request_body import read_bytes
from http_proc.web.stream_table import STREAMS, Answer, EventLog, ResumableStream, StreamTable
from quadriga.clock import now

# Let the handler of a request write to the log of a stream, with or without a connection.

# The handlers whose streams may be resumable, by those that take the requests of clients.
HANDLERS: dict[object, Handler] = {}


def answer_of(request: web.Request, handler: Handler, is_resent: bool = False) -> Answer:
    """Return what writes the events of a request to a stream.

    Its connection may be gone meanwhile. is_resent: an earlier gateway has answered the request.
    """

    async def answer(stream: ResumableStream) -> None:
        gateway, row = request.app[GATEWAY], stream.row
        keep_s, decisions = gateway.args.resume_window, msgspec.json.decode(row.decisions)

        def keep() -> None:
            row = stream.row = stream.row._replace(decisions=msgspec.json.encode(decisions))
            stream.log.hold(gateway.stream_rows.decide(row))

        set_resumption(Resumption(row.key, row.created, keep_s, is_resent, decisions, keep))
        request[SINK] = stream.log
        if is_resent:  # a ring that answers late must not end a stream that has begun
            await gateway.until_ready()
        await gateway.lasting_ring.connect()
        await handler(request)

    return answer


# Streams of a gateway that has died: those that ran go on, and those that had ended can be read.
#
# A stream is started again with the body of its request, by the handler that answered it first.
# The handler needs an aiohttp request, so that this process sends itself one (loopback.py).

NAME_HEADER = "X-Stream-Id"


class EarlierStreams:
    """The rows that an earlier gateway has left, until their streams are started again."""

    def __init__(self, app: web.Application) -> None:
        self._app = app
        self._gateway: Gateway = app[GATEWAY]
        self._table: StreamTable = app[STREAMS]
        self._rows: dict[StreamName, StreamRow] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._restarting: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._server: _OwnRequests | None = None

    async def open(self) -> None:
        """Read the rows, and start those streams again that had not ended."""
        for row in self._gateway.stream_rows.all():
            self._rows[row.name] = row
            ended_at = now() if row.ended_at is None else row.ended_at
            rest_s = ended_at + self._table.window_s - now()
            if row.model != self._gateway.model or rest_s <= 0:
                self._expire(row.name)
            elif row.ended_at is not None:
                loop = asyncio.get_running_loop()
                self._timers.append(loop.call_later(rest_s, self._expire, row.name))
        if self._rows:
            self._server = _OwnRequests(self._app, self._take)
            await self._server.start()
            self._restarting = asyncio.get_running_loop().create_task(self._restart_all())

    def has(self, name: StreamName, path: str) -> bool:
        """Return whether there is a stream of this name and path, of this or an earlier gateway."""
        stream = self._table.get(name)
        row = self._rows.get(name) if stream is None else stream.row
        return row is not None and row.path == path

    async def _restart_all(self) -> None:
        """Start the streams that had not ended, in their order."""
        running = [name for name, row in self._rows.items() if row.ended_at is None]
        for name in running:
            try:
                await self._start(name)
            except (ApiError, aiohttp.ClientError) as error:
                logging.error("resumable stream %s cannot go on: %s", name.id, error)
        if running:
            logging.info("resumable streams of the gateway before: %d go on", len(running))

    def _expire(self, name: StreamName) -> None:
        if self._rows.pop(name, None) is not None:
            self._gateway.stream_rows.remove(name)
            self._table.note_expired(name)

    async def find(self, name: StreamName) -> ResumableStream | None:
        """Return a stream of an owner by its id or that of its answer.

        Raises:
            ApiError: it is another owner's, or there is no room to start it again.
        """
        bare = name._replace(id=without_prefix(name.id))
        stream = await self.named(name) or await self.named(bare)
        ids = (name.id, bare.id)
        if stream is None and any(other.id in ids for other in [*self._rows, *self._table]):
            raise ApiError(
                403,
                f"stream {name.id} belongs to another API key: use the key that started it",
                "permission_error",
                code="not_your_stream",
            )
        return stream

    async def named(self, name: StreamName) -> ResumableStream | None:
        """Return a stream of this or an earlier gateway. Raise ApiError without room for it."""
        if self._table.get(name) is None and name in self._rows:
            await self._start(name)
        return self._table.get(name)

    async def _start(self, name: StreamName) -> None:
        """Start a stream again, unless that is done."""
        async with self._starting:
            row = self._rows.get(name)
            if row is not None and self._server is not None:
                await self._server.send(row)

    async def _take(self, request: web.Request) -> web.Response:
        """Start the stream of a row, for a request that this process has sent to itself."""
        owner, _, stream_id = request.headers[NAME_HEADER].rpartition("/")
        name = StreamName(owner, stream_id)
        row = self._rows[name]
        handler = _handlers(self._app)[row.path]
        await read_bytes(request)
        request[REQUEST_ID] = name.id
        request[RECORD] = RequestLogRecord(request_id=name.id)
        set_caller(Caller(row.tenant, user=row.user, key_hash=row.key_hash))
        try:
            answer = answer_of(request, handler, True)
            self._table.start(row._replace(ended_at=None), answer, is_resent=True)
        except ApiError as error:
            return web.Response(status=error.status, text=str(error))
        del self._rows[name]
        return web.Response(status=202)

    async def close(self) -> None:
        """Start no more."""
        for timer in self._timers:
            timer.cancel()
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        if self._server is not None:
            await self._server.stop()


class _OwnRequests(LoopbackServer):
    """Requests of this process to itself, which `take` gets."""

    def __init__(self, app: web.Application, take: Handler) -> None:
        own_app = web.Application(client_max_size=app[GATEWAY].args.max_body_bytes)
        for key, value in app.items():  # what the handlers find in the application of clients
            own_app[key] = value
        own_app.router.add_post("/{path:.*}", take)
        super().__init__(own_app, app[GATEWAY].run_dir, "streams")

    async def send(self, row: StreamRow) -> None:
        """Send the request of a row. Raise an ApiError if it is not taken."""
        url, headers = f"http://streams{row.path}", {NAME_HEADER: row.name.in_file}
        async with self.session.post(url, data=row.body, headers=headers) as response:
            if response.status != 202:
                raise ApiError(503, await response.text(), "server_error", code="too_many_streams")


EARLIER_STREAMS = web.AppKey("earlier_streams", EarlierStreams)


async def stream_lifetime(app: web.Application) -> AsyncIterator[None]:
    """Keep the streams while the application runs."""
    table = app[STREAMS] = StreamTable(app[GATEWAY])
    earlier = app[EARLIER_STREAMS] = EarlierStreams(app)
    await earlier.open()
    yield
    await earlier.close()
    await table.stop()


def _handlers(app: web.Application) -> dict[str, Handler]:
    """Return the handlers whose streams may be resumable, by their paths."""
    return {
        route.resource.canonical: HANDLERS[route.handler]
        for route in app.router.routes()
        if route.resource is not None and route.handler in HANDLERS
    }


# Answer requests with resumable streams, where they ask for that, and send them to clients.

RESUMABLE_HEADER, STREAM_HEADER = "X-Resumable", "X-Stream-Id"
LAST_EVENT_HEADER, STARTING_AFTER = "Last-Event-ID", "starting_after"
FIELD = b'"resumable"'
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class _Fields(msgspec.Struct):
    """The fields of a body that say whether a stream is resumable."""

    stream: bool | None = None
    resumable: bool | None = None
    background: bool | None = None


def resumable(handler: Handler) -> Handler:
    """Return a handler whose streams are resumable where the request asks for it."""

    @functools.wraps(handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        is_asked = _header(request)
        body = await read_bytes(request)
        is_default = request.app[GATEWAY].args.resumable_streams
        if is_asked is None and not is_default and FIELD not in body:
            return await handler(request)
        fields = _fields(body)
        if fields.background:  # its stream can be read again at its own path
            return await handler(request)
        is_asked = fields.resumable if is_asked is None else is_asked
        if not (is_default if is_asked is None else is_asked):
            return await handler(request)
        if not fields.stream:
            if not is_asked:
                return await handler(request)
            raise invalid(
                "resumable is true, and the answer is no stream: send stream: true as well",
                "resumable",
            )
        return await _answer(request, handler, body, bool(is_asked))

    HANDLERS[answer] = handler
    return answer


async def _answer(
    request: web.Request, handler: Handler, body: bytes, is_asked: bool
) -> web.StreamResponse:
    """Start a stream, or find that of the same request, and send it."""
    table, num_read = request.app[STREAMS], 0
    stream = await _of_same_request(request, body)
    if stream is None:
        try:
            stream = table.start(_row(request, body), answer_of(request, handler))
        except ApiError:
            if is_asked:
                raise
            return await handler(request)
    else:
        num_read = num_read_before(request)
        table.num_resumed += 1
    return await follow(request, table, stream, num_read)


async def _of_same_request(request: web.Request, body: bytes) -> ResumableStream | None:
    """Return the stream of the request that has the same X-Request-Id, and must be the same."""
    stream_id, table = request[REQUEST_ID], request.app[STREAMS]
    name = StreamName(current_caller().owner, stream_id)
    stream = await request.app[EARLIER_STREAMS].named(name)
    if stream is None:
        return None
    if stream.has_failed:
        table.forget(stream)
        return None
    if (stream.row.path, stream.row.body) != (request.path, body):
        raise ApiError(
            409,
            f"X-Request-Id {stream_id} is that of another resumable stream: send another id, or"
            f" read that one at /v1/streams/{stream_id}",
            code="stream_exists",
        )
    return stream


def _row(request: web.Request, body: bytes) -> StreamRow:
    caller, gateway = current_caller(), request.app[GATEWAY]
    return StreamRow(
        id=request[REQUEST_ID],
        key=new_key(),
        path=request.path,
        body=body,
        tenant=caller.tenant,
        user=caller.user,
        key_hash=caller.key_hash,
        created=wall_seconds(),
        model=gateway.model,
    )


async def follow(
    request: web.Request, table: StreamTable, stream: ResumableStream, num_read: int
) -> web.StreamResponse:
    """Send the events of a stream after the first `num_read`, and those that follow."""
    with table.reading(stream) as log:
        headers = await log.opened()
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
        response = web.StreamResponse(headers={**headers, STREAM_HEADER: stream.id})
        await response.prepare(request)
        await _copy(log, response, num_read)
        await response.write_eof()
    return response


async def _copy(log: EventLog, response: web.StreamResponse, num_read: int) -> None:
    num_comments = log.num_comments
    while True:
        if len(log) > num_read:
            try:
                events = log.since(num_read)
            except LookupError as error:
                raise ConnectionResetError(f"the reader is too slow: {error}") from None
            num_read += len(events)
            await write_pieces(response, events)
        elif log.error is not None:
            raise ConnectionResetError("the stream has ended before its last event")
        elif log.is_ended:
            return
        elif num_comments != log.num_comments:
            num_comments = log.num_comments
            await response.write(log.last_comment)
        else:
            await log.change()


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


# The handlers and the table of /v1/streams.


class StreamDeleted(msgspec.Struct):
    """The response of DELETE /v1/streams/ID."""

    id: str
    deleted: bool = True
    object: str = "stream.deleted"


async def get_stream(request: web.Request) -> web.StreamResponse:
    """Send the events of a resumable stream that its client does not have."""
    table, num_read, stream = request.app[STREAMS], num_read_before(request), await _find(request)
    table.num_resumed += 1
    return await follow(request, table, stream, num_read)


async def delete_stream(request: web.Request) -> web.Response:
    """End the request of a stream, and forget the stream.

    Connections that read it get its end, with the reason abort.
    """
    table, stream = request.app[STREAMS], await _find(request)
    table.forget(stream)
    if not await request.app[GATEWAY].abort_resumable(stream.row.key):
        stream.cancel()
    # The next gateway must not find it.
    removal = request.app[GATEWAY].stream_rows.remove(stream.row.name)
    await asyncio.shield(asyncio.wrap_future(removal))
    return json_response(StreamDeleted(stream.id))


async def _find(request: web.Request) -> ResumableStream:
    """Return the stream of a request. Raise a 404 or 403."""
    name = StreamName(current_caller().owner, request.match_info["id"])
    stream = await request.app[EARLIER_STREAMS].find(name)
    if stream is None:
        raise request.app[STREAMS].missing(name)
    return stream


STREAM_ENDPOINTS = [
    Endpoint("/v1/streams/{id}", get_stream, "The rest of a resumable stream", STREAM),
    Endpoint("/v1/streams/{id}", delete_stream, "End a resumable stream", StreamDeleted,
             method="delete"),
]  # fmt: skip
