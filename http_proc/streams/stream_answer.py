"""Let the handler of a request write to the log of a stream, with or without a connection."""

import msgspec
from aiohttp import web

from http_proc.endpoints.endpoint import Handler
from http_proc.event_sink import SINK
from http_proc.gateway import GATEWAY
from http_proc.resumption import Resumption, set_resumption
from http_proc.streams.stream_table import Answer, ResumableStream

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
