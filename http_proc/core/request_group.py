"""The requests to the server behind one web request: one per prompt, each with n choices.

`TokenOrder` puts the tokens of several choices in the one order that depends on nothing but them.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import msgspec

from http_proc.core import errors, observe
from http_proc.core.resumption import Resumption
from http_proc.core.served_model import ServedModel
from http_proc.core.session import current_session
from quadriga.client.async_client import RequestOptions
from quadriga.client.receipts import Receipt
from quadriga.client.request_handle import RequestHandle, Sink
from quadriga.client.types import Completion, Prompt, StreamChunk
from quadriga.errors import QuadrigaError, RequestFailed
from quadriga.sampling.params import SamplingParams
from quadriga.wire.client import Accepted

Chunks = list[tuple[int, StreamChunk]]


class TokenOrder:
    """Cut chunks into single tokens and ends, and put those of all choices in turns.

    First comes the first token of each choice, then the second of each, and so on. A choice that is
    ahead of another waits; one that has ended is left out.

    Args:
        num_choices: number of choices, of all prompts together.
    """

    def __init__(self, num_choices: int) -> None:
        self._pieces: list[deque[StreamChunk]] = [deque() for _ in range(num_choices)]
        self._open = list(range(num_choices))
        self._turn = 0

    def push(self, chunks: Iterable[tuple[int, StreamChunk]]) -> Chunks:
        """Take the next chunks, by choice, and return the pieces whose turn it is."""
        for choice, chunk in chunks:
            self._pieces[choice].extend(tokens_of(chunk))
        ready: Chunks = []
        while self._open and (pieces := self._pieces[self._open[self._turn]]):
            piece = pieces.popleft()
            ready.append((self._open[self._turn], piece))
            if piece.completion is None:
                self._turn += 1
            else:
                del self._open[self._turn]
            self._turn = self._turn % len(self._open) if self._open else 0
        return ready


def tokens_of(chunk: StreamChunk) -> Iterator[StreamChunk]:
    """Yield a chunk for each token of a chunk, and one for the end of the choice if it is there.

    The tokens with which the answer begins as it was given (`first_token_ids`) stay together.
    """
    if chunk.completion is None and len(chunk.token_ids) <= 1:
        yield chunk
        return
    lengths = chunk.text_lengths
    if lengths is None or len(lengths) != len(chunk.token_ids):  # as of a prompt alone
        lengths = [0] * len(chunk.token_ids)
    position, prompt_logprobs = 0, chunk.prompt_logprobs
    for tokens in _pieces_of(chunk):
        length = sum(lengths[tokens])
        yield StreamChunk(
            chunk.request_id,
            chunk.text[position : position + length],
            chunk.token_ids[tokens],
            chunk.token_times[tokens],
            chunk.received_at,
            index=chunk.index,
            logprobs=None if chunk.logprobs is None else chunk.logprobs[tokens],
            prompt_logprobs=prompt_logprobs,
        )
        position, prompt_logprobs = position + length, None
    if chunk.completion is not None:
        yield StreamChunk(
            chunk.request_id,
            chunk.text[position:],
            [],
            [],
            chunk.received_at,
            chunk.completion,
            chunk.index,
            None if chunk.logprobs is None else [],
            prompt_logprobs,
        )


def _pieces_of(chunk: StreamChunk) -> Iterator[slice]:
    """Yield the places of the given tokens of a chunk, which have no time, and of each other."""
    times = chunk.token_times
    num_given = next((index for index, time in enumerate(times) if time), len(times))
    if num_given:
        yield slice(0, num_given)
    for index in range(num_given, len(chunk.token_ids)):
        yield slice(index, index + 1)


class GroupNotes(NamedTuple):
    """Where it is noted what becomes of a group.

    Attributes:
        names: the request's name of each field of the server, for error messages.
        record: of the call that is answered.
        metrics: counts errors.
    """

    names: Mapping[str, str]
    record: observe.CallRecord
    metrics: observe.RequestMetrics


class RequestGroup:
    """Collect the chunks of all choices, which are numbered through all prompts.

    `next_chunks` returns everything that has arrived: a reader slower than the server gets fewer
    and larger batches, and memory is bounded by the text of the answers. What arrived before an
    error is returned before the error is raised, and what arrives after it is dropped. Leaving the
    `with` block aborts the requests that have not finished.

    Args:
        model: answers the requests.
        notes: where it is noted what becomes of the group.

    Attributes:
        poller: asks how far the requests are while the group's stream waits.
        tenant: name of the tenant that the requests belong to; "" without tenants.
        priority: of the requests.
        resumption: makes the requests the same again; None: they are not resumable. The chunks of
            a resumable group have one token each, in an order that only the tokens decide.
        finished: set when the server sends nothing more for this group.
        failed_choice: number of the first choice of the prompt whose error ended the group.
    """

    def __init__(
        self,
        model: ServedModel,
        notes: GroupNotes,
        tenant: str,
        resumption: Resumption | None,
    ) -> None:
        self.tenant = tenant
        self.priority = 0
        self.resumption = resumption
        self.model = model
        is_resumable = resumption is not None
        self._client = model.lasting_client if is_resumable else model.client
        self.poller = model.lasting_progress if is_resumable else model.progress
        self._notes = notes
        self._loop = asyncio.get_running_loop()
        self._handles: list[RequestHandle] = []
        self._chunks: list[tuple[int, StreamChunk]] = []
        self._error: QuadrigaError | None = None
        self._began_at = self._accepted_at = self._loop.time()
        self._num_choices = 0
        self._num_unfinished = 0
        self._num_to_come = 0
        self.failed_choice: int | None = None
        self._finished_choices: set[int] = set()
        self._ended_choices: set[int] = set()
        self._abort: asyncio.Task[None] | None = None
        self.finished = asyncio.Event()
        self._accepted: dict[int, Accepted] = {}
        self._order: TokenOrder | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def __enter__(self) -> "RequestGroup":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.abort()
        if self._abort is not None:
            self._abort.cancel()
        self.finished.set()

    @property
    def request_ids(self) -> list[str]:
        """Ids of the server's requests that have not ended."""
        return [handle.request_id for handle in self._handles if not handle.done]

    @property
    def caller_id(self) -> str:
        """The X-Request-Id of the web request, or the id that the gateway gave it."""
        return self._notes.record.request_id

    @property
    def is_accepted(self) -> bool:
        """Whether every prompt is tokenized."""
        return len(self._accepted) == len(self._handles)

    def stages_until_now(self, stage: str) -> list[observe.Stage]:
        """Return tokenize and `stage`, which ends now, and their seconds by the gateway's clock.

        The list is empty before the prompts are tokenized. `stage`: "" for none.
        """
        if not self.is_accepted:
            return []
        passed = [("tokenize", self._accepted_at - self._began_at)]
        return [*passed, (stage, self._loop.time() - self._accepted_at)] if stage else passed

    @property
    def num_unfinished(self) -> int:
        """Number of choices that the server has not finished."""
        return self._num_unfinished

    @property
    def is_done(self) -> bool:
        """True if every choice has finished without an error, and all its chunks were taken."""
        return not self._num_unfinished and not self._chunks and self._error is None

    def note_stream(self) -> None:
        """Note that the answer is sent in pieces."""
        self._notes.record.inference.is_stream = True

    def expect(self, num_prompts: int) -> None:
        """Stay unfinished until so many prompts have been submitted and have ended."""
        self._num_to_come = num_prompts

    def submit(
        self, prompt: Prompt, params: SamplingParams, stream: bool, options: RequestOptions
    ) -> None:
        """Send one prompt with params.n choices to the server; 0 new tokens compute it alone."""
        prompt_index, sink = len(self._handles), self._sink(self._num_choices)
        asked = self._notes.record.inference
        asked.params, asked.num_choices = asked.params or params, asked.num_choices + params.n

        def accept(message: Accepted) -> None:
            self._accepted[prompt_index] = message
            self._accepted_at = self._loop.time()
            self.wake()

        if params.max_new_tokens == 0:
            params, sink = msgspec.structs.replace(params, max_new_tokens=1), _prompt_only(sink)
        trace = observe.current_trace()
        if trace is not None:
            options = {**options, "traceparent": trace.traceparent}
        kept = None
        if self.resumption is not None:
            params = self.resumption.params(params, prompt_index)
            kept = self.resumption.kept_request(prompt_index)
        if self.model.adapter:
            options = {**options, "adapter": self.model.adapter}
        if params.pooling is None:
            options = {**options, "cache": current_session().hint(options.get("cache"))}
        self.priority = options.get("priority", 0)
        handle = self._client.submit(
            prompt,
            params,
            stream=stream,
            sink=sink,
            on_accepted=accept,
            tenant=self.tenant,
            kept=kept,
            **options,
        )
        if trace is not None:
            trace.tenant = self.tenant
            trace.server_requests.append((self._client, handle.request_id))
        self.model.answers.count_submitted(params)
        self._handles.append(handle)
        self._num_choices += params.n
        self._num_unfinished += params.n
        self._num_to_come = max(0, self._num_to_come - 1)
        self.finished.clear()

    def _sink(self, first_choice: int) -> Sink:
        def take(item: StreamChunk | QuadrigaError) -> None:
            if isinstance(item, QuadrigaError):
                if self._error is None:
                    self.failed_choice = first_choice
                self.fail(item)
                return
            if self._error is not None:
                return
            self._chunks.append((first_choice + item.index, item))
            if item.completion is not None:
                self._num_unfinished -= 1
                self._finished_choices.add(first_choice + item.index)
                self._abort_if_all_ended()
            if not self._num_unfinished and not self._num_to_come:
                self.finished.set()
            self.wake()

        return take

    def wake(self) -> None:
        """Let the reader look again, with or without chunks."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _change(self) -> None:
        """Wait until something arrives."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    async def accepted(self) -> list[Accepted]:
        """Wait until every prompt is tokenized, and return the Accepted of each, in order.

        Raises:
            QuadrigaError: a request has failed before.
        """
        while not self.is_accepted:
            if self._error is not None:
                raise self._error
            if not self._num_unfinished:
                raise RequestFailed("the server has answered a prompt that it did not accept")
            await self._change()
        return [self._accepted[index] for index in range(len(self._handles))]

    async def next_chunks(self) -> list[tuple[int, StreamChunk]]:
        """Wait for chunks and return all that have arrived, by choice, in order of arrival.

        Chunks wait until every prompt is tokenized: no answer begins before, and an error of a
        prompt has a status of its own. Chunks of a resumable group wait for their turn; an error
        drops those whose turn has not come, for their order would depend on its time.

        Returns:
            The chunks; none if something else has woken the reader.

        Raises:
            QuadrigaError: the first error of a choice, behind the chunks that came before it.
        """
        if self._error is None and not self._has_ready_chunks:
            await self._change()
        if not self._has_ready_chunks:
            if self._error is not None:
                raise self._error
            return []
        chunks, self._chunks = self._chunks, []
        if self.resumption is None:
            return chunks
        if self._order is None:
            self._order = TokenOrder(self._num_choices)
        ordered = self._order.push(chunks)
        for choice, chunk in ordered:
            self.resumption.answer.take(choice, chunk)
            if chunk.completion is not None:
                self.resumption.repeat_end(choice, chunk.completion)
        return ordered

    @property
    def _has_ready_chunks(self) -> bool:
        if not self._chunks:
            return False
        return self.is_accepted or not (self._num_unfinished or self._error)

    async def completions(self) -> list[Completion]:
        """Return the completion of every choice, in order. Raises the first error."""
        by_choice: dict[int, Completion] = {}
        while not self.is_done:
            for choice, chunk in await self.next_chunks():
                if chunk.completion is not None:
                    by_choice[choice] = chunk.completion
        return [by_choice[choice] for choice in range(self._num_choices)]

    async def receipts(self, completions: Sequence[Completion]) -> list[Receipt]:
        """Return the receipts of all choices, in order. Raises QuadrigaError."""
        left, info = iter(completions), await self._client.info()
        for handle in self._handles:
            choices = list(islice(left, handle.message.params.n))
            await self._client.add_receipts(handle.message, choices, info)
        return [each.receipt for each in completions if each.receipt is not None]

    def note(self, completion: Completion) -> None:
        """Count a completion, and note it for the request log and the simulation."""
        self.model.answers.count_completion(completion)
        self.model.recent.add(completion, self.priority, self.tenant)
        self._notes.record.completions.append(completion)

    def note_error(self, error: QuadrigaError) -> errors.ApiError:
        """Count and note the error that ends a stream after its begin; return the client's."""
        names, record, metrics = self._notes
        metrics.count_error(record, error.code)
        record.code, record.error = error.code, f"{error.code}: {error}"
        api_error = errors.from_server(error, names)
        api_error.request_id = record.request_id
        return api_error

    def fail(self, error: QuadrigaError) -> None:
        """End the group with `error`, unless it has failed before."""
        self._error = self._error or error
        self._num_unfinished = 0
        self.finished.set()
        self.wake()

    def end_choice(self, choice: int) -> None:
        """Let the server end a choice whose reader needs no more of it.

        The server ends requests, not choices: it does so when the other choices have ended, too.
        """
        self._ended_choices.add(choice)
        self._abort_if_all_ended()

    def _abort_if_all_ended(self) -> None:
        ended = self._ended_choices
        if not ended or self._abort is not None or not self._num_unfinished:
            return
        if len(ended | self._finished_choices) == self._num_choices:
            self._abort = self._loop.create_task(self._try_abort())

    async def _try_abort(self) -> None:
        with suppress(QuadrigaError):  # else the requests go on to their own ends
            await self.abort()

    async def abort(self) -> None:
        """End the open requests, which finish with the reason "abort" and their text so far."""
        for handle in self._handles:
            if not handle.done:
                await self._client.abort(handle.request_id)


def _prompt_only(sink: Sink) -> Sink:
    """Remove the generated token, for the server generates at least one."""

    def take(item: StreamChunk | QuadrigaError) -> None:
        if not isinstance(item, QuadrigaError):
            _clear(item)
            if (completion := item.completion) is not None:
                _clear(completion)
                completion.finish_reason, completion.matched_stop = "length", None
                completion.usage = msgspec.structs.replace(completion.usage, completion_tokens=0)
        sink(item)

    return take


def _clear(item: StreamChunk | Completion) -> None:
    item.text, item.token_ids = "", []
    item.logprobs = None if item.logprobs is None else []
