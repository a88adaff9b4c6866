"""A request under way, seen by its client.

ChoiceStream collects the text and tokens of one choice; RequestHandle waits for all of them.
"""

import asyncio
from collections.abc import Callable

from quadriga.client.types import (
    Completion,
    ForkSource,
    StreamChunk,
    Timings,
    TokenLogprob,
    read_logprobs,
    read_prompt_logprobs,
)
from quadriga.clock import now
from quadriga.errors import (
    DeadlineExceeded,
    QuadrigaError,
    QueueFull,
    QuotaExceeded,
    RequestAborted,
    RequestFailed,
)
from quadriga.wire.client import Accepted, AnyErrorInfo, Chunk, End, Generate
from quadriga.wire.packing import unpack_floats, unpack_ids

# After these a request that was accepted once before is sent again.
REFUSALS = (QueueFull.code, QuotaExceeded.code)


class ChunkGap(Exception):
    """A chunk before this one is missing."""


class ReplayMismatch(Exception):
    """A replay differs from what was received before."""


class ChoiceStream:
    """Collects the chunks of a choice.

    The server may replay a choice from its start, perhaps with less than has arrived already.
    `_num_sent_tokens` and `_num_sent_chars` are the position of the server's current pass.

    Args:
        request: the message of the request.
        index: index of the choice.
        submitted_at: Unix time of the submission.
    """

    def __init__(self, request: Generate, index: int, submitted_at: float) -> None:
        self._request_id = request.request_id
        self._index = index
        self._texts: list[str] = []
        self._num_chars = 0
        self._token_ids: list[int] = []
        self._source = ForkSource(request, self._token_ids)
        self._num_sent_tokens = 0
        self._num_sent_chars = 0
        self._timings = Timings(submitted=submitted_at)
        self._logprobs: list[TokenLogprob] | None = None
        self._prompt_logprobs: list[TokenLogprob] | None = None

    def restart(self) -> None:
        """Expect a replay: the next chunk starts with the first token."""
        self._num_sent_tokens = self._num_sent_chars = 0

    def take(self, chunk: Chunk, received_at: float) -> StreamChunk | None:
        """Return what is new in a chunk; None if nothing is.

        Raises:
            ChunkGap: a chunk is missing; this object is unchanged.
            ReplayMismatch: a replay has other tokens than before.
        """
        ids = unpack_ids(chunk.token_ids).tolist()
        self._check_follows(chunk, len(ids))
        num_known = min(len(self._token_ids) - self._num_sent_tokens, len(ids))
        if ids[:num_known] != self._token_ids[self._num_sent_tokens :][:num_known]:
            raise ReplayMismatch
        text = chunk.text[self._num_chars - self._num_sent_chars :]
        self._num_sent_tokens += len(ids)
        self._num_sent_chars += len(chunk.text)
        item = StreamChunk(
            self._request_id, text, ids[num_known:], chunk.token_times[num_known:], received_at,
            index=self._index, source=self._source,
        )  # fmt: skip
        if chunk.text_lengths is not None:
            item.text_lengths = chunk.text_lengths[num_known:]
        self._keep(item)
        self._take_logprobs(chunk, ids, item)
        if chunk.end:
            item.completion = self._finish(chunk.end, chunk.vector, received_at)
        is_new = text or item.token_ids or item.prompt_logprobs or chunk.end
        return item if is_new else None

    def _check_follows(self, chunk: Chunk, num_ids: int) -> None:
        tokens = chunk.end.usage.completion_tokens if chunk.end else 0
        if chunk.text_offset != self._num_sent_chars or tokens > self._num_sent_tokens + num_ids:
            raise ChunkGap

    def _keep(self, item: StreamChunk) -> None:
        self._texts.append(item.text)
        self._num_chars += len(item.text)
        self._token_ids += item.token_ids
        self._timings.token_times += filter(None, item.token_times)  # a given token has none

    def _take_logprobs(self, chunk: Chunk, ids: list[int], item: StreamChunk) -> None:
        if chunk.logprobs is not None:
            logprobs = read_logprobs(ids, chunk.logprobs)
            item.logprobs = logprobs[len(ids) - len(item.token_ids) :]
            self._logprobs = [*(self._logprobs or ()), *item.logprobs]
        if chunk.prompt_logprobs is not None and self._prompt_logprobs is None:
            item.prompt_logprobs = read_prompt_logprobs(chunk.prompt_logprobs)
            self._prompt_logprobs = item.prompt_logprobs

    def _finish(self, end: End, vector: bytes | None, received_at: float) -> Completion:
        timings, times = self._timings, end.times
        timings.received, timings.tokenized = times.received, times.tokenized
        timings.admitted, timings.first_token = times.admitted, times.first_token
        timings.detokenized, timings.delivered = times.detokenized, received_at
        timings.reconcile()
        return Completion(
            request_id=self._request_id,
            text="".join(self._texts),
            token_ids=self._token_ids,
            finish_reason=end.finish_reason,
            usage=end.usage,
            timings=timings,
            matched_stop=end.matched_stop,
            index=self._index,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            vector=None if vector is None else unpack_floats(vector),
            source=self._source._replace(matched_stop=end.matched_stop),
        )


