"""A request under way, as its client sees it."""

import asyncio
from collections.abc import Callable

from quadriga.client.choice_stream import ChoiceStream, ToldOtherwise
from quadriga.client.types import Completion, StreamChunk
from quadriga.clock import now
from quadriga.errors import (
    DeadlineExceeded,
    QuadrigaError,
    QueueFull,
    RequestAborted,
    RequestFailed,
)
from quadriga.wire.messages.public import Chunk, ErrorInfo, Generate

Sink = Callable[[StreamChunk | QuadrigaError], None]
"""Takes each chunk of a request at the moment at which it comes, or the error that ends it."""
MIN_RETRY_PAUSE_S = 0.05


class Handle:
    """A request under way: an async iterator of its StreamChunks, unless it has a sink.

    message: as it was sent. on_abort: called when the caller lost interest.

    Attributes:
        was_sent: the server may know the request; it is sent again as such.
        was_resent: it was sent again at least once.
        abort_requested: the caller asked the server to end it.
        done: nothing more will come; no timer is left.
    """

    def __init__(
        self,
        message: Generate,
        on_abort: "Callable[[Handle], None]",
        sink: Sink | None = None,
    ) -> None:
        self.message = message
        self.request_id = message.request_id
        self.was_sent = self.was_resent = self.abort_requested = False
        self._on_abort = on_abort
        self._interrupted = False
        self._deadline: asyncio.Handle | None = None
        self._retry: asyncio.Handle | None = None
        self._refused_at: float | None = None
        self._queue: asyncio.Queue[StreamChunk | QuadrigaError | None] = asyncio.Queue()
        """None is the end; it stays in the queue, so that every reader finds it."""
        self._put: Sink = sink or self._queue.put_nowait
        self._submitted = now()
        self._choices: dict[int, ChoiceStream] = {}
        self._ended: set[int] = set()
        self._was_left = False
        self.done = False

    def __aiter__(self) -> "Handle":
        return self

    async def __anext__(self) -> StreamChunk:
        """The next chunk. Raises the request's error. The end: after the last chunk, or `abort`."""
        item = await self._queue.get()
        if item is None:
            self._queue.put_nowait(None)
            raise StopAsyncIteration
        if isinstance(item, QuadrigaError):
            raise item
        return item

    async def completion(self) -> Completion:
        """Wait for the end, of all choices: choice 0, which has the others. Raises the request's
        error."""
        ended = {}
        async for chunk in self:
            if chunk.completion is not None:
                ended[chunk.index] = chunk.completion
        if self._was_left:
            raise RequestAborted(f"request {self.request_id} was left by its caller")
        if 0 not in ended:
            raise RequestFailed(f"request {self.request_id} was read to its end before")
        first, *others = (ended[index] for index in sorted(ended))
        first.others = others
        return first

    def abort(self) -> None:
        """End the request; nothing happens where it has ended."""
        if not self.done:
            self._was_left = True
            self._finish()
            self._on_abort(self)

    def expire_at(self, when: float) -> None:
        """End the request with DeadlineExceeded at this time of the event loop's clock."""
        self._deadline = asyncio.get_running_loop().call_at(when, self._expire)

    def _expire(self) -> None:
        self._finish(
            DeadlineExceeded(
                f"request {self.request_id} did not finish within {self.message.timeout} s; it was"
                " aborted"
            )
        )
        self._on_abort(self)

    def interrupt(self) -> None:
        """What is under way may be lost: nothing of it is taken before the server tells it again,
        from its beginning."""
        self._interrupted = True
        self._refused_at = None
        self._cancel_retry()

    def retry_later(
        self, error: ErrorInfo, timeout: float, send: "Callable[[Handle], None]"
    ) -> bool:
        """Wait for room at a server that refused the request although another one before it, or the
        same one before the connection was lost, had accepted it.

        Args:
            error: why it was refused.
            timeout: seconds after the first refusal in which the request is sent again, where it
                has no timeout of its own.
            send: called when it is time to send the request again.

        Returns:
            False where the refusal stands.
        """
        if self.done or not self.was_resent or error.code != QueueFull.code:
            return False
        loop = asyncio.get_running_loop()
        if self._refused_at is None:
            self._refused_at = loop.time()
        pause = error.retry_after
        if pause is not None and self._deadline is None:
            left = self._refused_at + timeout - loop.time()
            pause = min(pause, left) if left > 0 else None
        if pause is None:
            return False
        self._cancel_retry()
        self._retry = loop.call_later(max(pause, MIN_RETRY_PAUSE_S), send, self)
        return True

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def take_again(self, chunk: Chunk, received_at: float) -> None:
        """A chunk that has all of its choice up to now came."""
        self._cancel_retry()
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
            self._finish(
                RequestFailed(
                    f"request {self.request_id} was lost with a part of the server, and what it"
                    " gave when it ran again is not what it had given before; send it again"
                )
            )
            self._on_abort(self)
            return
        if chunk.end is not None:
            self._ended.add(chunk.index)
            is_last = len(self._ended) == self.message.params.n
            if chunk.end.error is not None:
                self._finish(chunk.end.error.exception())
                if not is_last:
                    self._on_abort(self)
                return
            if is_last:
                self._finish(item)
                return
        if item is not None:
            self._put(item)

    def _choice(self, index: int) -> ChoiceStream:
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = ChoiceStream(self.request_id, index, self._submitted)
        return choice

    def fail(self, error: ErrorInfo) -> None:
        """The request ends with an error; nothing happens where it has ended."""
        if not self.done:
            self._finish(error.exception())

    def _finish(self, last: StreamChunk | QuadrigaError | None = None) -> None:
        """Nothing comes after `last`."""
        self.done = True
        self._cancel_retry()
        if self._deadline is not None:
            self._deadline.cancel()
        if last is not None:
            self._put(last)
        self._queue.put_nowait(None)
