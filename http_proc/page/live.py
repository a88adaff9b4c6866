"""GET /v1/live: the live feed as server-sent events, until the client leaves.

`LiveHub` subscribes to the server's feed while pages are open, and shares each event among them; a
viewer that comes later sees gauges by the second and events of the last minutes.
"""

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import msgspec
from aiohttp import web

from http_proc.core import errors, streaming
from http_proc.core.gateway import Gateway, Key
from http_proc.web import access, exchange
from quadriga.client.async_client import AsyncClient
from quadriga.client.live import server_to_json, step_to_json
from quadriga.errors import InvalidRequest, QuadrigaError, QueueFull
from quadriga.server.config.engine_args import check_replica
from quadriga.wire.live import LiveMessage, LiveServer, LiveStep

# What a viewer that comes later sees of the last minutes: gauges by the second, and events.
#
# It is kept only while there are viewers, and has a fixed size.

HISTORY_S = 600
MAX_EVENTS = 300
GAUGES = (
    "running",
    "waiting",
    "pages_free",
    "pages_cached",
    "pages_held",
    "steps",
    "prompt_tokens_total",
    "cached_tokens_total",
    "generation_tokens_total",
    "retractions",
)  # fmt: skip


class LiveHistory:
    """Gauges of the last minutes, one row a second, and the last events."""

    def __init__(self) -> None:
        self._rows: deque[list[float]] = deque(maxlen=HISTORY_S)
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._gauges: list[float] = []
        self._names: dict[int, str] = {}

    def on_step(self, step: LiveStep, caller_ids: Mapping[str, str]) -> None:
        """Take in a step. caller_ids: the X-Request-Id of a request of the server by its id."""
        self._gauges = [getattr(step.gauges, name) for name in GAUGES]
        if step.is_whole and not step.num_hidden_rows and not step.num_hidden_skipped:
            listed = {request.seq for request in step.requests}
            ended = {event.seq for event in step.events}
            self._names = {
                seq: name for seq, name in self._names.items() if seq in listed or seq in ended
            }
        for request in step.requests:
            name = caller_ids.get(request.request_id, request.request_id)
            self._names[request.seq] = name
        for event in step.events:
            about = {"time": step.time, "request_id": self._names.get(event.seq, "")}
            self._events.append(about | msgspec.structs.asdict(event))

    def on_server(self, server: LiveServer) -> None:
        """Take in a second."""
        if self._gauges:
            self._rows.append([server.time, *self._gauges])

    def as_json(self) -> dict[str, Any]:
        """Return rows, with the names of their columns, and events, oldest first."""
        return {
            "columns": ["time", *GAUGES],
            "rows": list(self._rows),
            "events": list(self._events),
        }


# LiveHub: subscribe to the ring's feed while pages are open, and share each event among them.
#
# An event is encoded once, whatever the number of viewers. It holds the messages of FLUSH_S, so
# that a ring with a thousand steps a second does not make a thousand events.

MAX_VIEWERS = 256
FLUSH_S = 0.1
# Events that a viewer may be behind; then it loses all of them and begins with the next.
MAX_BEHIND = 64
# The events since the last whole step, which a new viewer gets at once.
MAX_RECENT_EVENTS = 200
RETRY_S = 1.0

_encode = msgspec.json.encode


class PageViewer:
    """The events that one connection has not been sent yet.

    Attributes:
        num_dropped: events that it has lost because it read too slowly.
    """

    def __init__(self, first: list[bytes]) -> None:
        self._events = deque(first)
        self._arrived = asyncio.Event()
        self._is_closed = False
        self.num_dropped = 0

    def put(self, event: bytes) -> None:
        """Add an event; a viewer that is too far behind loses those that it has not been sent."""
        if len(self._events) >= MAX_BEHIND:
            self.num_dropped += len(self._events)
            self._events.clear()
            self._events.append(sse("dropped", {"events": self.num_dropped}))
        self._events.append(event)
        self._arrived.set()

    def close(self) -> None:
        """Let the connection end when it has been sent all."""
        self._is_closed = True
        self._arrived.set()

    async def take(self) -> bytes:
        """Wait for events and return all of them; empty at the end."""
        while not self._events and not self._is_closed:
            self._arrived.clear()
            await self._arrived.wait()
        data = b"".join(self._events)
        self._events.clear()
        return data


