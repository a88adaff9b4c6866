"""The live feed at the client: one subscription, for any number of iterators."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from quadriga.wire.messages.live import LiveMessage
from quadriga.wire.messages.public import PROTOCOL_VERSION, ErrorInfo, Refused, Watch

WATCH_S = 10.0
RENEW_INTERVAL_S = 3.0
# An iterator that is further behind loses the oldest messages.
MAX_BEHIND = 1024


class LiveIterator:
    """The messages that one caller has not taken yet."""

    def __init__(self) -> None:
        self._messages: deque[LiveMessage] = deque(maxlen=MAX_BEHIND)
        self._error: ErrorInfo | None = None
        self._arrived = asyncio.Event()

    def put(self, message: LiveMessage) -> None:
        """Add a message."""
        self._messages.append(message)
        self._arrived.set()

    def fail(self, error: ErrorInfo) -> None:
        """Let the caller raise an error after the messages that it has."""
        self._error = error
        self._arrived.set()

    async def next(self) -> LiveMessage:
        """Wait for a message. Raise the error that ended the subscription."""
        while not self._messages:
            if self._error is not None:
                raise self._error.exception()
            self._arrived.clear()
            await self._arrived.wait()
        return self._messages.popleft()


class LiveSubscription:
    """Renew the subscription as long as there are iterators.

    Args:
        send: sends a message; returns False if it cannot be sent now. A renewal that is lost is
            made up for by the next one.
    """

    def __init__(self, send: Callable[[msgspec.Struct], bool]) -> None:
        self._send = send
        self._iterators: set[LiveIterator] = set()
        self._renewal: asyncio.Task[None] | None = None
        self._name = ""
        self._num_subscriptions = 0

    @contextmanager
    def iterator(self) -> Iterator[LiveIterator]:
        """Watch in a `with` block."""
        iterator = LiveIterator()
        self._iterators.add(iterator)
        if len(self._iterators) == 1:
            self._begin()
        try:
            yield iterator
        finally:
            self._iterators.discard(iterator)
            if not self._iterators:
                self._end()

    def _begin(self) -> None:
        self._num_subscriptions += 1
        self._name = f"watch-{self._num_subscriptions}"
        self._renewal = asyncio.get_running_loop().create_task(self._renew())

    def _end(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None
            self._send(Watch(PROTOCOL_VERSION, self._name, 0.0))

    async def _renew(self) -> None:
        while True:
            self._send(Watch(PROTOCOL_VERSION, self._name, WATCH_S))
            await asyncio.sleep(RENEW_INTERVAL_S)

    def on_message(self, message: LiveMessage) -> None:
        """Pass a message of the feed on."""
        for iterator in self._iterators:
            iterator.put(message)

    def on_refused(self, message: Refused) -> None:
        """End the subscription, if it is the one that was refused."""
        if message.request_id == self._name:
            self.fail(message.error)

    def fail(self, error: ErrorInfo) -> None:
        """End the subscription: its iterators raise the error."""
        for iterator in self._iterators:
            iterator.fail(error)
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None
