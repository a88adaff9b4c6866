"""Responses in the background: they are made without a client, also after the gateway's death.

First what is kept of a request until its response ends, then the making of one response, then the
responses of one gateway.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from http_proc.apis.responses.answer import ResponseAnswer, ResponseStream
from http_proc.apis.responses.database import RETRY_S, StorageError
from http_proc.apis.responses.output import ResponseOutput
from http_proc.apis.responses.plan import ResponsePlan, make_plan
from http_proc.apis.responses.schema import ResponseObject
from http_proc.apis.responses.store import REMEDY, RESPONSE_STORE, EndedResponse, Items
from http_proc.apis.responses.stored_responses import StoredResponses, no_room_for_items
from http_proc.core.call import Call
from http_proc.core.caller import Caller, current_caller, set_caller
from http_proc.core.errors import RETRY_AFTER_S, ApiError, from_server, invalid
from http_proc.core.event_log import EventLog, copy_events
from http_proc.core.gateway import Gateway, Key
from http_proc.core.observe import CallRecord
from http_proc.core.resumption import Resumption, new_key, set_resumption
from http_proc.core.served_model import ResponseHead, ServedModel
from http_proc.core.streaming import END_OF_EVENT, SERVER_SENT_EVENTS, EventSink, Opening
from http_proc.generation.chat_answers import read_chat
from quadriga.errors import QuadrigaError, ServerStopping


class BackgroundJob(msgspec.Struct, kw_only=True):
    """The request of a response.

    Attributes:
        key: as in Resumption: of it come the seed and the ids of calls, so that each attempt has
            the same events.
        body: of the request, with the items that its references point to.
        history: the items that come before its input.
        tenant, has_users, user, key_hash: of the Caller.
    """

    id: str
    key: str
    created: int
    model: str
    body: dict[str, Any]
    history: Items
    tenant: str
    has_users: bool
    user: str
    key_hash: str

    @property
    def head(self) -> ResponseHead:
        """The head of the response."""
        return ResponseHead(self.id, self.created, self.model)

    @property
    def caller(self) -> Caller:
        """The tenant of the request."""
        return Caller(self.tenant, self.has_users, self.user, key_hash=self.key_hash)


def new_job(plan: ResponsePlan, body: dict[str, Any], head: ResponseHead) -> BackgroundJob:
    """Return the job of a request that was checked."""
    caller = current_caller()
    return BackgroundJob(
        id=head.id,
        key=new_key(),
        created=head.created,
        model=head.model,
        body={**body, "input": plan.given},
        history=plan.history,
        tenant=caller.tenant,
        has_users=caller.has_users,
        user=caller.user,
        key_hash=caller.key_hash,
    )


# A full queue, and a server that cannot be reached now: the request is sent again.
_RETRIED = (429, 503)
_OPEN = ("queued", "in_progress")


@dataclass(slots=True)
class _Attempt:
    """One try to make the response.

    Attributes:
        num_events: that it has made.
    """

    answer: ResponseAnswer
    stream: ResponseStream
    num_events: int = 0

    @classmethod
    def of(cls, answer: ResponseAnswer) -> "_Attempt":
        """Return the attempt that makes an answer."""
        answer.response.store = True
        return cls(answer, ResponseStream(answer))


class BackgroundRun:
    """One response that is being made. It begins at once.

    Args:
        gateway: its state.
        store: has the response as an open one.
        job: the request.
        response: the response before its answer.
        is_resent: an earlier gateway has begun it.

    Attributes:
        log: its events.
    """

    def __init__(
        self,
        gateway: Gateway,
        store: StoredResponses,
        job: BackgroundJob,
        response: ResponseObject,
        is_resent: bool,
    ) -> None:
        self.log = EventLog(has_ids=False)
        self._gateway = gateway
        self._store = store
        self._job = job
        self._is_resent = is_resent
        self._model = gateway.models.find(job.model)  # None: it is not served any more
        self._is_cancelled = self._is_ending = False
        # The one that has made the last event: a later one makes the same events again first.
        self._shown = _Attempt.of(ResponseAnswer(response, ResponseOutput(job.id, {})))
        self.task = asyncio.create_task(self._run())
        missing = ConnectionResetError("the gateway stops before the last event")
        self.task.add_done_callback(lambda _: self.log.end(missing))

    @property
    def owner(self) -> str:
        """Whose it is, as Caller.owner."""
        return self._job.caller.owner

    @property
    def response(self) -> ResponseObject:
        """The response as it is now."""
        answer = self._shown.answer
        response = answer.response
        if self.is_ended:
            return response
        now = msgspec.structs.replace(response, output=answer.output.items)
        if now.status not in _OPEN:  # it has ended when it is stored
            now.status, now.completed_at, now.incomplete_details = "in_progress", None, None
            now.usage = now.error = now.timings = None
        return now

    @property
    def is_ended(self) -> bool:
        """Whether the last event is written."""
        return self.log.is_ended and self.log.error is None

    async def cancel(self) -> None:
        """End the response with what it has, unless it ends, and wait until it is stored.

        While the file cannot be written, it is stored later.
        """
        await asyncio.sleep(0)  # a task that was not begun would end without its last event
        if not self._is_ending and not self._is_cancelled:
            self._is_cancelled = True
            self.task.cancel()
        while not self.log.is_ended:
            await self.log.change()

    async def stop(self) -> None:
        """End the run, but not the response: it is made again at the next start."""
        self.task.cancel()
        await asyncio.wait([self.task])

    async def _run(self) -> None:
        set_caller(self._job.caller)
        try:
            last = await self._make()
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise
            last = self._shown.stream.cancel()
        except Exception:
            logging.exception("response %s failed", self._job.id)
            error = ApiError(500, "the gateway failed on this request")
            last = self._shown.stream.error(error)
        self._is_ending = True
        await self._end(last)
        if self._is_cancelled and self._is_resent:
            await self._abort()

    async def _make(self) -> bytes:
        """Make the response, and return the last events. Try again while it is refused."""
        if self._is_resent:
            await self._served.until_ready()
        while True:
            try:
                return await self._attempt()
            except (ApiError, QuadrigaError) as caught:
                error = caught if isinstance(caught, ApiError) else from_server(caught, {})
            if error.status not in _RETRIED:
                return self._shown.stream.error(error)
            await asyncio.sleep(error.retry_after or RETRY_AFTER_S)

    async def _attempt(self) -> bytes:
        job, gateway = self._job, self._gateway
        set_resumption(self._resumption())
        record = CallRecord()
        plan = await make_plan(gateway, self._store, job.body, record, job.history, self._model)
        attempt = _Attempt.of(plan.answer(job.head))
        await plan.model.lasting_client.connect()
        with gateway.open_group(plan.model, job.id, plan.prepared.names, record) as group:
            plan.submit(group)
            await group.accepted()
            self._write(attempt, attempt.stream.start(0))
            async for events, chunk in read_chat(group, plan.prepared):
                self._write(attempt, attempt.stream.render(0, events, chunk))
        self._shown = attempt
        return attempt.stream.finish()

    @property
    def _served(self) -> ServedModel:
        return self._model or self._gateway.models.default

    def _resumption(self) -> Resumption:
        keep_s = self._gateway.args.resume_window
        return Resumption(self._job.key, self._job.created, keep_s, self._is_resent)

    def _write(self, attempt: _Attempt, data: bytes) -> None:
        """Append the events of an attempt that no attempt before it has made."""
        for event in data.split(END_OF_EVENT)[:-1]:
            if attempt.num_events == len(self.log):
                self.log.append(event)
            attempt.num_events += 1
        if attempt.num_events == len(self.log):
            self._shown = attempt

    async def _abort(self) -> None:
        """Abort the request at the server, which may go on with it for the earlier gateway."""
        with suppress(QuadrigaError):
            await self._served.until_ready()
            request_id = self._resumption().kept_request(0).request_id
            await self._served.lasting_client.abort(request_id)

    async def _end(self, last: bytes) -> None:
        """Store the response with its last events, and then show them.

        While the file cannot be written they are shown, and it is tried again.
        """
        response = self._shown.answer.response
        conversation = response.conversation
        conversation_id = None if conversation is None else conversation.id
        ended = self._ended(b"".join(self.log.events) + last, conversation_id)
        try:
            while not await self._store.close_response(ended):
                self._show_end(last)
                await asyncio.sleep(RETRY_S)
        except ApiError as error:  # it is too large: the output is lost
            response.completed_at = response.incomplete_details = None
            self._shown.stream.take_back(last)
            self._shown.answer.output = ResponseOutput(self._job.id, {})
            last = self._shown.stream.error(error)
            ended = self._ended(last, None)
            while not await self._store.close_response(ended, keeps_it=False):
                self._show_end(last)
                await asyncio.sleep(RETRY_S)
        self._show_end(last)

    def _ended(self, events: bytes, conversation_id: str | None) -> EndedResponse:
        response, given = self._shown.answer.response, self._job.body["input"]
        return EndedResponse(response, given, True, conversation_id, events)

    def _show_end(self, last: bytes) -> None:
        self.log.append(last)
        self.log.end()


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
        self,
        plan: ResponsePlan,
        body: dict[str, Any],
        head: ResponseHead,
        response: ResponseObject,
    ) -> BackgroundRun:
        """Start a response.

        Args:
            plan: of its request.
            body: of its request.
            head: of the response.
            response: as it is before its answer.

        Raises:
            ApiError: there is no room for it, or it cannot be stored.
        """
        self._check_room()
        job = new_job(plan, body, head)
        data = msgspec.msgpack.encode(job)
        held = self._gateway.stored_items
        if not held.take(job.caller.owner, len(data)):
            raise no_room_for_items(held)
        # What is stored must be made, also if the client leaves while it is being stored.
        opening = asyncio.create_task(self._open(job, response, plan.given, data))
        self._opening[opening] = current_caller().owner
        opening.add_done_callback(self._opened)
        return await asyncio.shield(opening)

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
            error = ServerStopping("the server is stopping and takes no new requests")
            raise from_server(error, {})
        limit, owner = self._gateway.args.max_background_responses, current_caller().owner
        owners = Counter([*(run.owner for run in self._runs.values()), *self._opening.values()])
        if not self._gateway.shares.has_room(owner, owners, limit):
            raise ApiError(
                429,
                f"{owners.total()} responses are made in the background, {owners[owner]} of them"
                f" yours, and this server takes {limit}, with a share"
                " for each tenant: try again, or leave out background",
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


BACKGROUND = Key[BackgroundResponses]("background")


def background_of(gateway: Gateway, call: Call) -> BackgroundResponses:
    """Return the responses in the background. Raise an ApiError if the call may be none."""
    background = gateway.get(BACKGROUND) if call.may_keep else None
    if background is not None:
        return background
    raise invalid(
        f"background is true, and this server stores no responses ({REMEDY}): leave it out, and"
        " read the answer with stream: true",
        "background",
    )


@asynccontextmanager
async def background_lifetime(gateway: Gateway) -> AsyncIterator[None]:
    """Make responses in the background while the gateway runs, if it stores responses."""
    store = gateway.get(RESPONSE_STORE)
    if not isinstance(store, StoredResponses):
        yield
        return
    background = gateway[BACKGROUND] = BackgroundResponses(gateway, store)
    await background.open()
    yield
    await background.stop()


async def send_events(sink: EventSink, run: BackgroundRun, num_read: int) -> None:
    """Send the events of a run after the first `num_read`, and those that follow, to the end."""
    await sink.open(Opening(SERVER_SENT_EVENTS))
    await copy_events(run.log, sink, num_read)
    await sink.close()
