"""Where the events of a stream go: to a connection, or to whatever a request names instead."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from aiohttp import web

# What is kept is sent in such pieces, so that a reader that does not read holds one of them.
PIECE_BYTES = 64 * 1024


class EventSink(Protocol):
    """Take the events of one stream, in order."""

    async def open(self, headers: Mapping[str, str]) -> None:
        """Begin with the headers; everything else follows."""

    async def write(self, data: bytes) -> None:
        """Take whole events. Wait while the reader takes nothing."""

    async def comment(self, line: bytes) -> None:
        """Take a comment, which is no event."""

    async def close(self) -> web.StreamResponse:
        """Take the end, and return what the handler of the request returns."""


async def write_pieces(response: web.StreamResponse, events: Sequence[bytes]) -> None:
    """Send events, without a copy of a long one. Wait after each piece until it is sent."""
    data = events[0] if len(events) == 1 else b"".join(events)
    if len(data) <= PIECE_BYTES:
        await response.write(data)
        return
    view = memoryview(data)
    for first in range(0, len(view), PIECE_BYTES):
        await response.write(view[first : first + PIECE_BYTES])


class ConnectionSink:
    """Send the events to the client at once."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse()

    async def open(self, headers: Mapping[str, str]) -> None:
        """Send the headers."""
        self._response.headers.update(headers)
        await self._response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """Send events. Wait while the connection's buffer is full."""
        await self._response.write(data)

    async def comment(self, line: bytes) -> None:
        """Send a comment."""
        await self._response.write(line)

    async def close(self) -> web.StreamResponse:
        """Send the end of the body."""
        await self._response.write_eof()
        return self._response


# The sink of a request whose events do not go to its own connection.
SINK = web.RequestKey("sink", EventSink)


def sink_of(request: web.Request) -> EventSink:
    """Return where the events of a request go."""
    return request[SINK] if SINK in request else ConnectionSink(request)
