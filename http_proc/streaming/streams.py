"""The way of an answer, streamed or whole, whatever it looks like."""

from collections.abc import Mapping
from typing import Protocol

from aiohttp import web

from http_proc.gateway import GATEWAY
from http_proc.observe.request_log import RECORD
from http_proc.protocol.errors import from_ring
from http_proc.request_group import RequestGroup
from http_proc.streaming.sse import DONE, EventStream, event
from quadriga.client.types import Completion, StreamChunk
from quadriga.errors import QuadrigaError


class Renderer(Protocol):
    """Makes events of what the ring sends."""

    def render(self, choice: int, chunk: StreamChunk) -> bytes:
        """The events of a chunk, possibly none."""

    def last(self) -> bytes:
        """The events after the last chunk of all choices."""


async def stream(
    request: web.Request, batch: RequestGroup, renderer: Renderer, names: Mapping[str, str]
) -> web.StreamResponse:
    """Send what comes until all choices have ended.

    An error before the first piece is raised, so that it gets a status of its own; after it, the
    stream ends with an event that has the error. names: what the ring's fields are called here.
    """
    items = await batch.take()
    events = EventStream(request)
    await events.open()
    try:
        while True:
            pieces = []
            for choice, chunk in items:
                pieces.append(renderer.render(choice, chunk))
                if chunk.completion is not None:
                    _ended(request, chunk.completion)
            if batch.is_over:
                pieces += [renderer.last(), DONE]
            if data := b"".join(pieces):
                await events.send(data)
            if batch.is_over:
                return await events.close()
            items = await batch.take()
    except QuadrigaError as error:
        request.app[GATEWAY].metrics.count_error(error.code)
        await events.send(event(from_ring(error, names).body()) + DONE)
        return await events.close()


async def whole(request: web.Request, batch: RequestGroup) -> list[Completion]:
    """Every choice's completion. Raises the first error."""
    completions = await batch.completions()
    for completion in completions:
        _ended(request, completion)
    return completions


def _ended(request: web.Request, completion: Completion) -> None:
    request.app[GATEWAY].metrics.count(completion)
    request[RECORD].completions.append(completion)
