"""GET /v1/live: the live feed as server-sent events, until the client leaves."""

import re

from aiohttp import web

from http_proc.endpoints.operator import check_operator
from http_proc.gateway import GATEWAY
from http_proc.live.hub import LiveHub
from http_proc.protocol.errors import from_ring
from http_proc.responses import HEADERS, SERVER_SENT_EVENTS
from quadriga.config.replica_args import check_replica
from quadriga.errors import InvalidRequest, QueueFull

_NUMBER = re.compile(r"[0-9]{1,4}", re.ASCII)
LIVE = web.AppKey("live", dict[int, LiveHub])


def add_live(app: web.Application) -> None:
    """Give the application its hubs, one for each replica, which end with it."""
    hubs = app[LIVE] = {}

    async def close(_: web.Application) -> None:
        for hub in hubs.values():
            hub.close()

    app.on_shutdown.append(close)


async def live(request: web.Request) -> web.StreamResponse:
    """Send what the server does, for as long as the client reads."""
    check_operator(request, "the live feed shows requests of")
    try:
        with (await _hub(request)).viewer() as viewer:
            content_type = {"Content-Type": SERVER_SENT_EVENTS.content_type}
            response = web.StreamResponse(headers=HEADERS | content_type)
            await response.prepare(request)
            while data := await viewer.take():
                await response.write(data)  # waits while the connection's buffer is full
    except (InvalidRequest, QueueFull) as error:
        raise from_ring(error, {}) from None
    await response.write_eof()
    return response


async def _hub(request: web.Request) -> LiveHub:
    """Return the hub of the replica that a request names; without one, of the first.

    Raises:
        InvalidRequest: there is no such replica.
    """
    gateway, hubs, text = request.app[GATEWAY], request.app[LIVE], request.query.get("replica", "0")
    if not _NUMBER.fullmatch(text):
        raise InvalidRequest(f"replica is {text[:20]!r}: it must be a number, such as 1", "replica")
    number = int(text)
    if number:  # the first one is there; nothing is asked that a ring that is away cannot answer
        check_replica(number, (await gateway.ring_info.static()).get("num_replicas", 1))
    if number not in hubs:
        hubs[number] = LiveHub(gateway.ring, number)
    return hubs[number]
