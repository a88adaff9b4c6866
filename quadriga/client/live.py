"""The live feed at the client: a subscription for each replica, and its messages as JSON."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec

from quadriga.wire.client import PROTOCOL_VERSION, AnyErrorInfo, Refused, Watch
from quadriga.wire.live import LiveMessage, LiveServer, LiveStep

WATCH_S = 10.0
RENEW_INTERVAL_S = 3.0
# An iterator that is further behind loses the oldest messages.
MAX_BEHIND = 1024


Send = Callable[[msgspec.Struct], bool]


class LiveIterator:
    """The messages that one caller has not taken yet."""

    def __init__(self) -> None:
        self._messages: deque[LiveMessage] = deque(maxlen=MAX_BEHIND)
        self._error: AnyErrorInfo | None = None
        self._arrived = asyncio.Event()

    def put(self, message: LiveMessage) -> None:
        """Add a message."""
        self._messages.append(message)
        self._arrived.set()

    def fail(self, error: AnyErrorInfo) -> None:
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
        replica: number of the replica that is watched.
    """

    def __init__(self, send: Send, replica: int = 0) -> None:
        self._send = send
        self._replica = replica
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
        self._name = f"watch-{self._replica}-{self._num_subscriptions}"
        self._renewal = asyncio.get_running_loop().create_task(self._renew())

    def _end(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None
            self._send(Watch(PROTOCOL_VERSION, self._name, 0.0, self._replica))

    async def _renew(self) -> None:
        while True:
            self._send(Watch(PROTOCOL_VERSION, self._name, WATCH_S, self._replica))
            await asyncio.sleep(RENEW_INTERVAL_S)

    def on_message(self, message: LiveMessage) -> None:
        """Pass a message of the feed on."""
        for iterator in self._iterators:
            iterator.put(message)

    def on_refused(self, message: Refused) -> None:
        """End the subscription, if it is the one that was refused."""
        if message.request_id == self._name:
            self.fail(message.error)

    def fail(self, error: AnyErrorInfo) -> None:
        """End the subscription: its iterators raise the error."""
        for iterator in self._iterators:
            iterator.fail(error)
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None


class LiveSubscriptions:
    """The subscriptions of a client, by the number of the replica. send: as in LiveSubscription."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._of_replica: dict[int, LiveSubscription] = {}

    def iterator(self, replica: int) -> AbstractContextManager[LiveIterator]:
        """Watch a replica in a `with` block."""
        if replica not in self._of_replica:
            self._of_replica[replica] = LiveSubscription(self._send, replica)
        return self._of_replica[replica].iterator()

    def on_message(self, message: LiveMessage) -> None:
        """Pass a message on: a step to those who watch its replica."""
        for replica, subscription in self._of_replica.items():
            if not isinstance(message, LiveStep) or message.replica == replica:
                subscription.on_message(message)

    def on_refused(self, message: Refused) -> None:
        """End the subscription that was refused, if one was."""
        for subscription in self._of_replica.values():
            subscription.on_refused(message)

    def fail(self, error: AnyErrorInfo) -> None:
        """End all subscriptions: their iterators raise the error."""
        for subscription in self._of_replica.values():
            subscription.fail(error)


# Messages of the live feed as JSON values with named fields, as the web gateway sends them.

_plain = msgspec.structs.asdict


def step_to_json(step: LiveStep) -> dict[str, Any]:
    """Return a step as a JSON object."""
    tree = None if step.tree is None else _plain(step.tree)
    return _plain(step) | {
        "requests": [_plain(request) for request in step.requests],
        "events": [_plain(event) for event in step.events],
        "gauges": _plain(step.gauges),
        "tree": tree,
    }


def server_to_json(server: LiveServer) -> dict[str, Any]:
    """Return the processes as a JSON object."""
    return _plain(server) | {"processes": [_plain(process) for process in server.processes]}


def step_from_json(value: dict[str, Any]) -> LiveStep:
    """Return the step of a JSON object. Raise msgspec.ValidationError where it is none."""
    step: LiveStep = _from_json(
        value, LiveStep, lists=("requests", "events"), structs=("gauges", "tree")
    )
    return step


def server_from_json(value: dict[str, Any]) -> LiveServer:
    """Return the processes of a JSON object. Raise msgspec.ValidationError where it is none."""
    server: LiveServer = _from_json(value, LiveServer, lists=("processes",))
    return server


def _from_json(
    value: dict[str, Any], kind: Any, lists: tuple[str, ...], structs: tuple[str, ...] = ()
) -> Any:
    """Convert an object with named fields; fields that this release does not know are ignored."""
    places: dict[str, Any] = dict(value)
    for name in lists:
        places[name] = [list(item.values()) for item in value.get(name, ())]
    for name in structs:
        inner = value.get(name)
        places[name] = None if inner is None else list(inner.values())
    fields = [places.get(name) for name in kind.__struct_fields__]
    return msgspec.convert([kind.__struct_config__.tag, *fields], kind, strict=False)
