"""Send one run's requests through one or more clients, and record what comes back."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bench.metrics import Record
from bench.workload import Prompt, Schedule
from quadriga.errors import QuadrigaError
from quadriga.sampling import SamplingParams

AT_ONCE = Schedule()
Clock = Callable[[], float]


class BenchClient(Protocol):
    """What the bench needs of quadriga.client.AsyncClient; chunks are its StreamChunks."""

    def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        truncate_prompt: bool | None = None,
    ) -> AsyncIterator[Any]:
        """Send at once; the answer comes through the iterator."""


@dataclass(frozen=True, slots=True)
class Run:
    """The records of a run, in the order of sending. submit_wall: seconds until all were sent."""

    records: list[Record]
    submit_wall: float


async def drive(
    clients: Sequence[BenchClient],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    schedule: Schedule = AT_ONCE,
    truncate: bool | None = None,
    on_done: Callable[[], None] = lambda: None,
    clock: Clock = time.time,
) -> Run:
    """Send every prompt when the schedule says so, and wait for every end.

    on_done is called once for each request that has ended.
    """
    records: list[Record] = []
    readers: list[asyncio.Task[None]] = []
    start = ended = clock()
    try:
        for index, prompt in enumerate(prompts):
            await _wait_until(schedule.due(index, start, ended), clock)
            client = clients[index % len(clients)]
            began = clock()
            chunks = _submit(client, prompt, params, truncate)
            ended = clock()
            record = Record(index, began, ended, schedule.planned(index, start))
            records.append(record)
            readers.append(asyncio.create_task(_read(chunks, record, on_done, clock)))
        await asyncio.gather(*readers)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return Run(records, submit_wall=ended - start)


async def _wait_until(due: float, clock: Clock) -> None:
    """Sleep until then. Never without giving way, so that what has arrived is stamped in time."""
    await asyncio.sleep(max(0.0, due - clock()))


def _submit(
    client: BenchClient, prompt: Prompt, params: SamplingParams, truncate: bool | None
) -> AsyncIterator[Any] | QuadrigaError:
    try:
        return client.submit(prompt, params, truncate_prompt=truncate)
    except QuadrigaError as error:
        return error


async def _read(
    chunks: AsyncIterator[Any] | QuadrigaError,
    record: Record,
    on_done: Callable[[], None],
    clock: Clock,
) -> None:
    """Fill in the record from the chunks of its request."""
    try:
        if isinstance(chunks, QuadrigaError):
            raise chunks
        async for chunk in chunks:
            record.token_times += chunk.token_times
            record.arrivals += [chunk.received_at] * len(chunk.token_ids)
            if chunk.completion is not None:
                record.finished = chunk.received_at
                _complete(record, chunk.completion)
        if not record.finished:
            record.error = "the stream ended without an end marker"
    except QuadrigaError as error:
        record.finished = clock()
        record.error = f"{type(error).__name__}: {error}"
    on_done()


def _complete(record: Record, completion: Any) -> None:
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
