"""Send answers: events while the server generates, or one body at the end.

The events of a stream go to an `EventSink`: a connection, or the log of a resumable stream.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from http_proc.core import errors, observe, progress, request_group
from quadriga.client.types import Completion, StreamChunk
from quadriga.errors import QuadrigaError
from quadriga.wire.client import Accepted

END_OF_EVENT = b"\n\n"
DONE = b"data: [DONE]" + END_OF_EVENT


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


class Opening(NamedTuple):
    """What is known of a stream before its first event.

    Attributes:
        framing: how the events are sent.
        stages: stages that the request has passed, and their seconds.
    """

    framing: StreamFraming
    stages: Sequence[observe.Stage] = ()


class EventSink(Protocol):
    """Take the events of one stream, in order."""

    async def open(self, opening: Opening) -> None:
        """Begin; everything else follows."""

    async def write(self, data: bytes | memoryview) -> None:
        """Take events. Wait while the reader takes nothing."""

    async def comment(self, line: bytes) -> None:
        """Take a comment, which is no event."""

    async def close(self) -> None:
        """Take the end."""


_encode = msgspec.json.encode


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

    framing: StreamFraming = SERVER_SENT_EVENTS

    def start(self, accepted: Sequence[Accepted], /) -> bytes:  # noqa: ARG002
        """Return the events that come before all others; `accepted` is in order of the prompts."""
        return b""

    def render(self, choice: int, chunk: StreamChunk, /) -> bytes:
        """Return the events of a chunk, possibly none."""

    def finish(self) -> bytes:
        """Return the events that follow the last chunk of all choices."""
        return b""

    def error(self, error: errors.ApiError) -> bytes:
        """Return the events that end the stream with an error."""


class OpenAIEnd:
    """The end of a stream of OpenAI's APIs."""

    def finish(self) -> bytes:
        """Return the mark of the end."""
        return DONE

    def error(self, error: errors.ApiError) -> bytes:
        """Return the error and the mark of the end."""
        return event(error.body()) + DONE


async def stream_events(
    sink: EventSink,
    group: request_group.RequestGroup,
    renderer: Renderer,
    last: Callable[[], Awaitable[bytes]] | None = None,
) -> None:
    """Send events until all choices have finished; chunks that arrive together are one write.

    The stream is opened with the first chunk, when a request is admitted, or after 5 s. An error
    before that is raised, so that it becomes an HTTP status. A later error ends the stream with the
    renderer's event.

    Args:
        sink: takes the events.
        group: the requests.
        renderer: makes the events.
        last: returns the very last events, after all others were sent; None: there are none.
    """
    group.note_stream()
    with group.poller.watch(group) as watch:
        chunks = await watch.first_chunks()
        stage = "first_token" if chunks else "queue" if watch.is_admitted else ""
        await sink.open(Opening(renderer.framing, group.stages_until_now(stage)))
        group.poller.on_headers(watch, renderer.framing.has_comments)
        try:
            await _send(sink, group, renderer, watch, chunks)
        except QuadrigaError as error:
            await sink.write(renderer.error(group.note_error(error)))
    if last is not None:
        await sink.write(await last())
    await sink.close()


async def _send(
    sink: EventSink,
    group: request_group.RequestGroup,
    renderer: Renderer,
    watch: progress.StreamWatch,
    chunks: request_group.Chunks,
) -> None:
    """Send chunks, and all that follow, to the end. Raise the error of a request."""
    has_started = is_last = False
    while not is_last:
        data = b""
        if not has_started and (chunks or group.is_accepted):
            has_started = True
            data = renderer.start(await group.accepted())
        data += _rendered(group, renderer, chunks)
        if is_last := group.is_done:
            data += renderer.finish()
        if data:
            await sink.write(data)
            watch.on_write()
        elif comment := watch.take_comment():
            await sink.comment(comment + (renderer.framing.keepalive if has_started else b""))
            watch.on_write()
        if not is_last:
            chunks = await group.next_chunks()


def _rendered(
    group: request_group.RequestGroup, renderer: Renderer, chunks: request_group.Chunks
) -> bytes:
    """Return the events of chunks."""
    pieces = []
    for choice, chunk in chunks:
        pieces.append(renderer.render(choice, chunk))
        if chunk.completion is not None:
            group.note(chunk.completion)
    return b"".join(pieces)


async def collect(group: request_group.RequestGroup) -> list[Completion]:
    """Return the completion of every choice, in order. Raises the first error."""
    completions = await group.completions()
    for completion in completions:
        group.note(completion)
    return completions
