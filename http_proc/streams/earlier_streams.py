"""Streams of a gateway that has died: those that ran go on, and those that had ended can be read.

A stream is started again with the body of its request, by the handler that answered it first. The
handler needs an aiohttp request, so that this process sends itself one (loopback.py).
"""

import asyncio
import logging
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from http_proc.caller import Caller, set_caller
from http_proc.endpoints.endpoint import Handler
from http_proc.endpoints.request_body import read_bytes
from http_proc.gateway import GATEWAY, REQUEST_ID, Gateway, without_prefix
from http_proc.loopback import LoopbackServer
from http_proc.observe.request_log import RECORD, RequestLogRecord
from http_proc.protocol.errors import ApiError
from http_proc.streams.stream_answer import HANDLERS, answer_of
from http_proc.streams.stream_rows import StreamName, StreamRow
from http_proc.streams.stream_table import STREAMS, ResumableStream, StreamTable
from quadriga.clock import now

NAME_HEADER = "X-Stream-Id"


class EarlierStreams:
    """The rows that an earlier gateway has left, until their streams are started again."""

    def __init__(self, app: web.Application) -> None:
        self._app = app
        self._gateway: Gateway = app[GATEWAY]
        self._table: StreamTable = app[STREAMS]
        self._rows: dict[StreamName, StreamRow] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._restarting: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._server: _OwnRequests | None = None

    async def open(self) -> None:
        """Read the rows, and start those streams again that had not ended."""
        for row in self._gateway.stream_rows.all():
            self._rows[row.name] = row
            ended_at = now() if row.ended_at is None else row.ended_at
            rest_s = ended_at + self._table.window_s - now()
            if row.model != self._gateway.model or rest_s <= 0:
                self._expire(row.name)
            elif row.ended_at is not None:
                loop = asyncio.get_running_loop()
                self._timers.append(loop.call_later(rest_s, self._expire, row.name))
        if self._rows:
            self._server = _OwnRequests(self._app, self._take)
            await self._server.start()
            self._restarting = asyncio.get_running_loop().create_task(self._restart_all())

    def has(self, name: StreamName, path: str) -> bool:
        """Return whether there is a stream of this name and path, of this or an earlier gateway."""
        stream = self._table.get(name)
        row = self._rows.get(name) if stream is None else stream.row
        return row is not None and row.path == path

    async def _restart_all(self) -> None:
        """Start the streams that had not ended, in their order."""
        running = [name for name, row in self._rows.items() if row.ended_at is None]
        for name in running:
            try:
                await self._start(name)
            except (ApiError, aiohttp.ClientError) as error:
                logging.error("resumable stream %s cannot go on: %s", name.id, error)
        if running:
            logging.info("resumable streams of the gateway before: %d go on", len(running))

    def _expire(self, name: StreamName) -> None:
        if self._rows.pop(name, None) is not None:
            self._gateway.stream_rows.remove(name)
            self._table.note_expired(name)

    async def find(self, name: StreamName) -> ResumableStream | None:
        """Return a stream of an owner by its id or that of its answer.

        Raises:
            ApiError: it is another owner's, or there is no room to start it again.
        """
        bare = name._replace(id=without_prefix(name.id))
        stream = await self.named(name) or await self.named(bare)
        ids = (name.id, bare.id)
        if stream is None and any(other.id in ids for other in [*self._rows, *self._table]):
            raise ApiError(
                403,
                f"stream {name.id} belongs to another API key: use the key that started it",
                "permission_error",
                code="not_your_stream",
            )
        return stream

    async def named(self, name: StreamName) -> ResumableStream | None:
        """Return a stream of this or an earlier gateway. Raise ApiError without room for it."""
        if self._table.get(name) is None and name in self._rows:
            await self._start(name)
        return self._table.get(name)

    async def _start(self, name: StreamName) -> None:
        """Start a stream again, unless that is done."""
        async with self._starting:
            row = self._rows.get(name)
            if row is not None and self._server is not None:
                await self._server.send(row)

    async def _take(self, request: web.Request) -> web.Response:
        """Start the stream of a row, for a request that this process has sent to itself."""
        owner, _, stream_id = request.headers[NAME_HEADER].rpartition("/")
        name = StreamName(owner, stream_id)
        row = self._rows[name]
        handler = _handlers(self._app)[row.path]
        await read_bytes(request)
        request[REQUEST_ID] = name.id
        request[RECORD] = RequestLogRecord(request_id=name.id)
        set_caller(Caller(row.tenant, user=row.user, key_hash=row.key_hash))
        try:
            answer = answer_of(request, handler, True)
            self._table.start(row._replace(ended_at=None), answer, is_resent=True)
        except ApiError as error:
            return web.Response(status=error.status, text=str(error))
        del self._rows[name]
        return web.Response(status=202)

    async def close(self) -> None:
        """Start no more."""
        for timer in self._timers:
            timer.cancel()
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        if self._server is not None:
            await self._server.stop()


class _OwnRequests(LoopbackServer):
    """Requests of this process to itself, which `take` gets."""

    def __init__(self, app: web.Application, take: Handler) -> None:
        own_app = web.Application(client_max_size=app[GATEWAY].args.max_body_bytes)
        for key, value in app.items():  # what the handlers find in the application of clients
            own_app[key] = value
        own_app.router.add_post("/{path:.*}", take)
        super().__init__(own_app, app[GATEWAY].run_dir, "streams")

    async def send(self, row: StreamRow) -> None:
        """Send the request of a row. Raise an ApiError if it is not taken."""
        url, headers = f"http://streams{row.path}", {NAME_HEADER: row.name.in_file}
        async with self.session.post(url, data=row.body, headers=headers) as response:
            if response.status != 202:
                raise ApiError(503, await response.text(), "server_error", code="too_many_streams")


EARLIER_STREAMS = web.AppKey("earlier_streams", EarlierStreams)


async def stream_lifetime(app: web.Application) -> AsyncIterator[None]:
    """Keep the streams while the application runs."""
    table = app[STREAMS] = StreamTable(app[GATEWAY])
    earlier = app[EARLIER_STREAMS] = EarlierStreams(app)
    await earlier.open()
    yield
    await earlier.close()
    await table.stop()


def _handlers(app: web.Application) -> dict[str, Handler]:
    """Return the handlers whose streams may be resumable, by their paths."""
    return {
        route.resource.canonical: HANDLERS[route.handler]
        for route in app.router.routes()
        if route.resource is not None and route.handler in HANDLERS
    }
