"""Send one run's requests through one or more clients, and record what comes back."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.client.backends import BenchClient
from bench.load.workload import PlannedRequest, Prompt
from quadriga.client.types import Prompt as AnyPrompt
from quadriga.clock import now
from quadriga.errors import QuadrigaError
from quadriga.sampling.params import SamplingParams


@dataclass(slots=True)
class RequestRecord:
    """Time stamps and counts of one request; a time of 0.0 was never reached.

    Attributes:
        submit_start: 0.0: the request was not sent, as the request that it continues failed.
        due: time at which it should have been sent; None: the schedule has no time for it.
        received: stamped by the server, as are tokenized, admitted and first_token.
        finished: arrival of the end marker.
        token_times: end of the step that sampled each token, stamped by the server.
        arrivals: arrival of each token; the tokens of one chunk arrive together.
        chunks: arrival of each chunk that has a token.
    """

    index: int
    submit_start: float = 0.0
    submit_end: float = 0.0
    due: float | None = None
    client: int = 0
    received: float = 0.0
    tokenized: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    token_times: list[float] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    chunks: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""
    error: str | None = None

    @property
    def first_received(self) -> float:
        """Arrival of the first token, or 0.0."""
        return self.arrivals[0] if self.arrivals else 0.0

    @property
    def time_per_token(self) -> float | None:
        """(Last - first) / (n - 1) in seconds; None if all tokens came in one chunk."""
        tokens = max(len(self.arrivals), self.completion_tokens)
        if len(self.arrivals) < 2:
            return None
        return max(0.0, self.arrivals[-1] - self.arrivals[0]) / (tokens - 1)


Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How the requests of a run are sent.

    Attributes:
        params: sampling parameters of every request; max_new_tokens is the request's own.
        gap_s: seconds from the end of a submit to the next one. None: each request is due at its
            `at`, counted from the start of the run, so that a late request delays no other.
        truncate: value of truncate_prompt.
        max_in_flight: bound on requests in flight; a due request waits for the end of another.
        as_chats: send each text as the message of a chat.
    """

    params: SamplingParams
    gap_s: float | None = 0.0
    truncate: bool | None = None
    max_in_flight: int | None = None
    as_chats: bool = False


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One run.

    Attributes:
        records: records in the order of the jobs.
        start: Unix seconds.
        submit_wall: seconds until all requests were sent.
    """

    records: list[RequestRecord]
    start: float
    submit_wall: float


async def drive(
    clients: Sequence[BenchClient],
    jobs: Sequence[PlannedRequest],
    options: SendOptions,
    on_done: Callable[[], None] = lambda: None,
    clock: Clock = now,
) -> LoadRun:
    """Send every request when it is due, and wait for every end.

    A request that follows another one always waits for that one's end. The clients that the
    requests name share the connections in turn. `on_done` is called once for each request that has
    ended.
    """
    return await _Driver(clients, jobs, options, on_done, clock).run()


class _Driver:
    """A run in progress: one task per request that was sent."""

    def __init__(
        self,
        clients: Sequence[BenchClient],
        jobs: Sequence[PlannedRequest],
        options: SendOptions,
        on_done: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._jobs = jobs
        self._options = options
        self._on_done = on_done
        self._clock = clock
        self._in_flight = asyncio.Semaphore(options.max_in_flight or len(jobs))
        self._connections = _connections(clients, jobs)
        self._followers = _followers(jobs)
        self._records: dict[int, RequestRecord] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> LoadRun:
        """Send everything; on cancellation, cancel the requests too."""
        start, gap_s = self._clock(), self._options.gap_s
        try:
            if gap_s is None:
                await self._send_by_the_clock(start)
            else:
                await self._send_in_turn(start, gap_s)
            while self._tasks:
                await asyncio.gather(*self._tasks)
                await asyncio.sleep(0)  # a task that has ended leaves the set in the next round
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        records = [self._records[index] for index in range(len(self._jobs))]
        return LoadRun(records, start, max(record.submit_end for record in records) - start)

    async def _send_by_the_clock(self, start: float) -> None:
        """Send each request that follows no other at its own time."""
        for index in sorted(self._roots(), key=lambda root: self._jobs[root].request.at):
            due = start + self._jobs[index].request.at
            await self._wait_until(due)
            await self._in_flight.acquire()
            self._send(index, self._jobs[index].prompt, due)

    async def _send_in_turn(self, start: float, gap_s: float) -> None:
        """Send each request that follows no other, a gap after the submit before it."""
        due = start
        for index in self._roots():
            await self._wait_until(due)
            await self._in_flight.acquire()
            due = self._send(index, self._jobs[index].prompt, None).submit_end + gap_s

    def _roots(self) -> list[int]:
        return [i for i, job in enumerate(self._jobs) if job.request.follows is None]

    async def _wait_until(self, due: float) -> None:
        """Sleep until `due`; always yield once, so that arrivals are stamped in time."""
        await asyncio.sleep(max(0.0, due - self._clock()))

    def _send(self, index: int, prompt: Prompt, due: float | None) -> RequestRecord:
        """Submit a request within the bound; a task of its own reads the answer."""
        request = self._jobs[index].request
        params = msgspec.structs.replace(
            self._options.params, max_new_tokens=request.max_new_tokens
        )
        priority = {"priority": request.priority} if request.priority else {}
        sent: AnyPrompt = prompt
        if self._options.as_chats and isinstance(prompt, str):
            sent = [{"role": "user", "content": prompt}]
        began = self._clock()
        chunks: AsyncIterator[Any] | QuadrigaError
        try:
            chunks = self._connections[request.client].submit(
                sent, params, truncate_prompt=self._options.truncate, **priority
            )
        except QuadrigaError as error:
            chunks = error
        record = RequestRecord(index, began, self._clock(), due, client=request.client)
        self._records[index] = record
        self._start(self._finish(record, prompt, chunks))
        return record

    async def _finish(
        self, record: RequestRecord, prompt: Prompt, chunks: AsyncIterator[Any] | QuadrigaError
    ) -> None:
        try:
            generated = await _read(chunks, record, self._clock)
        finally:
            self._in_flight.release()
        self._ended(record, prompt, generated)

    def _ended(self, record: RequestRecord, prompt: Prompt, generated: list[int]) -> None:
        """Start the requests that follow this one."""
        self._on_done()
        for index in self._followers.get(record.index, ()):
            head: list[int] = []
            if self._jobs[index].request.continues:
                assert isinstance(prompt, list), "only token ids can be continued"
                head = prompt + generated
            self._start(self._follow(index, record, head))

    async def _follow(self, index: int, before: RequestRecord, head: list[int]) -> None:
        """Send a request that follows `before`, with the tokens `head` in front of its prompt."""
        job = self._jobs[index]
        if job.request.continues and before.error is not None:
            self._leave_out(index, before)
            return
        due = before.finished + job.request.at
        await self._wait_until(due)
        await self._in_flight.acquire()
        self._send(index, head + job.prompt if isinstance(job.prompt, list) else job.prompt, due)

    def _leave_out(self, index: int, before: RequestRecord) -> None:
        """Record the next turn of a chat as failed, as it continues a turn that failed."""
        record = RequestRecord(
            index, client=self._jobs[index].request.client, finished=before.finished
        )
        record.error = f"not sent: request {before.index}, which it continues, failed"
        self._records[index] = record
        self._ended(record, [], [])

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task; a task that raises stays in the set, so that `run` raises too."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._drop_if_done)

    def _drop_if_done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is None:
            self._tasks.discard(task)


def _connections(
    clients: Sequence[BenchClient], jobs: Sequence[PlannedRequest]
) -> dict[int, BenchClient]:
    """Return the connection of each client that the requests name."""
    named = dict.fromkeys(job.request.client for job in jobs)
    return {name: clients[index % len(clients)] for index, name in enumerate(named)}


def _followers(jobs: Sequence[PlannedRequest]) -> dict[int, list[int]]:
    """Return the requests that wait for the end of each request."""
    followers = defaultdict(list)
    for index, job in enumerate(jobs):
        if job.request.follows is not None:
            followers[job.request.follows].append(index)
    return followers


async def _read(
    chunks: AsyncIterator[Any] | QuadrigaError, record: RequestRecord, clock: Clock
) -> list[int]:
    """Fill in the record from the chunks of its request; return the generated ids."""
    generated: list[int] = []
    try:
        if isinstance(chunks, QuadrigaError):
            raise chunks
        async for chunk in chunks:
            generated += chunk.token_ids
            record.token_times += chunk.token_times
            record.arrivals += [chunk.received_at] * len(chunk.token_ids)
            if chunk.token_ids:
                record.chunks.append(chunk.received_at)
            if chunk.completion is not None:
                record.finished = chunk.received_at
                _complete(record, chunk.completion)
        if not record.finished:
            record.error = "the stream ended without an end marker"
    except QuadrigaError as error:
        record.error = f"{type(error).__name__}: {error}"
    record.finished = record.finished or clock()
    return generated


def _complete(record: RequestRecord, completion: Any) -> None:
    record.finish_reason = completion.finish_reason
    record.prompt_tokens = completion.usage.prompt_tokens
    record.completion_tokens = completion.usage.completion_tokens
    record.cached_tokens = completion.usage.cached_tokens
    record.received = completion.timings.received
    record.tokenized = completion.timings.tokenized
    record.admitted = completion.timings.admitted
    record.first_token = completion.timings.first_token
    if record.finish_reason not in ("stop", "length"):
        record.error = f"ended by {record.finish_reason}"
