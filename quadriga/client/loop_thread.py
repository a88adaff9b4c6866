"""An event loop in a thread of its own, for programs without one.

A KeyboardInterrupt may occur between any two bytecodes of the waiting thread. So the loop never
waits for a lock that such a thread may hold: results come back through a SimpleQueue, whose `put`
needs none, unlike the condition of a concurrent.futures.Future. anyio's blocking portal, which uses
these futures, leaves tasks behind or hangs under the Ctrl-C test of test_loop_thread.py.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from quadriga.errors import RequestAborted, RequestFailed

T = TypeVar("T")
# Tasks have this time to end by themselves when the loop stops, before they are cancelled.
STOP_GRACE_S = 1.0


class LoopThread:
    """Runs coroutines and async iterators for other threads, which wait for the results.

    An exception in the waiting thread, such as Ctrl-C, cancels the job that it waits for.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._jobs: set[_Job[Any]] = set()
        self._process_id = os.getpid()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine and return its result. Raise RequestAborted if the loop ends first."""
        results: SimpleQueue[_Job[T]] = SimpleQueue()
        job = _Job(work, results.put)
        try:
            self._start(job)
            return results.get().outcome()
        finally:
            self._abandon(job)

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Yield the items of an async iterator, which runs ahead of its reader and ends with it."""
        received: SimpleQueue[T | _Job[None]] = SimpleQueue()

        async def pump() -> None:
            async for item in items:
                received.put(item)

        job = _Job(pump, received.put)
        try:
            self._start(job)
            while not isinstance(item := received.get(), _Job):
                yield item
            item.outcome()
        finally:
            self._abandon(job)

    def end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a last coroutine, end all others, and join the thread.

        Concurrent calls wait for the end; later calls do nothing.
        """
        if self._loop.is_closed() or self._is_forked:
            return
        # A call of another thread may have ended the loop meanwhile.
        with suppress(RequestAborted):
            self.run(last)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        """Stop the loop once: a second stop would interrupt what `_main` runs after the first."""
        if not self._is_stopping:
            self._is_stopping = True
            self._loop.stop()

    @property
    def _is_forked(self) -> bool:
        """Whether this process is a fork, which has a copy of the loop but not its thread."""
        return self._process_id != os.getpid()

    def _start(self, job: "_Job[Any]") -> None:
        if self._is_forked:
            raise RequestFailed(
                "the client was made before this process was forked: make one in this process"
            )
        self._jobs.add(
            job
        )  # before the call: `_main` ends the jobs in this set when the loop closes
        try:
            self._loop.call_soon_threadsafe(job.begin)
        except RuntimeError:  # the loop is closed
            job.end()

    def _abandon(self, job: "_Job[Any]") -> None:
        self._jobs.discard(job)
        if not job.is_done and not self._is_forked:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(job.cancel)

    def _main(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_drain(asyncio.all_tasks(self._loop)))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
        for job in self._jobs.copy():
            job.end()


class _Job(Generic[T]):
    """A coroutine that another thread waits for.

    Args:
        work: makes the coroutine; called on the loop.
        on_end: called with the job when the coroutine has ended or could not begin.
    """

    def __init__(
        self, work: Callable[[], Coroutine[Any, Any, T]], on_end: "Callable[[_Job[T]], None]"
    ) -> None:
        self.is_done = False
        self._work = work
        self._on_end = on_end
        # The task is referenced by its own thread only: Python loses an interrupt that occurs in
        # asyncio's code for the deletion of a task.
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = RequestAborted("the client was closed")

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            self._result = await self._work()
            self._error = None
        except Exception as error:
            self._error = error
        finally:
            self._task = None
            self.end()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def end(self) -> None:
        if not self.is_done:
            self.is_done = True
            self._on_end(self)

    def outcome(self) -> T:
        """Return the result, or raise the error; RequestAborted if the client was closed."""
        if self._error is not None:
            raise self._error
        return self._result


async def _drain(tasks: set[asyncio.Task[Any]]) -> None:
    """Wait for tasks to end, and cancel those that do not end in time."""
    if not tasks:
        return
    _, pending = await asyncio.wait(tasks, timeout=STOP_GRACE_S)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
