"""Streams that wait: when their headers are due, and the comments that they are sent meanwhile.

One poller asks the server how far the requests of all waiting streams are, with as few questions as
possible. A stream that gets its tokens is never asked about.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from quadriga.client import async_client, types
from quadriga.errors import QuadrigaError
from quadriga.wire.client import MAX_PROGRESS_IDS, RequestProgress, RequestState

NO_ANSWER = b": waiting for the server\n\n"


def furthest(values: Sequence[RequestProgress]) -> RequestProgress | None:
    """Return the progress of the request that is furthest; None without one that is known."""
    known = [value for value in values if value.state is not RequestState.UNKNOWN]
    ranks = list(RequestState)
    return max(known, key=lambda value: (ranks.index(value.state), -value.place), default=None)


def comment(value: RequestProgress | None, note: str = "") -> bytes:
    """Return the comment that says how far a request is.

    Args:
        value: the progress; None: the server does not know the request.
        note: what is said before it, such as that the model is being loaded.
    """
    if value is None:
        return f": {note}\n\n".encode() if note else NO_ANSWER
    return f": {', '.join(filter(None, (note, describe(value))))}\n\n".encode()


def describe(value: RequestProgress) -> str:
    """Return how far a request is, in words."""
    if value.state is RequestState.QUEUED:
        about = "" if value.wait_s is None else f", about {max(1, round(value.wait_s))} s"
        return f"queued {value.place}{about}"
    if value.state is RequestState.PREFILL:
        return f"prefill {100 * value.num_computed_tokens // max(1, value.num_prompt_tokens)} %"
    return str(value.state.value)


# The headers of a stream are sent after this time, admitted or not, or after the interval of pings
# where that is shorter.
HEADERS_AFTER_S = 5.0
# A stream without headers is asked about after the first time, and then at the interval.
FIRST_POLL_S = 0.25
POLL_INTERVAL_S = 1.0
# Streams whose time comes within this one share a question.
MIN_POLL_GAP_S = 0.25
ANSWER_TIMEOUT_S = 2.0

IS_ADMITTED = (RequestState.PREFILL, RequestState.DECODING)


class Waiting(Protocol):
    """The requests of a stream that waits: a RequestGroup."""

    @property
    def request_ids(self) -> list[str]:
        """Ids of the requests that have not ended."""

    async def next_chunks(self) -> list[tuple[int, types.StreamChunk]]:
        """Wait for chunks, or to be woken, and return them by choice."""

    def wake(self) -> None:
        """Let the reader look again, with or without chunks."""


class StreamWatch:
    """The waiting of one stream, from the submission of its requests to their end.

    Attributes:
        due_at: time of the event loop at which the poller looks at the stream next.
        has_headers: the headers were sent.
        is_admitted: a request of the stream is known to be admitted.
    """

    def __init__(self, group: Waiting, now: float, headers_at: float) -> None:
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._headers_at = headers_at
        self._written_at = now
        self._comment = b""
        self.due_at = now + FIRST_POLL_S
        self.has_headers = self.is_admitted = False

    @property
    def request_ids(self) -> list[str]:
        """Ids of the stream's requests that have not ended."""
        return self._group.request_ids

    async def first_chunks(self) -> list[tuple[int, types.StreamChunk]]:
        """Wait until the headers are due, and return the chunks that have arrived by then.

        They are due with the first chunk, at the admission, or when their time has come. Raise the
        error of a request that fails before.
        """
        timer = self._loop.call_at(self._headers_at, self._group.wake)
        try:
            while True:
                chunks = await self._group.next_chunks()
                if chunks or self.is_admitted or self._loop.time() >= self._headers_at:
                    return chunks
        finally:
            timer.cancel()

    def on_write(self) -> None:
        """Note that something was sent: the next comment follows one interval later at least."""
        self._written_at = self._loop.time()
        self._comment = b""

    def take_comment(self) -> bytes:
        """Return the comment to be sent now; empty for none."""
        line, self._comment = self._comment, b""
        return line

    def silence_ends_at(self, interval_s: float) -> float:
        """Return when a comment is due if nothing else is sent before."""
        return self._written_at + interval_s

    def take(self, values: list[RequestProgress] | None, note: str) -> None:
        """Take the server's answer, and wake the stream if it acts on it.

        Args:
            values: the answer; None: there is none.
            note: as of `comment`.
        """
        if self.has_headers:
            self._comment = comment(furthest(values or []), note)
            self._group.wake()
        elif any(value.state in IS_ADMITTED for value in values or []):
            self.is_admitted = True
            self._group.wake()


