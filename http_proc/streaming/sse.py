"""Server-sent events: one write for everything that has come at the same time."""

import msgspec
from aiohttp import web

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


class EventStream:
    """The stream of one answer. `open` once, then `send` as often as there is something."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    async def open(self) -> None:
        """Send the status and the headers."""
        await self._response.prepare(self._request)

    async def send(self, data: bytes) -> None:
        """Waits, now and then, until the client has taken what came before. Raises ConnectionError
        where the client is gone."""
        await self._response.write(data)

    async def close(self) -> web.StreamResponse:
        """Wait until the client has taken everything."""
        await self._response.write_eof()
        return self._response


def event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


class Template:
    """A chunk's constant parts, encoded once: `fill` puts the rest between them.

    The places to be filled are the strings of `slots` in `chunk`.
    """

    def __init__(self, chunk: object, *slots: str) -> None:
        rest, self._parts = event(_encode(chunk)), []
        for slot in slots:
            part, rest = rest.split(_encode(slot), 1)
            self._parts.append(part)
        self._last = rest

    def fill(self, *values: bytes) -> bytes:
        """values: JSON, one for each slot."""
        pieces = []
        for part, value in zip(self._parts, values):  # noqa: B905 - in the hot path
            pieces.append(part)
            pieces.append(value)
        pieces.append(self._last)
        return b"".join(pieces)
