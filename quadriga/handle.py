"""A request under way, as its client sees it."""

import asyncio
import time
from collections.abc import Callable

from quadriga import errors
from quadriga.completion import Completion, StreamChunk, Timings
from quadriga.errors import DeadlineExceeded, QuadrigaError, RequestFailed
from quadriga.messages.ids import unpack_ids
from quadriga.messages.public import Chunk, End, ErrorInfo

Sink = Callable[[StreamChunk | QuadrigaError], None]
"""Takes each chunk of a request at the moment at which it comes, or the error that ends it."""


class Handle:
    """A request under way: an async iterator of its StreamChunks, unless it has a sink.

    on_abort: called when the caller lost interest.
    """

    def __init__(
        self,
        request_id: str,
        timeout: float | None,
        on_abort: "Callable[[Handle], None]",
        sink: Sink | None = None,
    ) -> None:
        self.request_id = request_id
        self._on_abort = on_abort
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._timeout = timeout
        self._queue: asyncio.Queue[StreamChunk | QuadrigaError] = asyncio.Queue()
        self._put: Sink = sink or self._queue.put_nowait
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._timings = Timings(submitted=time.time())
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
        """Wait for the end. Raises the request's error."""
        async for chunk in self:
            if chunk.completion is not None:
                return chunk.completion
        raise RequestFailed(f"request {self.request_id} was read to its end before")

    def abort(self) -> None:
        """End the request; nothing happens where it has ended."""
        if not self.done:
            self.done = True
            self._on_abort(self)

    def take_chunk(self, chunk: Chunk, received_at: float) -> None:
        """A chunk came."""
        token_ids = unpack_ids(chunk.token_ids).tolist()
        self._texts.append(chunk.text)
        self._token_ids += token_ids
        self._timings.token_times += chunk.token_times
        completion = self._finish(chunk.end, received_at) if chunk.end else None
        item = StreamChunk(
            self.request_id, chunk.text, token_ids, chunk.token_times, received_at, completion
        )
        if chunk.end and chunk.end.error:
            self.fail(chunk.end.error)
        else:
            self._put(item)

    def fail(self, error: ErrorInfo) -> None:
        """The request ends with an error."""
        self.done = True
        self._put(errors.from_code(error.code, error.message, error.field))

    def _finish(self, end: End, received_at: float) -> Completion:
        self.done = True
        timings, times = self._timings, end.times
        timings.received, timings.tokenized = times.received, times.tokenized
        timings.admitted, timings.first_token = times.admitted, times.first_token
        timings.detokenized, timings.delivered = times.detokenized, received_at
        return Completion(
            request_id=self.request_id,
            text="".join(self._texts),
            token_ids=self._token_ids,
            finish_reason=end.finish_reason,
            usage=end.usage,
            timings=timings,
            matched_stop=end.matched_stop,
        )
