"""A request under way, as its client sees it."""

import asyncio
import time
from collections.abc import Callable

from quadriga.choice import Choice, ToldOtherwise
from quadriga.clock import now
from quadriga.completion import Completion, StreamChunk
from quadriga.errors import DeadlineExceeded, QuadrigaError, RequestFailed
from quadriga.messages.public import Chunk, ErrorInfo, Generate

Sink = Callable[[StreamChunk | QuadrigaError], None]
"""Takes each chunk of a request at the moment at which it comes, or the error that ends it."""


class Handle:
    """A request under way: an async iterator of its StreamChunks, unless it has a sink.

    message: as it was sent. on_abort: called when the caller lost interest.
    """

    def __init__(
        self,
        message: Generate,
        timeout: float | None,
        on_abort: "Callable[[Handle], None]",
        sink: Sink | None = None,
    ) -> None:
        self.message = message
        self.request_id = message.request_id
        self._on_abort = on_abort
        self._interrupted = False
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._timeout = timeout
        self._queue: asyncio.Queue[StreamChunk | QuadrigaError] = asyncio.Queue()
        self._put: Sink = sink or self._queue.put_nowait
        self._submitted = now()
        self._choices: dict[int, Choice] = {}
        self._ended: set[int] = set()
        self.done = False

    def __aiter__(self) -> "Handle":
        return self

    async def __anext__(self) -> StreamChunk:
        """The next chunk. Raises the request's error, or DeadlineExceeded after aborting it."""
        if self.done and self._queue.empty():
            raise StopAsyncIteration
        item = await self._next_item()
        if isinstance(item, QuadrigaError):
            raise item
        return item

    async def _next_item(self) -> "StreamChunk | QuadrigaError":
        if self._deadline is None:
            return await self._queue.get()
        try:
            left = max(0.0, self._deadline - time.monotonic())
            return await asyncio.wait_for(self._queue.get(), left)
        except asyncio.TimeoutError:
            self.abort()
            raise DeadlineExceeded(
                f"request {self.request_id} did not finish within {self._timeout} s; it was aborted"
            ) from None

    async def completion(self) -> Completion:
        """Wait for the end, of all choices: choice 0, which has the others. Raises the request's
        error."""
        ended = {}
        async for chunk in self:
            if chunk.completion is not None:
                ended[chunk.index] = chunk.completion
        if 0 not in ended:
            raise RequestFailed(f"request {self.request_id} was read to its end before")
        first, *others = (ended[index] for index in sorted(ended))
        first.others = others
        return first

    def abort(self) -> None:
        """End the request; nothing happens where it has ended."""
        if not self.done:
            self.done = True
            self._on_abort(self)

    def interrupt(self) -> None:
        """What is under way may be lost: nothing of it is taken before the server tells it again,
        from its beginning."""
        self._interrupted = True

    def take_again(self, chunk: Chunk, received_at: float) -> None:
        """A chunk that has all of its choice up to now came."""
        if self._interrupted:
            self._interrupted = False
            for choice in self._choices.values():
                choice.tell_again()
        self._choice(chunk.index).tell_again()
        self.take_chunk(chunk, received_at)

    def take_chunk(self, chunk: Chunk, received_at: float) -> None:
        """A chunk came. Raises GapFound where the one before it is missing."""
        if self.done or self._interrupted or chunk.index in self._ended:
            return
        try:
            item = self._choice(chunk.index).take(chunk, received_at)
        except ToldOtherwise:
            self.abort()
            self._put(
                RequestFailed(
                    f"request {self.request_id} was lost with a part of the server, and what it"
                    " gave when it ran again is not what it had given before; send it again"
                )
            )
            return
        if chunk.end is not None:
            self._ended.add(chunk.index)
            self.done = len(self._ended) == self.message.params.n
            if chunk.end.error is not None:
                self.abort()
                self.fail(chunk.end.error)
                return
        if item is not None:
            self._put(item)

    def _choice(self, index: int) -> Choice:
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = Choice(self.request_id, index, self._submitted)
        return choice

    def fail(self, error: ErrorInfo) -> None:
        """The request ends with an error."""
        self.done = True
        self._put(error.exception())