# Called with each chunk of a request when it arrives, or with the error that ends it.
Sink = Callable[[StreamChunk | QuadrigaError], None]
# Called once, before each chunk, when the server has prepared a request.
AcceptedSink = Callable[[Accepted], None]
MIN_RETRY_PAUSE_S = 0.05


class RequestHandle:
    """A request under way: an async iterator of its StreamChunks, unless it has a sink.

    Args:
        message: the request.
        on_abort: called when the client aborts the request.
        sink: receives the chunks in place of the iterator.
        on_accepted: called with the Accepted of the request, if the message asks for it.

    Attributes:
        was_sent: the server may know the request.
        was_resent: the request was sent more than once.
        abort_requested: the caller asked the server to abort the request.
        done: the request has ended, and no timer is left.
        adapter_id: id of the adapter that the request runs with; "": none, or it is not known yet.
    """

    def __init__(
        self,
        message: Generate,
        on_abort: "Callable[[RequestHandle], None]",
        sink: Sink | None,
        on_accepted: AcceptedSink | None,
    ) -> None:
        self.message = message
        self.request_id = message.request_id
        self.was_sent = self.was_resent = self.abort_requested = False
        self._on_abort = on_abort
        self._interrupted = False
        self._deadline: asyncio.Handle | None = None
        self._retry: asyncio.Handle | None = None
        self._refused_at: float | None = None
        # None is the end; it stays in the queue, so that every reader finds it.
        self._queue: asyncio.Queue[StreamChunk | QuadrigaError | None] = asyncio.Queue()
        self._put: Sink = sink or self._queue.put_nowait
        self._on_accepted = on_accepted
        self._misses_accepted = on_accepted is not None
        self.adapter_id = ""
        self._submitted_at = now()
        self._choices: dict[int, ChoiceStream] = {}
        self._ended: set[int] = set()
        self._was_aborted = False
        self.done = False

    def __aiter__(self) -> "RequestHandle":
        return self

    async def __anext__(self) -> StreamChunk:
        """Return the next chunk, or raise the request's error."""
        item = await self._queue.get()
        if item is None:
            self._queue.put_nowait(None)
            raise StopAsyncIteration
        if isinstance(item, QuadrigaError):
            raise item
        return item

    async def completion(self) -> Completion:
        """Wait for the end of all choices and return choice 0, which holds the others.

        Raises:
            QuadrigaError: the request failed, for this reason.
        """
        ended = {}
        async for chunk in self:
            if chunk.completion is not None:
                ended[chunk.index] = chunk.completion
        if self._was_aborted:
            raise RequestAborted(f"request {self.request_id} was aborted by its caller")
        if 0 not in ended:
            raise RequestFailed(f"request {self.request_id} was read to its end before")
        first, *others = (ended[index] for index in sorted(ended))
        first.others = others
        return first

    def abort(self) -> None:
        """Abort the request; nothing happens if it has ended."""
        if not self.done:
            self._was_aborted = True
            self._finish()
            self._on_abort(self)

    def expire_at(self, deadline: float) -> None:
        """Fail the request with DeadlineExceeded at this time of the event loop's clock."""
        self._deadline = asyncio.get_running_loop().call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._finish(
            DeadlineExceeded(
                f"request {self.request_id} did not finish within {self.message.timeout} s; it was"
                " aborted"
            )
        )
        self._on_abort(self)

    def follow_predecessor(self) -> None:
        """Take over the request of a client before: all of it comes again, in a replay."""
        self.was_sent = True
        self.interrupt()

    def interrupt(self) -> None:
        """Ignore chunks until the server replays the request, since some may be lost."""
        self._interrupted = True
        self._refused_at = None
        self._cancel_retry()

    def retry_later(
        self, error: AnyErrorInfo, timeout: float, send: "Callable[[RequestHandle], None]"
    ) -> bool:
        """Send a request that was accepted before again, if the server has no room for it now.

        Args:
            error: the refusal.
            timeout: seconds after the first refusal during which a request without a timeout of
                its own is sent again.
            send: sends the request.

        Returns:
            False if the refusal is final.
        """
        if self.done or not self.was_resent or error.code not in REFUSALS:
            return False
        loop = asyncio.get_running_loop()
        if self._refused_at is None:
            self._refused_at = loop.time()
        pause = error.retry_after
        if pause is not None and self._deadline is None:
            remaining = self._refused_at + timeout - loop.time()
            pause = min(pause, remaining) if remaining > 0 else None
        if pause is None:
            return False
        self._cancel_retry()
        self._retry = loop.call_later(max(pause, MIN_RETRY_PAUSE_S), send, self)
        return True

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def accept(self, message: Accepted) -> None:
        """Pass on that the server has prepared the request, unless it is known already."""
        on_accepted, self._on_accepted = self._on_accepted, None
        self._misses_accepted = False
        if on_accepted is not None and not self.done:
            on_accepted(message)

    def use_adapter(self, adapter_id: str) -> None:
        """Note the id of the adapter that the request runs with.

        One that runs again, after a part of its answer has come, has to run with the same.
        """
        if self.adapter_id not in ("", adapter_id) and self._choices and not self.done:
            self._finish(
                RequestFailed(
                    f"request {self.request_id} was lost with a part of the server, and its adapter"
                    f" {self.message.adapter!r} has another content by now"
                    f" ({adapter_id[:12]}, not {self.adapter_id[:12]}); send it again"
                )
            )
            self._on_abort(self)
        self.adapter_id = adapter_id

    def on_replay(self, chunk: Chunk, received_at: float) -> None:
        """Handle a replay: a chunk with everything of its choice up to now."""
        self._cancel_retry()
        if self._interrupted:
            self._interrupted = False
            for choice in self._choices.values():
                choice.restart()
        self._choice(chunk.index).restart()
        self.on_chunk(chunk, received_at)

    def on_chunk(self, chunk: Chunk, received_at: float) -> None:
        """Handle a chunk. Raise ChunkGap if one before it, or the Accepted, is missing."""
        if self.done or self._interrupted or chunk.index in self._ended:
            return
        self._check_accepted(chunk)
        try:
            item = self._choice(chunk.index).take(chunk, received_at)
        except ReplayMismatch:
            self._finish(
                RequestFailed(
                    f"request {self.request_id} was lost with a part of the server, and its output"
                    " when it ran again differs from its output before; send it again"
                )
            )
            self._on_abort(self)
            return
        if item is not None and item.completion is not None:
            item.completion.adapter = self.adapter_id
        if chunk.end is not None:
            self._ended.add(chunk.index)
            is_last = len(self._ended) == self.message.params.n
            if chunk.end.error is not None:
                if item is not None and (item.text or item.token_ids or item.prompt_logprobs):
                    item.completion = None
                    self._put(item)  # what comes with an error came before it
                self._finish(chunk.end.error.exception())
                if not is_last:
                    self._on_abort(self)
                return
            if is_last:
                self._finish(item)
                return
        if item is not None:
            self._put(item)

    def _check_accepted(self, chunk: Chunk) -> None:
        """Raise ChunkGap, once, if the Accepted was lost with a connection."""
        has_failed = chunk.end is not None and chunk.end.error is not None
        if self._misses_accepted and not has_failed:
            self._misses_accepted = False
            raise ChunkGap

    def _choice(self, index: int) -> ChoiceStream:
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = ChoiceStream(self.message, index, self._submitted_at)
        return choice

    def fail(self, error: AnyErrorInfo) -> None:
        """Fail the request; nothing happens if it has ended."""
        if not self.done:
            self._finish(error.exception())

    def _finish(self, last: StreamChunk | QuadrigaError | None = None) -> None:
        """End the request with a last item."""
        self.done = True
        self._cancel_retry()
        if self._deadline is not None:
            self._deadline.cancel()
        if last is not None:
            self._put(last)
        self._queue.put_nowait(None)