class ProgressPoller:
    """Ask the server how far the requests of waiting streams are, while there are any.

    Args:
        client: the client of the server.
        ping_interval_s: seconds of silence after which a stream gets a comment; 0: never.
        note: returns what comments say before the progress; "": nothing.
    """

    def __init__(
        self,
        client: async_client.AsyncClient,
        ping_interval_s: float,
        note: Callable[[], str] = str,
    ) -> None:
        self._client = client
        self._note = note
        self._ping_interval_s = ping_interval_s
        self._watches: set[StreamWatch] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._poll: asyncio.Task[None] | None = None

    @contextmanager
    def watch(self, group: Waiting) -> Iterator[StreamWatch]:
        """Watch a stream, whose requests are submitted, in a `with` block."""
        now = asyncio.get_running_loop().time()
        watch = StreamWatch(
            group, now, now + min(HEADERS_AFTER_S, self._ping_interval_s or math.inf)
        )
        self._watches.add(watch)
        self._schedule(watch.due_at)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    def on_headers(self, watch: StreamWatch, has_comments: bool) -> None:
        """Note that a stream has its headers; from now on it gets comments, if it may have any."""
        watch.has_headers = True
        watch.on_write()
        if has_comments and self._ping_interval_s:
            watch.due_at = watch.silence_ends_at(self._ping_interval_s)
        else:
            self._watches.discard(watch)

    def _schedule(self, when: float) -> None:
        """Look at the streams at this time, or before."""
        if self._poll is not None or (self._timer is not None and self._timer.when() <= when):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._start)

    def _start(self) -> None:
        self._timer = None
        due = self._take_due(asyncio.get_running_loop().time())
        if due:
            self._poll = asyncio.get_running_loop().create_task(self._ask_about(due))
        else:
            self._schedule_next()

    def _schedule_next(self) -> None:
        if self._watches:
            first = min(watch.due_at for watch in self._watches)
            self._schedule(max(first, asyncio.get_running_loop().time() + MIN_POLL_GAP_S))

    def _take_due(self, now: float) -> list[StreamWatch]:
        """Return the streams that are due, and set the times at which they are due again."""
        due = []
        for watch in self._watches:
            if watch.has_headers:
                watch.due_at = watch.silence_ends_at(self._ping_interval_s)
            if watch.due_at > now:
                continue
            due.append(watch)
            watch.due_at = now + (self._ping_interval_s if watch.has_headers else POLL_INTERVAL_S)
        return due

    async def _ask_about(self, watches: list[StreamWatch]) -> None:
        try:
            progress = await self._ask([name for watch in watches for name in watch.request_ids])
            for watch in watches:
                values = [progress[name] for name in watch.request_ids if name in progress]
                watch.take(values or None, self._note())
        finally:
            self._poll = None
            self._schedule_next()

    async def _ask(self, request_ids: list[str]) -> dict[str, RequestProgress]:
        """Return the progress of requests by id; without those of a question that has failed."""
        progress: dict[str, RequestProgress] = {}
        for first in range(0, len(request_ids), MAX_PROGRESS_IDS):
            names = request_ids[first : first + MAX_PROGRESS_IDS]
            try:
                values = await self._client.progress(names, ANSWER_TIMEOUT_S)
            except QuadrigaError:  # a process is being replaced, and the next question comes soon
                break
            progress.update(zip(names, values, strict=True))
        return progress
