"""Send answers: server-sent events while the server generates, or one JSON body at the end.

The events of a stream go to an `EventSink`: a connection, or whatever a request names instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from aiohttp import web

from http_proc.core.errors import ApiError, from_ring
from http_proc.core.gateway import GATEWAY, REQUEST_ID
from http_proc.core.observe import RECORD
from http_proc.core.progress import StreamWatch
from http_proc.core.request_group import RequestGroup
from http_proc.core.timings import SERVER_TIMING, server_timing
from quadriga.client.types import Completion, StreamChunk
from quadriga.errors import QuadrigaError
from quadriga.wire.client import Accepted

# Where the events of a stream go: to a connection, or to whatever a request names instead.

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


# Send answers: server-sent events while the ring generates, or one JSON body at the end.

END_OF_EVENT = b"\n\n"
DONE = b"data: [DONE]" + END_OF_EVENT
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True)
class StreamFraming:
    """How the events of a stream are sent.

    Attributes:
        has_comments: clients skip lines that begin with ":".
        keepalive: an event without a meaning that follows each comment, for clients that count the
            time since the last event. It is not numbered, and not kept.
    """

    content_type: str
    has_comments: bool
    keepalive: bytes = b""


SERVER_SENT_EVENTS = StreamFraming("text/event-stream; charset=utf-8", True)
JSON_LINES = StreamFraming("application/x-ndjson", False)

_encode = msgspec.json.encode


def json_response(body: Any) -> web.Response:
    """Return a 200 with a JSON body."""
    return web.Response(body=_encode(body), content_type="application/json")


def event(body: bytes) -> bytes:
    """Return a JSON body as a server-sent event."""
    return b"data: " + body + END_OF_EVENT


def named_event(name: bytes, body: bytes) -> bytes:
    """Return a JSON body as a server-sent event with a name."""
    return b"event: " + name + b"\n" + event(body)


class Template:
    """An event whose constant parts are encoded once; `fill` inserts the values.

    Args:
        chunk: the body of the event, with each of `slots` as the value of one field.
        slots: unique placeholder strings, in the order in which they occur.
    """

    def __init__(self, chunk: object, *slots: str) -> None:
        rest, self._parts = event(_encode(chunk)), []
        for slot in slots:
            part, rest = rest.split(_encode(slot), 1)
            self._parts.append(part)
        self._last = rest

    def fill(self, *values: bytes) -> bytes:
        """Return the event with `values`, one JSON value for each slot."""
        pieces = []
        for part, value in zip(self._parts, values):  # noqa: B905 - in the hot path
            pieces.append(part)
            pieces.append(value)
        pieces.append(self._last)
        return b"".join(pieces)


class Renderer(Protocol):
    """Format the chunks of one web request as the events of a stream.

    Attributes:
        framing: how the events are sent.
    """

    framing: StreamFraming

    def start(self, accepted: Sequence[Accepted], /) -> bytes:
        """Return the events that come before all others; `accepted` is in order of the prompts."""

    def render(self, choice: int, chunk: StreamChunk) -> bytes:
        """Return the events of a chunk, possibly none."""

    def finish(self) -> bytes:
        """Return the events that follow the last chunk of all choices."""

    def error(self, error: ApiError) -> bytes:
        """Return the events that end the stream with an error."""


class OpenAIEvents:
    """What the streams of OpenAI's APIs have in common."""

    framing = SERVER_SENT_EVENTS

    def start(self, _: Sequence[Accepted], /) -> bytes:
        """Return nothing: the streams begin with their first chunk."""
        return b""

    def finish(self) -> bytes:
        """Return the mark of the end."""
        return DONE

    def error(self, error: ApiError) -> bytes:
        """Return the error and the mark of the end."""
        return event(error.body()) + DONE


async def stream_events(
    request: web.Request, group: RequestGroup, renderer: Renderer, names: Mapping[str, str]
) -> web.StreamResponse:
    """Send events until all choices have finished; chunks that arrive together are one write.

    Status and headers are sent with the first chunk, when a request is admitted, or after 5 s. An
    error before that is raised, so that it becomes an HTTP status. A later error ends the stream
    with the renderer's event. `names`: the request's name of each field of the ring, for error
    messages.
    """
    poller = request.app[GATEWAY].progress_of(group)
    sink = sink_of(request)
    with poller.watch(group) as watch:
        chunks = await watch.first_chunks()
        stage = "first_token" if chunks else "queue" if watch.is_admitted else ""
        timing = server_timing(group.stages_until_now(stage))
        headers = HEADERS | {"Content-Type": renderer.framing.content_type}
        await sink.open(headers | ({SERVER_TIMING: timing} if timing else {}))
        poller.on_headers(watch, renderer.framing.has_comments)
        stream = EventStream(request, sink, group, renderer, watch)
        try:
            await stream.send(chunks)
        except QuadrigaError as error:
            request.app[GATEWAY].metrics.count_error(error.code)
            request[RECORD].code, request[RECORD].error = error.code, f"{error.code}: {error}"
            api_error = from_ring(error, names)
            api_error.request_id = request[REQUEST_ID]
            await sink.write(renderer.error(api_error))
    return await sink.close()


class EventStream:
    """The events of one stream after its headers."""

    def __init__(
        self,
        request: web.Request,
        sink: EventSink,
        group: RequestGroup,
        renderer: Renderer,
        watch: StreamWatch,
    ) -> None:
        self._request = request
        self._sink = sink
        self._group = group
        self._renderer = renderer
        self._watch = watch
        self._has_started = False

    async def send(self, chunks: list[tuple[int, StreamChunk]]) -> None:
        """Send chunks, and all that follow, to the end. Raise the error of a request."""
        while True:
            data = b"" if self._has_started else await self._start(chunks)
            data += self._render(chunks)
            is_last = self._group.is_done
            if is_last:
                data += self._renderer.finish()
            if data:
                await self._sink.write(data)
                self._watch.on_write()
            elif comment := self._watch.take_comment():
                keepalive = self._renderer.framing.keepalive if self._has_started else b""
                await self._sink.comment(comment + keepalive)
                self._watch.on_write()
            if is_last:
                return
            chunks = await self._group.next_chunks()

    async def _start(self, chunks: list[tuple[int, StreamChunk]]) -> bytes:
        """Return the first events, which come before all chunks, if they can be made now."""
        if not chunks and not self._group.is_accepted:
            return b""
        self._has_started = True
        return self._renderer.start(await self._group.accepted())

    def _render(self, chunks: list[tuple[int, StreamChunk]]) -> bytes:
        """Return the events of chunks."""
        pieces = []
        for choice, chunk in chunks:
            pieces.append(self._renderer.render(choice, chunk))
            if chunk.completion is not None:
                record(self._request, self._group, chunk.completion)
        return b"".join(pieces)


async def collect(request: web.Request, group: RequestGroup) -> list[Completion]:
    """Return the completion of every choice, in order. Raises the first error."""
    completions = await group.completions()
    for completion in completions:
        record(request, group, completion)
    return completions


def record(request: web.Request, group: RequestGroup, completion: Completion) -> None:
    """Count a completion of a group, and note it for the request log and the simulation."""
    request.app[GATEWAY].count_completion(group, completion)
    request[RECORD].completions.append(completion)
