"""What a client waits for: its requests under way, and the answers to its questions."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from quadriga.client.choice_stream import GapFound
from quadriga.client.request_handle import Handle
from quadriga.clock import now
from quadriga.errors import InvalidRequest
from quadriga.wire.messages.public import (
    PROTOCOL_VERSION,
    Abort,
    Chunk,
    Chunks,
    ClientMessage,
    ErrorInfo,
    Info,
    Refused,
    Replay,
    ServerMessage,
    Text,
    Tokens,
)


class Pending:
    """Hands each message of the server to the one who waits for it.

    What cannot be sent now is sent by `resend`, when the server is back, or ended by `fail_all`.

    Args:
        send: to the server; returns False where it cannot be sent now.
        retry_timeout: seconds in which a request that was accepted before is sent again to a server
            that has no room for it.
    """

    def __init__(self, send: Callable[[msgspec.Struct], bool], retry_timeout: float) -> None:
        self._send = send
        self._retry_timeout = retry_timeout
        self._handles: dict[str, Handle] = {}
        self._questions: dict[str, tuple[ClientMessage, asyncio.Future[Any]]] = {}
        self._unsent_aborts: list[str] = []
        self._was_interrupted = False

    @property
    def has_requests(self) -> bool:
        return bool(self._handles)

    def __len__(self) -> int:
        return len(self._handles) + len(self._questions)

    def add(self, handle: Handle) -> None:
        """Send a request. Raises InvalidRequest for one that the server would not take."""
        handle.was_sent = self._send(handle.message)
        self._handles[handle.request_id] = handle

    def drop(self, handle: Handle) -> None:
        """Tell the server that nobody waits for this request any more, unless it has ended."""
        if self._handles.pop(handle.request_id, None) is not None and handle.was_sent:
            abort = Abort(PROTOCOL_VERSION, handle.request_id)
            if not self._send(abort):
                self._unsent_aborts.append(handle.request_id)

    def abort(self, request_id: str) -> None:
        """Ask the server to end a request, or all where the id is empty. Asked again if the
        connection is lost before it ends."""
        for handle in self._handles.values():
            handle.abort_requested |= request_id in ("", handle.request_id)
        self._send(Abort(PROTOCOL_VERSION, request_id))

    async def ask(self, name: str, question: ClientMessage) -> Any:
        """Send a question and wait for its answer. Raises the error that ends it."""
        answer = asyncio.get_running_loop().create_future()
        self._questions[name] = question, answer
        try:
            self._send(question)
            found = await answer
        finally:
            del self._questions[name]
        if isinstance(found, ErrorInfo):
            raise found.exception()
        return found

    def _answer(self, name: str, answer: "ServerMessage | ErrorInfo") -> None:
        _, waiting = self._questions.get(name, (None, None))
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    # --- what comes back --------------------------------------------------------------------------

    def take(self, message: ServerMessage) -> None:
        """A message that is for one of those who wait, or for nobody."""
        match message:
            case Chunks():
                self._take_chunks(message.chunks, Handle.take_chunk)
            case Replay():
                self._take_chunks(message.chunks, Handle.take_again)
            case Refused():
                self._refused(message)
            case Info() | Tokens() | Text():
                self._answer(message.request_id, message)

    def _take_chunks(
        self, chunks: list[Chunk], take: Callable[[Handle, Chunk, float], None]
    ) -> None:
        received_at = now()
        for chunk in chunks:
            handle = self._handles.get(chunk.request_id)
            if handle is None:
                self._unknown(chunk)
                continue
            if chunk.end is not None and chunk.end.error is not None:
                error = chunk.end.error  # the scheduler may refuse what the front door let pass
                if handle.retry_later(error, self._retry_timeout, self._resend):
                    continue
            try:
                take(handle, chunk, received_at)
            except GapFound:
                handle.interrupt()
                self._resend(handle)
            self._forget_if_done(handle)

    def _unknown(self, chunk: Chunk) -> None:
        """Usually of a request that was just aborted; but that may have been lost on its way."""
        if self._was_interrupted and chunk.end is None:
            self._send(Abort(PROTOCOL_VERSION, chunk.request_id))

    def _refused(self, message: Refused) -> None:
        self._answer(message.request_id, message.error)
        handle = self._handles.get(message.request_id)
        if handle is None or handle.retry_later(message.error, self._retry_timeout, self._resend):
            return
        handle.fail(message.error)
        self._forget_if_done(handle)

    def _forget_if_done(self, handle: Handle) -> None:
        if handle.done:
            self._handles.pop(handle.request_id, None)

    def fail_all(self, error: ErrorInfo) -> None:
        """Nothing will come any more."""
        self._unsent_aborts.clear()
        handles, self._handles = list(self._handles.values()), {}
        for handle in handles:
            handle.fail(error)
        for name in self._questions:
            self._answer(name, error)

    # --- a lost connection ------------------------------------------------------------------------

    def interrupt(self) -> None:
        """What was under way may be lost."""
        self._was_interrupted = True
        for handle in self._handles.values():
            if handle.was_sent:
                handle.interrupt()

    def resend(self) -> None:
        """The server is there again: it is told what is still wanted, in the same words."""
        for handle in list(self._handles.values()):
            self._resend(handle)
        for question, answer in self._questions.values():
            if not answer.done():
                self._send(question)
        aborts, self._unsent_aborts = self._unsent_aborts, []
        for request_id in aborts:
            self._send(Abort(PROTOCOL_VERSION, request_id))

    def _resend(self, handle: Handle) -> None:
        """Send a request again, as such where the server may know it."""
        message = msgspec.structs.replace(handle.message, resent=handle.was_sent)
        try:
            handle.was_resent |= handle.was_sent
            handle.was_sent |= self._send(message)
        except InvalidRequest as error:  # another server may take less than the one before
            handle.fail(ErrorInfo.of(error))
            self._forget_if_done(handle)
            return
        if handle.abort_requested:
            self._send(Abort(PROTOCOL_VERSION, handle.request_id))
