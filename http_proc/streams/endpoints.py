"""The handlers and the table of /v1/streams."""

import msgspec
from aiohttp import web

from http_proc.caller import current_caller
from http_proc.endpoints.endpoint import STREAM, Endpoint
from http_proc.gateway import GATEWAY
from http_proc.responses import json_response
from http_proc.streams.resumable import follow, num_read_before
from http_proc.streams.stream_table import STREAMS, ResumableStream


class StreamDeleted(msgspec.Struct):
    """The response of DELETE /v1/streams/ID."""

    id: str
    deleted: bool = True
    object: str = "stream.deleted"


async def get_stream(request: web.Request) -> web.StreamResponse:
    """Send the events of a resumable stream that its client does not have."""
    table, stream, num_read = request.app[STREAMS], _stream(request), num_read_before(request)
    table.num_resumed += 1
    return await follow(request, table, stream, num_read)


async def delete_stream(request: web.Request) -> web.Response:
    """End the request of a stream, and forget the stream.

    Connections that read it get its end, with the reason abort.
    """
    table, stream = request.app[STREAMS], _stream(request)
    table.forget(stream)
    if not await request.app[GATEWAY].abort(stream.id):
        stream.cancel()
    return json_response(StreamDeleted(stream.id))


def _stream(request: web.Request) -> ResumableStream:
    return request.app[STREAMS].get(request.match_info["id"], current_caller().owner)


STREAM_ENDPOINTS = [
    Endpoint("/v1/streams/{id}", get_stream, "The rest of a resumable stream", STREAM),
    Endpoint("/v1/streams/{id}", delete_stream, "End a resumable stream", StreamDeleted,
             method="delete"),
]  # fmt: skip
