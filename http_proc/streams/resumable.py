"""Answer requests with resumable streams, where they ask for that, and send them to clients."""

import functools
import hashlib

import msgspec
from aiohttp import web

from http_proc.caller import current_caller
from http_proc.endpoints.endpoint import Handler
from http_proc.endpoints.request_body import read_bytes
from http_proc.event_sink import SINK
from http_proc.gateway import GATEWAY, REQUEST_ID
from http_proc.protocol.errors import ApiError, invalid
from http_proc.streams.event_log import EventLog
from http_proc.streams.stream_table import STREAMS, ResumableStream, StreamTable

RESUMABLE_HEADER, STREAM_HEADER = "X-Resumable", "X-Stream-Id"
LAST_EVENT_HEADER, STARTING_AFTER = "Last-Event-ID", "starting_after"
FIELD = b'"resumable"'
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class _Fields(msgspec.Struct):
    """The fields of a body that say whether a stream is resumable."""

    stream: bool | None = None
    resumable: bool | None = None


def resumable(handler: Handler) -> Handler:
    """Return a handler whose streams are resumable where the request asks for it."""

    @functools.wraps(handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        table, is_asked = request.app[STREAMS], _header(request)
        body = await read_bytes(request)
        is_default = request.app[GATEWAY].args.resumable_streams
        if is_asked is None and not is_default and FIELD not in body:
            return await handler(request)
        fields = _fields(body)
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
        return await _answer(request, handler, table, body, bool(is_asked))

    return answer


async def _answer(
    request: web.Request, handler: Handler, table: StreamTable, body: bytes, is_asked: bool
) -> web.StreamResponse:
    """Start a stream, or find that of the same request, and send it."""
    stream_id, owner = request[REQUEST_ID], current_caller().owner
    digest = hashlib.sha256(request.path.encode() + b"\0" + body).digest()
    stream, num_read = table.find(stream_id, owner), 0
    if stream is not None and stream.has_failed:
        table.forget(stream)
        stream = None
    if stream is None:
        stream = ResumableStream(stream_id, owner, digest)
        try:
            table.start(stream, functools.partial(_run, request, handler))
        except ApiError:
            if is_asked:
                raise
            return await handler(request)
    elif stream.digest != digest:
        raise ApiError(
            409,
            f"X-Request-Id {stream_id} is that of another resumable stream: send another id, or"
            f" read that one at /v1/streams/{stream_id}",
            code="stream_exists",
        )
    else:
        num_read = num_read_before(request)
        table.num_resumed += 1
    return await follow(request, table, stream, num_read)


async def _run(request: web.Request, handler: Handler, log: EventLog) -> None:
    """Let a handler write to a log. The request's connection may be gone meanwhile."""
    request[SINK] = log
    await handler(request)


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
        response = web.StreamResponse(headers={**headers, STREAM_HEADER: stream.id})
        await response.prepare(request)
        await _copy(log, response, num_read)
        await response.write_eof()
    return response


async def _copy(log: EventLog, response: web.StreamResponse, num_read: int) -> None:
    num_comments = log.num_comments
    while True:
        if len(log) > num_read:
            data, num_read = log.since(num_read), len(log)
            await response.write(data)  # waits while the connection's buffer is full
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
