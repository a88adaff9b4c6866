"""The handlers and the table of /v1/streams."""

import asyncio

import msgspec
from aiohttp import web

from http_proc.caller import current_caller
from http_proc.endpoints.endpoint import STREAM, Endpoint
from http_proc.gateway import GATEWAY
from http_proc.responses import json_response
from http_proc.streams.earlier_streams import EARLIER_STREAMS
from http_proc.streams.resumable import follow, num_read_before
from http_proc.streams.stream_rows import StreamName
from http_proc.streams.stream_table import STREAMS, ResumableStream


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
