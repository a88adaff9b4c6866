"""BackgroundRun: make one response, without a client."""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from http_proc.apis.responses.answer import ResponseAnswer
from http_proc.apis.responses.background.job import BackgroundJob
from http_proc.apis.responses.output import ResponseOutput
from http_proc.apis.responses.plan import make_plan
from http_proc.apis.responses.schema import ResponseObject
from http_proc.apis.responses.store import EndedResponse
from http_proc.apis.responses.stored.database import RETRY_S
from http_proc.apis.responses.stored.response_store import StoredResponses
from http_proc.apis.responses.stream import ResponseStream
from http_proc.caller import set_caller
from http_proc.chat.answers import read_chat
from http_proc.event_sink import PIECE_BYTES
from http_proc.gateway import Gateway
from http_proc.protocol.errors import RETRY_AFTER_S, ApiError, from_ring
from http_proc.responses import END_OF_EVENT
from http_proc.resumption import Resumption, set_resumption
from quadriga.errors import QuadrigaError

# A full queue, and a ring that cannot be reached now: the request is sent again.
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
        is_ended: the last event is written.
    """

    def __init__(
        self,
        gateway: Gateway,
        store: StoredResponses,
        job: BackgroundJob,
        response: ResponseObject,
        is_resent: bool,
    ) -> None:
        self.is_ended = False
        self._gateway = gateway
        self._store = store
        self._job = job
        self._is_resent = is_resent
        self._events: list[bytes] = []
        self._changed = asyncio.Event()
        self._is_cancelled = self._is_ending = False
        # The one that has made the last event: a later one makes the same events again first.
        self._shown = _Attempt.of(ResponseAnswer(response, ResponseOutput(job.id, {})))
        self.task = asyncio.create_task(self._run())

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
    def is_stopped(self) -> bool:
        """Whether no event follows, although the last is missing: the gateway stops."""
        return self.task.done() and not self.is_ended

    def events_after(self, num_read: int) -> list[bytes]:
        """Return events after the first `num_read`, about PIECE_BYTES at most; not copies."""
        last, size = num_read, 0
        while last < len(self._events) and size < PIECE_BYTES:
            size += len(self._events[last])
            last += 1
        return self._events[num_read:last]

    async def change(self) -> None:
        """Wait until events come, or the end."""
        await self._changed.wait()

    async def cancel(self) -> None:
        """End the response with what it has, unless it ends, and wait until it is stored.

        While the file cannot be written, it is stored later.
        """
        await asyncio.sleep(0)  # a task that was not begun would end without its last event
        if not self._is_ending and not self._is_cancelled:
            self._is_cancelled = True
            self.task.cancel()
        while not self.is_ended and not self.task.done():
            await self.change()

    async def stop(self) -> None:
        """End the run, but not the response: it is made again at the next start."""
        self.task.cancel()
        await asyncio.wait([self.task])

    async def _run(self) -> None:
        set_caller(self._job.caller)
        try:
            try:
                last = await self._make()
            except asyncio.CancelledError:
                if not self._is_cancelled:
                    raise
                last = self._shown.stream.cancel()
            except Exception:
                logging.exception("response %s failed", self._job.id)
                error = ApiError(500, "the gateway failed on this request", "server_error")
                last = self._shown.stream.error(error)
            self._is_ending = True
            await self._end(last)
        finally:
            self._wake()
        if self._is_cancelled and self._is_resent:
            await self._abort()

    # --- the answer -------------------------------------------------------------------------------

    async def _make(self) -> bytes:
        """Make the response, and return the last events. Try again while the ring takes nothing."""
        if self._is_resent:
            await self._gateway.until_ready()
        while True:
            try:
                return await self._attempt()
            except (ApiError, QuadrigaError) as caught:
                error = caught if isinstance(caught, ApiError) else from_ring(caught, {})
            if error.status not in _RETRIED:
                return self._shown.stream.error(error)
            await asyncio.sleep(error.retry_after or RETRY_AFTER_S)

    async def _attempt(self) -> bytes:
        job, gateway = self._job, self._gateway
        set_resumption(self._resumption())
        plan = await make_plan(gateway, self._store, job.body, job.history)
        attempt = _Attempt.of(plan.answer(job.head))
        await gateway.lasting_ring.connect()
        with gateway.open_group(job.id, plan.prepared.names) as group:
            plan.submit(group)
            await group.accepted()
            self._write(attempt, attempt.stream.start(0))
            on_completion = partial(gateway.count_completion, group)
            async for events, chunk in read_chat(group, plan.prepared, on_completion):
                self._write(attempt, attempt.stream.render(0, events, chunk))
        self._shown = attempt
        return attempt.stream.finish()

    def _resumption(self) -> Resumption:
        keep_s = self._gateway.args.resume_window
        return Resumption(self._job.key, self._job.created, keep_s, self._is_resent)

    def _write(self, attempt: _Attempt, data: bytes) -> None:
        """Append the events of an attempt that no attempt before it has made."""
        for event in data.split(END_OF_EVENT)[:-1]:
            if attempt.num_events == len(self._events):
                self._events.append(event + END_OF_EVENT)
            attempt.num_events += 1
        if attempt.num_events == len(self._events):
            self._shown = attempt
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _abort(self) -> None:
        """Abort the request at the ring, which may go on with it for the earlier gateway."""
        with suppress(QuadrigaError):
            await self._gateway.until_ready()
            request_id = self._resumption().kept_request(0).request_id
            await self._gateway.lasting_ring.abort(request_id)

    # --- the end ----------------------------------------------------------------------------------

    async def _end(self, last: bytes) -> None:
        """Store the response with its last events, and then show them.

        While the file cannot be written they are shown, and it is tried again.
        """
        response = self._shown.answer.response
        conversation = response.conversation
        conversation_id = None if conversation is None else conversation.id
        ended = self._ended(b"".join(self._events) + last, conversation_id)
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
        if not self.is_ended:
            self._events += [event + END_OF_EVENT for event in last.split(END_OF_EVENT)[:-1]]
            self.is_ended = True
            self._wake()
