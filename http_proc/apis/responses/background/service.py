"""BackgroundResponses: the responses in the background of one gateway."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import web

from http_proc.apis.responses.background.job import BackgroundJob, new_job
from http_proc.apis.responses.background.run import BackgroundRun
from http_proc.apis.responses.plan import ResponsePlan
from http_proc.apis.responses.schema import ResponseObject
from http_proc.apis.responses.store import REMEDY, RESPONSE_STORE, Items
from http_proc.apis.responses.stored.database import RETRY_S, StorageError
from http_proc.apis.responses.stored.response_store import StoredResponses, no_room_for_items
from http_proc.caller import current_caller
from http_proc.event_sink import write_pieces
from http_proc.gateway import GATEWAY, Gateway, ResponseHead
from http_proc.protocol.errors import RETRY_AFTER_S, ApiError, from_ring, invalid
from http_proc.responses import HEADERS, SERVER_SENT_EVENTS, json_response
from quadriga.errors import ServerStopping


class BackgroundResponses:
    """Start responses, go on with those of the last gateway, and find those that are being made."""

    def __init__(self, gateway: Gateway, store: StoredResponses) -> None:
        self._gateway = gateway
        self._store = store
        self._runs: dict[str, BackgroundRun] = {}
        # The owners of responses that are being stored.
        self._opening: dict[asyncio.Task[BackgroundRun], str] = {}
        self._going_on: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Find the responses that the last gateway has left open, which go on from now on.

        Where the file cannot be read now, they are found later.
        """
        if not await self._go_on():
            self._going_on = asyncio.create_task(self._go_on_later())

    @property
    def num_open(self) -> int:
        """Number of responses that are being made."""
        return len(self._runs)

    def find(self, response_id: str) -> BackgroundRun | None:
        """Return the run of a response that has not ended."""
        return self._runs.get(response_id)

    async def create(
        self, request: web.Request, plan: ResponsePlan, body: dict[str, Any], head: ResponseHead
    ) -> web.StreamResponse:
        """Start a response, and answer its request: with the response as it is, or its stream."""
        self._check_room()
        job, response = new_job(plan, body, head), plan.answer(head).response
        response.store = True
        data = msgspec.msgpack.encode(job)
        held = self._gateway.stored_items
        if not held.take(job.caller.owner, len(data)):
            raise no_room_for_items(held)
        # What is stored must be made, also if the client leaves while it is being stored.
        opening = asyncio.create_task(self._open(job, response, plan.given, data))
        self._opening[opening] = current_caller().owner
        opening.add_done_callback(self._opened)
        run = await asyncio.shield(opening)
        return await send_events(request, run, 0) if plan.call.stream else json_response(response)

    async def _open(
        self, job: BackgroundJob, response: ResponseObject, given: Items, data: bytes
    ) -> BackgroundRun:
        try:
            await self._store.open_response(response, given, data)
        except BaseException:
            self._gateway.stored_items.give_back(job.caller.owner, len(data))
            raise
        return self._start(job, response, len(data), is_resent=False)

    def _opened(self, opening: "asyncio.Task[BackgroundRun]") -> None:
        del self._opening[opening]
        if not opening.cancelled():
            opening.exception()  # its client has it, unless the client has left

    async def stop(self) -> None:
        """End all runs; they are made again at the next start."""
        if self._going_on is not None:
            self._going_on.cancel()
            await asyncio.wait([self._going_on])
        await asyncio.gather(*self._opening, return_exceptions=True)
        await asyncio.gather(*(run.stop() for run in list(self._runs.values())))

    def _check_room(self) -> None:
        if self._gateway.is_draining:
            raise from_ring(ServerStopping("the server is stopping and takes no new requests"), {})
        limit, owner = self._gateway.args.max_background_responses, current_caller().owner
        owners = Counter([*(run.owner for run in self._runs.values()), *self._opening.values()])
        if not self._gateway.shares.has_room(owner, owners, limit):
            raise ApiError(
                429,
                f"{owners.total()} responses are made in the background, {owners[owner]} of them"
                f" yours, and this server takes {limit} (--max-background-responses), with a share"
                " for each tenant: try again, or leave out background",
                "rate_limit_error",
                code="too_many_responses",
                retry_after=RETRY_AFTER_S,
            )

    def _start(
        self, job: BackgroundJob, response: ResponseObject, size: int, is_resent: bool
    ) -> BackgroundRun:
        """Start a run, which holds the bytes of its job to its end."""
        run = BackgroundRun(self._gateway, self._store, job, response, is_resent)
        self._runs[job.id] = run

        def forget(_: "asyncio.Task[None]") -> None:
            del self._runs[job.id]
            self._gateway.stored_items.give_back(run.owner, size)

        run.task.add_done_callback(forget)
        return run

    async def _go_on(self) -> bool:
        """Start the responses that the last gateway has left open, and return whether it could."""
        try:
            left = await self._store.open_responses()
        except StorageError:  # it is logged
            return False
        if left:
            logging.info("%d responses in the background go on", len(left))
        for response, data in left:
            job = msgspec.msgpack.decode(data, type=BackgroundJob)
            if job.id not in self._runs:
                self._gateway.stored_items.take(job.caller.owner, len(data), is_needed=True)
                whole = msgspec.convert(response, ResponseObject)
                self._start(job, whole, len(data), is_resent=True)
        return True

    async def _go_on_later(self) -> None:
        while not await self._go_on():
            await asyncio.sleep(RETRY_S)


BACKGROUND = web.AppKey("background", BackgroundResponses)


def background_of(request: web.Request) -> BackgroundResponses:
    """Return the responses in the background. Raise an ApiError if there are none."""
    if BACKGROUND in request.app:
        return request.app[BACKGROUND]
    raise invalid(
        f"background is true, and this server stores no responses ({REMEDY}): leave it out, and"
        " read the answer with stream: true",
        "background",
    )


async def background_lifetime(app: web.Application) -> AsyncIterator[None]:
    """Make responses in the background while the application runs, if it stores responses."""
    store = app.get(RESPONSE_STORE)
    if not isinstance(store, StoredResponses):
        yield
        return
    app[BACKGROUND] = BackgroundResponses(app[GATEWAY], store)
    await app[BACKGROUND].open()
    yield
    await app[BACKGROUND].stop()


async def send_events(
    request: web.Request, run: BackgroundRun, num_read: int
) -> web.StreamResponse:
    """Send the events of a run after the first `num_read`, and those that follow, to the end."""
    headers = HEADERS | {"Content-Type": SERVER_SENT_EVENTS.content_type}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    while True:
        if events := run.events_after(num_read):
            num_read += len(events)
            await write_pieces(response, events)
        elif run.is_ended:
            break
        elif run.is_stopped:
            raise ConnectionResetError("the gateway stops before the last event")
        else:
            await run.change()
    await response.write_eof()
    return response