class LiveHub:
    """The viewers of one replica.

    Args:
        ring: the client; it watches only while there are viewers.
        replica: number of the replica.
        caller_ids: returns the X-Request-Id of each open request of the server, by its id.
    """

    def __init__(
        self,
        ring: AsyncClient,
        replica: int = 0,
        caller_ids: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._ring = ring
        self._replica = replica
        self._caller_ids = caller_ids
        self._viewers: set[PageViewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._forget()

    def _forget(self) -> None:
        """Start with nothing: what was known is old."""
        self._history = LiveHistory()
        self._pending: list[dict[str, Any]] = []
        self._server: dict[str, Any] | None = None
        self._has_whole = False
        self._recent: deque[bytes] = deque(maxlen=MAX_RECENT_EVENTS)

    @contextmanager
    def viewer(self) -> Iterator[PageViewer]:
        """Watch in a `with` block.

        Raises:
            QueueFull: there are too many viewers.
        """
        if len(self._viewers) >= MAX_VIEWERS:
            raise QueueFull(
                f"{MAX_VIEWERS} live views are open, and no more may: close one, or try again in"
                f" {RETRY_S:g} s",
                RETRY_S,
            )
        viewer = PageViewer([sse("history", self._history.as_json()), *self._recent])
        self._viewers.add(viewer)
        if self._is_closed:
            viewer.close()
        elif self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._watch())
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._stop()

    def close(self) -> None:
        """End the connection of every viewer, and accept no further one."""
        self._is_closed = True
        self._stop()
        for viewer in self._viewers:
            viewer.close()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._forget()

    # --- the feed ---------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Take in the feed. A ring that fails is asked again, as long as there are viewers."""
        while True:
            try:
                async with aclosing(self._ring.watch(self._replica)) as messages:
                    async for message in messages:
                        self._take(message)
            except QuadrigaError as error:
                self._publish(sse("error", {"code": error.code, "message": str(error)}))
            await asyncio.sleep(RETRY_S)

    def _take(self, message: LiveMessage) -> None:
        if isinstance(message, LiveStep):
            caller_ids = self._caller_ids() if message.requests else {}
            self._history.on_step(message, caller_ids)
            self._has_whole = self._has_whole or message.is_whole
            step = step_to_json(message)
            for request in step["requests"]:
                request["caller_id"] = caller_ids.get(request["request_id"], "")
            self._pending.append(step)
        else:
            self._history.on_server(message)
            self._server = server_to_json(message)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        """Send the messages that have come as one event."""
        self._timer = None
        event = sse("live", {"steps": self._pending, "server": self._server})
        if self._has_whole:  # a new viewer needs nothing from before
            self._recent.clear()
        if self._pending:
            self._recent.append(event)
        self._pending, self._server, self._has_whole = [], None, False
        self._publish(event)

    def _publish(self, event: bytes) -> None:
        for viewer in self._viewers:
            viewer.put(event)


def sse(name: str, body: Any) -> bytes:
    """Return a server-sent event with a name."""
    return streaming.named_event(name.encode(), _encode(body))


_NUMBER = re.compile(r"[0-9]{1,4}", re.ASCII)
LIVE = Key[dict[tuple[str, int], LiveHub]]("live")
"""By the name of the model, and the number of the replica."""


def close_hubs(gateway: Gateway) -> None:
    """End the hubs, one for each replica of each model, and so the answers to their viewers."""
    for hub in gateway[LIVE].values():
        hub.close()


async def live(request: web.Request) -> web.StreamResponse:
    """Send what the server does, for as long as the client reads."""
    access.check_operator(request, "the live feed shows requests of")
    try:
        with (await _hub(request)).viewer() as viewer:
            content_type = {"Content-Type": streaming.SERVER_SENT_EVENTS.content_type}
            response = web.StreamResponse(headers=exchange.HEADERS | content_type)
            await response.prepare(request)
            while data := await viewer.take():
                await response.write(data)  # waits while the connection's buffer is full
    except (InvalidRequest, QueueFull) as error:
        raise errors.from_server(error, {}) from None
    await response.write_eof()
    return response


async def _hub(request: web.Request) -> LiveHub:
    """Return the hub of the model and replica that a request names; without one, of the first.

    Raises:
        ApiError: there is no such model.
        InvalidRequest: there is no such replica.
    """
    gateway, text = request.app[exchange.GATEWAY], request.query.get("replica", "0")
    model, hubs = exchange.model_of(request), gateway[LIVE]
    if not _NUMBER.fullmatch(text):
        raise InvalidRequest(f"replica is {text[:20]!r}: it must be a number, such as 1", "replica")
    number = int(text)
    if number:  # the first one is there; nothing is asked that a ring that is away cannot answer
        check_replica(number, (await model.server_info.static()).get("num_replicas", 1))
    key = (model.name, number)
    if key not in hubs:
        hubs[key] = LiveHub(model.client, number, gateway.caller_ids)
    return hubs[key]
