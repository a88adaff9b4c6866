"""The ring's requests behind one web request: one for each prompt, each with n choices."""

import asyncio
from collections.abc import Callable

import msgspec

from quadriga.client.async_client import AsyncClient, RequestOptions
from quadriga.client.request_handle import RequestHandle, Sink
from quadriga.client.types import Completion, Prompt, StreamChunk
from quadriga.errors import QuadrigaError
from quadriga.sampling.params import SamplingParams


class RequestGroup:
    """Collects what comes for any of its choices, which are numbered through all prompts.

    Everything that has come by the time at which the reader takes it is taken at once: a reader
    that is slower than the ring gets fewer and larger pieces, and what is kept is bounded by the
    text of the answers. Leaving the `with` block aborts what has not ended. `ended` is set when the
    ring has nothing more to say. on_submit is told of every prompt.
    """

    def __init__(self, ring: AsyncClient, on_submit: Callable[[SamplingParams], None]) -> None:
        self._ring = ring
        self._on_submit = on_submit
        self._loop = asyncio.get_running_loop()
        self._handles: list[RequestHandle] = []
        self._items: list[tuple[int, StreamChunk]] = []
        self._error: QuadrigaError | None = None
        self._choices = 0
        self._open = 0
        self.ended = asyncio.Event()
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> "RequestGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    @property
    def is_over(self) -> bool:
        """Every choice has ended, and all of it was taken."""
        return not self._open and not self._items

    def submit(
        self, prompt: Prompt, params: SamplingParams, stream: bool, options: RequestOptions
    ) -> None:
        """One more prompt, with params.n choices. Raises what submit of the client raises.

        params.max_new_tokens may be 0: the prompt is computed, and nothing comes after it.
        """
        sink = self._sink(self._choices)
        if params.max_new_tokens == 0:
            params, sink = msgspec.structs.replace(params, max_new_tokens=1), _without_answer(sink)
        handle = self._ring.submit(prompt, params, stream=stream, sink=sink, **options)
        self._on_submit(params)
        self._handles.append(handle)
        self._choices += params.n
        self._open += params.n

    def _sink(self, first: int) -> Sink:
        def take(item: StreamChunk | QuadrigaError) -> None:
            if isinstance(item, QuadrigaError):
                self._error = self._error or item
                self._open = 0
            else:
                self._items.append((first + item.index, item))
                self._open -= item.completion is not None
            if not self._open:
                self.ended.set()
            self._wake()

        return take

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[tuple[int, StreamChunk]]:
        """What has come since the last time: at least one piece. Raises a choice's error."""
        if not self._items and self._error is None:
            self._waiter = self._loop.create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        items, self._items = self._items, []
        return items

    async def completions(self) -> list[Completion]:
        """Every choice's completion, in order. Raises the first error."""
        found: dict[int, Completion] = {}
        while not self.is_over:
            for choice, chunk in await self.take():
                if chunk.completion is not None:
                    found[choice] = chunk.completion
        return [found[choice] for choice in range(self._choices)]

    def leave(self) -> None:
        """Nobody reads any more: abort what has not ended, and forget it."""
        for handle in self._handles:
            handle.abort()
        self.ended.set()

    def fail(self, error: QuadrigaError) -> None:
        """The ring will say nothing more, for this reason."""
        self._error = self._error or error
        self._open = 0
        self.ended.set()
        self._wake()

    async def end(self) -> None:
        """End what has not ended; it ends with `abort` and what it had."""
        for handle in self._handles:
            if not handle.done:
                await self._ring.abort(handle.request_id)


def _without_answer(sink: Sink) -> Sink:
    """Leaves of each piece what it says of the prompt. The ring gives one token at least."""

    def take(item: StreamChunk | QuadrigaError) -> None:
        if not isinstance(item, QuadrigaError):
            _leave_out(item)
            if (end := item.completion) is not None:
                _leave_out(end)
                end.finish_reason, end.matched_stop = "length", None
                end.usage = msgspec.structs.replace(end.usage, completion_tokens=0)
        sink(item)

    return take


def _leave_out(item: StreamChunk | Completion) -> None:
    item.text, item.token_ids = "", []
    item.logprobs = None if item.logprobs is None else []
