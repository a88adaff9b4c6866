"""Send one run's requests through one or more clients, and record what comes back."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from bench.load.workload import PlannedRequest, Prompt
from bench.metrics.metrics import RequestRecord
from quadriga.clock import now
from quadriga.errors import QuadrigaError
from quadriga.sampling.params import SamplingParams

Clock = Callable[[], float]
AT_ONCE = 0.0
"""A gap: each request leaves when the submit of the one before has ended."""


class BenchClient(Protocol):
    """What the bench needs of quadriga.client.AsyncClient; chunks are its StreamChunks."""

    def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        truncate_prompt: bool | None = None,
        priority: int = 0,
    ) -> AsyncIterator[Any]:
        """Send at once; the answer comes through the iterator."""


@dataclass(frozen=True, slots=True)
class Run:
    """The records of a run, in the order of its jobs. start: Unix seconds. submit_wall: seconds
    until all were sent."""

    records: list[RequestRecord]
    start: float
    submit_wall: float


async def drive(
    clients: Sequence[BenchClient],
    jobs: Sequence[PlannedRequest],
    params: SamplingParams,
    gap: float | None = AT_ONCE,
    truncate: bool | None = None,
    on_done: Callable[[], None] = lambda: None,
    clock: Clock = now,
    limit: int | None = None,
) -> Run:
    """Send every request when it is due, and wait for every end.

    gap: seconds from the end of a submit to the next; None: by each request's `at`, counted from
    the start of the run, so that a late request does not delay those after it. One that follows
    another always waits for that one's end. The clients of the requests share the connections in
    turn. on_done is called once for each request that has ended. limit: so many are under way at
    most; one that is due waits for the end of another.
    """
    return await _Drive(clients, jobs, params, truncate, on_done, clock, limit).run(gap)


class _Drive:
    """A run under way: one task per request that was sent."""

    def __init__(
        self,
        clients: Sequence[BenchClient],
        jobs: Sequence[PlannedRequest],
        params: SamplingParams,
        truncate: bool | None,
        on_done: Callable[[], None],
        clock: Clock,
        limit: int | None,
    ) -> None:
        self._jobs = jobs
        self._params = params
        self._truncate = truncate
        self._on_done = on_done
        self._clock = clock
        self._room = asyncio.Semaphore(len(jobs) if limit is None else limit)
        self._connections = _connections(clients, jobs)
        self._followers = _followers(jobs)
        self._records: dict[int, RequestRecord] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, gap: float | None) -> Run:
        start = self._clock()
        try:
            if gap is None:
                await self._send_by_the_clock(start)
            else:
                await self._send_in_turn(start, gap)
            while self._tasks:
                await asyncio.gather(*self._tasks)
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        records = [self._records[index] for index in range(len(self._jobs))]
        return Run(records, start, max(record.submit_end for record in records) - start)

    async def _send_by_the_clock(self, start: float) -> None:
        """Each request that follows no other, at its own time."""
        for index in sorted(self._roots(), key=lambda root: self._jobs[root].request.at):
            due = start + self._jobs[index].request.at
            await self._wait_until(due)
            await self._room.acquire()
            self._send(index, self._jobs[index].prompt, due)

    async def _send_in_turn(self, start: float, gap: float) -> None:
        """Each request that follows no other, a gap after the submit before."""
        due = start
        for index in self._roots():
            await self._wait_until(due)
            await self._room.acquire()
            due = self._send(index, self._jobs[index].prompt, None).submit_end + gap

    def _roots(self) -> list[int]:
        return [i for i, job in enumerate(self._jobs) if job.request.follows is None]

    async def _wait_until(self, due: float) -> None:
        """Sleep until then. Never without giving way, so that arrivals are stamped in time."""
        await asyncio.sleep(max(0.0, due - self._clock()))

    def _send(self, index: int, prompt: Prompt, due: float | None) -> RequestRecord:
        """Submit a request, for which there is room; a task of its own reads the answer."""
        request = self._jobs[index].request
        params = msgspec.structs.replace(self._params, max_new_tokens=request.max_new_tokens)
        options = {"priority": request.priority} if request.priority else {}
        began = self._clock()
        chunks: AsyncIterator[Any] | QuadrigaError
        try:
            chunks = self._connections[request.client].submit(
                prompt, params, truncate_prompt=self._truncate, **options
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
            self._room.release()
        self._ended(record, prompt, generated)

    def _ended(self, record: RequestRecord, prompt: Prompt, generated: list[int]) -> None:
        """Let those go that wait for this one."""
        self._on_done()
        for index in self._followers.get(record.index, ()):
            head: list[int] = []
            if self._jobs[index].request.continues:
                assert isinstance(prompt, list), "only token ids can be continued"
                head = prompt + generated
            self._start(self._follow(index, record, head))

    async def _follow(self, index: int, before: RequestRecord, head: list[int]) -> None:
        """Send a request when its time after the end of another has come, with `head` in front."""
        job = self._jobs[index]
        if job.request.continues and before.error is not None:
            self._leave_out(index, before)
            return
        due = before.finished + job.request.at
        await self._wait_until(due)
        await self._room.acquire()
        self._send(index, head + job.prompt if isinstance(job.prompt, list) else job.prompt, due)

    def _leave_out(self, index: int, before: RequestRecord) -> None:
        """The rest of a chat cannot be sent when a turn has failed."""
        record = RequestRecord(
            index, client=self._jobs[index].request.client, finished=before.finished
        )
        record.error = f"not sent: request {before.index}, which it continues, failed"
        self._records[index] = record
        self._ended(record, [], [])

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it as a task. One that breaks is kept, so that it is seen."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._drop_if_done)

    def _drop_if_done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is None:
            self._tasks.discard(task)


def _connections(
    clients: Sequence[BenchClient], jobs: Sequence[PlannedRequest]
) -> dict[int, BenchClient]:
    """The connection of each client that the requests name."""
    named = dict.fromkeys(job.request.client for job in jobs)
    return {name: clients[place % len(clients)] for place, name in enumerate(named)}


def _followers(jobs: Sequence[PlannedRequest]) -> dict[int, list[int]]:
    """Which requests wait for the end of each."""
    followers = defaultdict(list)
    for index, job in enumerate(jobs):
        if job.request.follows is not None:
            followers[job.request.follows].append(index)
    return followers


async def _read(
    chunks: AsyncIterator[Any] | QuadrigaError, record: RequestRecord, clock: Clock
) -> list[int]:
    """Fill in the record from the chunks of its request; the generated ids."""
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
