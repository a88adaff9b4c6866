"""GET /v1/live: the live feed as server-sent events, until the client leaves."""

from aiohttp import web

from http_proc.caller import current_caller
from http_proc.gateway import GATEWAY
from http_proc.live.hub import LiveHub
from http_proc.protocol.errors import ApiError, from_ring
from http_proc.responses import HEADERS, SERVER_SENT_EVENTS
from quadriga.errors import QueueFull

LIVE = web.AppKey("live", LiveHub)


def add_live(app: web.Application) -> None:
    """Give the application its hub, which ends with it."""
    hub = app[LIVE] = LiveHub(app[GATEWAY].ring)

    async def close(_: web.Application) -> None:
        hub.close()

    app.on_shutdown.append(close)


async def live(request: web.Request) -> web.StreamResponse:
    """Send what the server does, for as long as the client reads."""
    if request.app[GATEWAY].tenant_args.keys and current_caller().tenant:
        raise ApiError(
            403,
            "the live feed shows requests of all tenants, and this key is one tenant's: use a key"
            " of --api-key",
            "permission_error",
            code="not_allowed",
        )
    try:
        with request.app[LIVE].viewer() as viewer:
            content_type = {"Content-Type": SERVER_SENT_EVENTS.content_type}
            response = web.StreamResponse(headers=HEADERS | content_type)
            await response.prepare(request)
            while data := await viewer.take():
                await response.write(data)  # waits while the connection's buffer is full
    except QueueFull as error:
        raise from_ring(error, {}) from None
    await response.write_eof()
    return response
