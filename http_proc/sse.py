"""Server-sent events: one write for everything that has come at the same time."""

import asyncio
import logging

import msgspec
from aiohttp import web

DONE = b"data: [DONE]\n\n"
STALL_SECONDS = 30.0
"""A client that takes nothing for so long is cut off."""
SMALL_WRITE = 32 * 1024
"""Bytes that go out at once where the client has taken all that came before."""

_encode = msgspec.json.encode


class Events:
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
        """Raises ConnectionError where the client is gone, or does not read."""
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        if len(data) < SMALL_WRITE and not transport.get_write_buffer_size():
            await self._response.write(data)
            return
        try:
            await asyncio.wait_for(self._response.write(data), STALL_SECONDS)
        except asyncio.TimeoutError:
            logging.warning("an HTTP client read nothing for %g s: cut off", STALL_SECONDS)
            transport.abort()
            raise SlowHttpReader from None

    async def close(self) -> web.StreamResponse:
        await self._response.write_eof()
        return self._response


class SlowHttpReader(ConnectionError):
    """A client that did not read was cut off."""


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
