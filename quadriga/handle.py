"""A request under way, as its client sees it."""

import asyncio
import time
from collections.abc import Callable

from quadriga import errors
from quadriga.choice import Choice
from quadriga.completion import Completion, StreamChunk
from quadriga.errors import DeadlineExceeded, QuadrigaError, RequestFailed
from quadriga.messages.public import Chunk, ErrorInfo

Sink = Callable[[StreamChunk | QuadrigaError], None]
"""Takes each chunk of a request at the moment at which it comes, or the error that ends it."""


class Handle:
    """A request under way: an async iterator of its StreamChunks, unless it has a sink.

    on_abort: called when the caller lost interest. choices: how many it has, each with an end.
    """

    def __init__(
        self,
        request_id: str,
        timeout: float | None,
        on_abort: "Callable[[Handle], None]",
        sink: Sink | None = None,
        choices: int = 1,
    ) -> None:
        self.request_id = request_id
        self._on_abort = on_abort
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._timeout = timeout
        self._queue: asyncio.Queue[StreamChunk | QuadrigaError] = asyncio.Queue()
        self._put: Sink = sink or self._queue.put_nowait
        self._submitted = time.time()
        self._choices: dict[int, Choice] = {}
        self._choices_open = choices
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

    def take_chunk(self, chunk: Chunk, received_at: float) -> None:
        """A chunk came."""
        if self.done:
            return
        choice = self._choices.get(chunk.index)
        if choice is None:
            choice = Choice(self.request_id, chunk.index, self._submitted)
            self._choices[chunk.index] = choice
        item = choice.take(chunk, received_at)
        if chunk.end is not None:
            self._choices_open -= 1
            self.done = self._choices_open == 0
            if chunk.end.error is not None:
                self.abort()
                self.fail(chunk.end.error)
                return
        self._put(item)

    def fail(self, error: ErrorInfo) -> None:
        """The request ends with an error."""
        self.done = True
        self._put(errors.from_code(error.code, error.message, error.field))
