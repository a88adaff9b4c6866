"""BackgroundRun: make one response, without a client."""

import asyncio
import logging
from functools import partial

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
from http_proc.gateway import Gateway
from http_proc.protocol.errors import RETRY_AFTER_S, ApiError, from_ring
from http_proc.responses import END_OF_EVENT
from http_proc.resumption import Resumption, set_resumption
from quadriga.errors import QuadrigaError

# A full queue, and a ring that cannot be reached now: the request is sent again.
_RETRIED = (429, 503)


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
        self._is_cancelled = False
        self._begin(ResponseAnswer(response, ResponseOutput(job.id, frozenset())))
        self.task = asyncio.create_task(self._run())

    @property
    def response(self) -> ResponseObject:
        """The response as it is now."""
        response = self._answer.response
        if not self.is_ended:
            response.output = self._answer.output.items
        return response

    @property
    def is_stopped(self) -> bool:
        """Whether no event follows, although the last is missing: the gateway stops."""
        return self.task.done() and not self.is_ended

    def events_after(self, num_read: int) -> list[bytes]:
        """Return the events after the first `num_read`."""
        return self._events[num_read:]

    async def change(self) -> None:
        """Wait until events come, or the end."""
        await self._changed.wait()

    async def cancel(self) -> None:
        """End the response with what it has, unless it has ended, and wait until it is stored."""
        await asyncio.sleep(0)  # a task that was not begun would end without its last event
        if not self.is_ended and not self._is_cancelled:
            self._is_cancelled = True
            self.task.cancel()
        await asyncio.wait([self.task])

    async def stop(self) -> None:
        """End the run, but not the response: it is made again at the next start."""
        self.task.cancel()
        await asyncio.wait([self.task])

    async def _run(self) -> None:
        set_caller(self._job.caller)
        try:
            await self._make()
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise
            self._write(self._stream.cancel())
        except Exception:
            logging.exception("response %s failed", self._job.id)
            error = ApiError(500, "the gateway failed on this request", "server_error")
            self._write(self._stream.error(error))
        finally:
            self._wake()
        self.is_ended = True
        await self._save()

    # --- the answer -------------------------------------------------------------------------------

    async def _make(self) -> None:
        """Make the response. Try again while the ring takes no requests."""
        while True:
            try:
                await self._attempt()
                return
            except (ApiError, QuadrigaError) as caught:
                error = caught if isinstance(caught, ApiError) else from_ring(caught, {})
            if error.status not in _RETRIED:
                self._write(self._stream.error(error))
                return
            await asyncio.sleep(error.retry_after or RETRY_AFTER_S)

    async def _attempt(self) -> None:
        job, gateway = self._job, self._gateway
        keep_s = gateway.args.resume_window
        set_resumption(Resumption(job.key, job.created, keep_s, self._is_resent))
        plan = await make_plan(gateway, self._store, job.body, job.history)
        self._begin(plan.answer(job.head))
        stream = self._stream
        await gateway.lasting_ring.connect()
        with gateway.open_group(job.id, plan.prepared.names) as group:
            plan.submit(group)
            await group.accepted()
            self._write(stream.start(0))
            on_completion = partial(gateway.count_completion, group)
            async for events, chunk in read_chat(group, plan.prepared, on_completion):
                self._write(stream.render(0, events, chunk))
        self._write(stream.finish())

    def _begin(self, answer: ResponseAnswer) -> None:
        """Begin an attempt, whose first events are those that were written before."""
        answer.response.store = True
        self._answer, self._stream, self._num_written = answer, ResponseStream(answer), 0

    def _write(self, data: bytes) -> None:
        for event in data.split(END_OF_EVENT)[:-1]:
            if self._num_written == len(self._events):
                self._events.append(event + END_OF_EVENT)
            self._num_written += 1
        if data:
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- the end ----------------------------------------------------------------------------------

    async def _save(self) -> None:
        """Store the response. Try again while the file cannot be written."""
        conversation = self.response.conversation
        ended = EndedResponse(
            self.response,
            self._job.body["input"],
            True,
            None if conversation is None else conversation.id,
            b"".join(self._events),
        )
        while not await self._store.close_response(ended):
            await asyncio.sleep(RETRY_S)
