"""The requests and questions of a client that the server has not finished."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from quadriga.client.choice_stream import ChunkGap
from quadriga.client.request_handle import RequestHandle
from quadriga.clock import now
from quadriga.errors import InvalidRequest
from quadriga.wire.messages.from_client import PROTOCOL_VERSION, Abort, ClientMessage
from quadriga.wire.messages.to_client import (
    Accepted,
    AnyErrorInfo,
    Chunk,
    Chunks,
    ErrorInfo,
    Info,
    ProgressAnswer,
    RefusalInfo,
    Refused,
    Replay,
    ServerMessage,
    Text,
    Tokens,
    Traces,
)


class InflightRequests:
    """Passes each message of the server to the request or question that it belongs to.

    A message that cannot be sent now is sent by `resend`, when the server is back, or failed by
    `fail_all`.

    Args:
        send: sends a message; returns False if it cannot be sent now.
        retry_timeout: seconds during which a request that was accepted before is sent again to a
            server that has no room for it.
    """

    def __init__(self, send: Callable[[msgspec.Struct], bool], retry_timeout: float) -> None:
        self._send = send
        self._retry_timeout = retry_timeout
        self._handles: dict[str, RequestHandle] = {}
        self._questions: dict[str, tuple[ClientMessage, asyncio.Future[Any]]] = {}
        self._unsent_aborts: list[str] = []
        self._was_interrupted = False

    @property
    def has_requests(self) -> bool:
        """Whether a request is under way."""
        return bool(self._handles)

    def __len__(self) -> int:
        return len(self._handles) + len(self._questions)

    def add(self, handle: RequestHandle) -> None:
        """Send a request. Raise InvalidRequest if it is too large or cannot be encoded."""
        message = handle.message
        if handle.was_sent:
            message = msgspec.structs.replace(message, resent=True)
            handle.was_resent = True
        handle.was_sent |= self._send(message)
        self._handles[handle.request_id] = handle

    def drop(self, handle: RequestHandle) -> None:
        """Forget a request, and abort it at the server unless it has ended."""
        if self._handles.pop(handle.request_id, None) is not None and handle.was_sent:
            abort = Abort(PROTOCOL_VERSION, handle.request_id)
            if not self._send(abort):
                self._unsent_aborts.append(handle.request_id)

    def abort(self, request_id: str) -> None:
        """Abort a request, or all of them if the id is empty.

        The abort is repeated if the connection is lost before the request ends.
        """
        for handle in self._handles.values():
            handle.abort_requested |= request_id in ("", handle.request_id)
        self._send(Abort(PROTOCOL_VERSION, request_id))

    async def ask(self, name: str, question: ClientMessage) -> Any:
        """Send a question and wait for its answer. Raise the error that ends it."""
        answer = asyncio.get_running_loop().create_future()
        self._questions[name] = question, answer
        try:
            self._send(question)
            reply = await answer
        finally:
            del self._questions[name]
        if isinstance(reply, ErrorInfo | RefusalInfo):
            raise reply.exception()
        return reply

    def _answer(self, name: str, answer: "ServerMessage | AnyErrorInfo") -> None:
        _, waiting = self._questions.get(name, (None, None))
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    # --- answers ----------------------------------------------------------------------------------

    def on_message(self, message: ServerMessage) -> None:
        """Handle a message; one for an unknown request is ignored."""
        match message:
            case Chunks():
                self._on_chunks(message.chunks, RequestHandle.on_chunk)
            case Replay():
                self._on_chunks(message.chunks, RequestHandle.on_replay)
            case Refused():
                self._on_refused(message)
            case Accepted():
                if (handle := self._handles.get(message.request_id)) is not None:
                    handle.accept(message)
            case Info() | Tokens() | Text() | ProgressAnswer() | Traces():
                self._answer(message.request_id, message)

    def _on_chunks(
        self, chunks: list[Chunk], handler: Callable[[RequestHandle, Chunk, float], None]
    ) -> None:
        received_at = now()
        for chunk in chunks:
            handle = self._handles.get(chunk.request_id)
            if handle is None:
                self._on_unknown_chunk(chunk)
                continue
            if chunk.end is not None and chunk.end.error is not None:
                error = chunk.end.error  # the scheduler may refuse what the frontend admitted
                if handle.retry_later(error, self._retry_timeout, self._resend):
                    continue
            try:
                handler(handle, chunk, received_at)
            except ChunkGap:
                handle.interrupt()
                self._resend(handle)
            self._forget_if_done(handle)

    def _on_unknown_chunk(self, chunk: Chunk) -> None:
        """Abort an unknown request, if its abort may have been lost with a connection."""
        if self._was_interrupted and chunk.end is None:
            self._send(Abort(PROTOCOL_VERSION, chunk.request_id))

    def _on_refused(self, message: Refused) -> None:
        self._answer(message.request_id, message.error)
        handle = self._handles.get(message.request_id)
        if handle is None or handle.retry_later(message.error, self._retry_timeout, self._resend):
            return
        handle.fail(message.error)
        self._forget_if_done(handle)

    def _forget_if_done(self, handle: RequestHandle) -> None:
        if handle.done:
            self._handles.pop(handle.request_id, None)

    def fail_all(self, error: AnyErrorInfo) -> None:
        """Fail every request and question."""
        self._unsent_aborts.clear()
        handles, self._handles = list(self._handles.values()), {}
        for handle in handles:
            handle.fail(error)
        for name in self._questions:
            self._answer(name, error)

    def forget_all(self) -> None:
        """Leave every request to the server, which does not get its abort."""
        self._handles.clear()
        self._unsent_aborts.clear()

    # --- a lost connection ------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Handle a lost connection: messages of every request may be lost."""
        self._was_interrupted = True
        for handle in self._handles.values():
            if handle.was_sent:
                handle.interrupt()

    def resend(self) -> None:
        """Send every open request, question and abort again, to a server that is back."""
        for handle in list(self._handles.values()):
            self._resend(handle)
        for question, answer in self._questions.values():
            if not answer.done():
                self._send(question)
        aborts, self._unsent_aborts = self._unsent_aborts, []
        for request_id in aborts:
            self._send(Abort(PROTOCOL_VERSION, request_id))

    def _resend(self, handle: RequestHandle) -> None:
        """Send a request again, marked as a retry if the server may know it."""
        message = msgspec.structs.replace(handle.message, resent=handle.was_sent)
        try:
            handle.was_resent |= handle.was_sent
            handle.was_sent |= self._send(message)
        except InvalidRequest as error:  # a new server may have a smaller frame limit
            handle.fail(ErrorInfo.of(error))
            self._forget_if_done(handle)
            return
        if handle.abort_requested:
            self._send(Abort(PROTOCOL_VERSION, handle.request_id))
