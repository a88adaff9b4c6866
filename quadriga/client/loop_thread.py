"""An event loop in a thread of its own, for programs without one.

A KeyboardInterrupt may land between any two steps of the thread that waits. So the loop never waits
for anything that such a thread holds: results come back through a SimpleQueue, whose put needs no
lock that an interrupted get could keep, as the condition of a concurrent.futures.Future does.
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
GRACE = 1.0
"""Seconds that what is under way has to see that it is over, before it is cancelled."""


class LoopThread:
    """Runs coroutines and async iterators for other threads, which wait for what they give.

    A wait that is left by an exception, as by Ctrl-C, cancels what it waited for.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._jobs: set[_Job[Any]] = set()
        self._process_id = os.getpid()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine returns or raises; RequestAborted where the loop ends before it."""
        ended: SimpleQueue[_Job[T]] = SimpleQueue()
        job = _Job(work, ended.put)
        try:
            self._start(job)
            return ended.get().outcome()
        finally:
            self._leave(job)

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """What the iterator gives. It runs ahead of its reader, and ends with him."""
        came: SimpleQueue[T | _Job[None]] = SimpleQueue()

        async def pump() -> None:
            async for item in items:
                came.put(item)

        job = _Job(pump, came.put)
        try:
            self._start(job)
            while not isinstance(item := came.get(), _Job):
                yield item
            item.outcome()
        finally:
            self._leave(job)

    def end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the last work, end all other, and the thread. A second time does nothing, and a call
        at the same time waits for the end."""
        if self._loop.is_closed() or not self._is_mine:
            return
        # Another thread's call may have ended the loop meanwhile.
        with suppress(RequestAborted):
            self.run(last)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        """Once: a second stop would cut short what `_main` runs after the first."""
        if not self._is_stopping:
            self._is_stopping = True
            self._loop.stop()

    @property
    def _is_mine(self) -> bool:
        """A process that was forked has a copy of the loop, but not the thread that runs it."""
        return self._process_id == os.getpid()

    def _start(self, job: "_Job[Any]") -> None:
        if not self._is_mine:
            raise RequestFailed(
                "the client was made before this process was forked: make one in this process"
            )
        self._jobs.add(job)  # first: `_main` ends what it finds here when the loop is closed
        try:
            self._loop.call_soon_threadsafe(job.begin)
        except RuntimeError:  # the loop is closed
            job.end()

    def _leave(self, job: "_Job[Any]") -> None:
        self._jobs.discard(job)
        if not job.is_over and self._is_mine:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(job.cancel)

    def _main(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_see_off(asyncio.all_tasks(self._loop)))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
        for job in self._jobs.copy():
            job.end()


class _Job(Generic[T]):
    """A coroutine that another thread waits for.

    work: makes the coroutine; called on the loop. on_end: called with the job when it is over,
    whether it has ended or could not begin.
    """

    def __init__(
        self, work: Callable[[], Coroutine[Any, Any, T]], on_end: "Callable[[_Job[T]], None]"
    ) -> None:
        self.is_over = False
        self._work = work
        self._on_end = on_end
        # The task stays with its thread: what runs when the last of it is forgotten is asyncio's
        # own, and Python loses an interrupt that lands there.
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
        if not self.is_over:
            self.is_over = True
            self._on_end(self)

    def outcome(self) -> T:
        """What came of it. Raises what it raised; RequestAborted if the client was closed."""
        if self._error is not None:
            raise self._error
        return self._result


async def _see_off(tasks: set[asyncio.Task[Any]]) -> None:
    """Let them see that it is over, and cancel those that do not."""
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=GRACE)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
