"""What handlers find in a web request, and how its answer is sent: as JSON, or event by event."""

import re
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from http_proc.core.gateway import Gateway
from http_proc.core.observe import CallRecord
from http_proc.core.streaming import PIECE_BYTES, Opening
from http_proc.core.timings import SERVER_TIMING, server_timing

GATEWAY = web.AppKey("gateway", Gateway)
REQUEST_ID = web.RequestKey("request_id", str)
RECORD = web.RequestKey("record", CallRecord)

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_REQUEST_ID = re.compile(r"[\w.:-]{1,100}", re.ASCII)


def request_id(request: web.Request) -> str:
    """Return the client's X-Request-Id if it is well-formed, else a new id."""
    client_id = request.headers.get("X-Request-Id", "")
    return client_id if _REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex


def json_response(body: Any) -> web.Response:
    """Return a 200 with a JSON body."""
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def headers_of(opening: Opening) -> dict[str, str]:
    """Return the headers of a stream."""
    headers = HEADERS | {"Content-Type": opening.framing.content_type}
    timing = server_timing(opening.stages)
    return headers | ({SERVER_TIMING: timing} if timing else {})


async def write_pieces(response: web.StreamResponse, events: Sequence[bytes]) -> None:
    """Send events, without a copy of a long one. Wait after each piece until it is sent.

    A reader that does not read holds one piece of what is kept.
    """
    data = events[0] if len(events) == 1 else b"".join(events)
    if len(data) <= PIECE_BYTES:
        await response.write(data)
        return
    view = memoryview(data)
    for first in range(0, len(view), PIECE_BYTES):
        await response.write(view[first : first + PIECE_BYTES])


class ConnectionSink:
    """An EventSink that sends the events to the client at once.

    Attributes:
        response: what is sent.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse()

    async def open(self, opening: Opening) -> None:
        """Send the headers."""
        self.response.headers.update(headers_of(opening))
        await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """Send events. Wait while the connection's buffer is full."""
        await self.response.write(data)

    async def comment(self, line: bytes) -> None:
        """Send a comment."""
        await self.response.write(line)

    async def close(self) -> None:
        """Send the end of the body."""
        await self.response.write_eof()
