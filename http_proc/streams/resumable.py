"""Answer requests with resumable streams, where they ask for that, and send them to clients."""

import functools

import msgspec
from aiohttp import web

from http_proc.caller import current_caller
from http_proc.endpoints.endpoint import Handler
from http_proc.endpoints.request_body import read_bytes
from http_proc.event_sink import write_pieces
from http_proc.gateway import GATEWAY, REQUEST_ID, wall_seconds
from http_proc.protocol.errors import ApiError, invalid
from http_proc.resumption import new_key
from http_proc.streams.earlier_streams import EARLIER_STREAMS
from http_proc.streams.event_log import EventLog
from http_proc.streams.stream_answer import HANDLERS, answer_of
from http_proc.streams.stream_rows import StreamName, StreamRow
from http_proc.streams.stream_table import STREAMS, ResumableStream, StreamTable

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
