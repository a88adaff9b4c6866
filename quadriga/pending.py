"""What a client waits for: its requests under way, and the answers to its questions."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from quadriga.choice import GapFound
from quadriga.clock import now
from quadriga.handle import Handle
from quadriga.messages.public import (
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

    send: to the server, now or when it is connected again.
    """

    def __init__(self, send: Callable[[msgspec.Struct], None]) -> None:
        self._send = send
        self._handles: dict[str, Handle] = {}
        self._questions: dict[str, tuple[ClientMessage, asyncio.Future[Any]]] = {}
        self._was_interrupted = False

    @property
    def has_requests(self) -> bool:
        return bool(self._handles)

    def add(self, handle: Handle) -> None:
        """A request was sent."""
        self._handles[handle.request_id] = handle

    def drop(self, handle: Handle) -> bool:
        """Nobody waits for this request any more. Whether somebody did."""
        return self._handles.pop(handle.request_id, None) is not None

    async def ask(self, name: str, question: ClientMessage, timeout: float) -> Any:
        """Send a question and wait for its answer. Raises asyncio.TimeoutError."""
        answer = asyncio.get_running_loop().create_future()
        self._questions[name] = question, answer
        try:
            self._send(question)
            return await asyncio.wait_for(answer, timeout)
        finally:
            del self._questions[name]

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
                _, answer = self._questions.get(message.request_id, (None, None))
                if answer is not None and not answer.done():
                    answer.set_result(message)

    def _take_chunks(
        self, chunks: list[Chunk], take: Callable[[Handle, Chunk, float], None]
    ) -> None:
        received_at = now()
        for chunk in chunks:
            handle = self._handles.get(chunk.request_id)
            if handle is None:
                self._unknown(chunk)
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
        handle = self._handles.get(message.request_id)
        if handle is not None:
            handle.fail(message.error)
            self._forget_if_done(handle)
        _, answer = self._questions.get(message.request_id, (None, None))
        if answer is not None and not answer.done():
            answer.set_exception(message.error.exception())

    def _forget_if_done(self, handle: Handle) -> None:
        if handle.done:
            self._handles.pop(handle.request_id, None)

    def fail_all(self, error: ErrorInfo) -> None:
        """Nothing will come any more."""
        handles, self._handles = list(self._handles.values()), {}
        for handle in handles:
            handle.fail(error)
        for _, answer in self._questions.values():
            if not answer.done():
                answer.set_exception(error.exception())

    # --- a lost connection ------------------------------------------------------------------------

    def interrupt(self) -> None:
        """What was under way may be lost."""
        self._was_interrupted = True
        for handle in self._handles.values():
            handle.interrupt()

    def resend(self) -> None:
        """The server is there again: it is told what is still wanted, in the same words."""
        for handle in self._handles.values():
            self._resend(handle)
        for question, answer in self._questions.values():
            if not answer.done():
                self._send(question)

    def _resend(self, handle: Handle) -> None:
        self._send(msgspec.structs.replace(handle.message, resent=True))
