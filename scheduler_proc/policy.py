"""The waiting queue, and the order in which it is admitted: a small class per policy."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from scheduler_proc.request import Request


class WaitingQueue(Protocol):
    """What admission needs of a policy. Every operation is cheap however long the queue is."""

    def push(self, request: Request) -> None:
        """Add a request that arrived."""

    def peek(self) -> Request:
        """The request to admit next. The queue is not empty."""

    def remove(self, request: Request) -> None:
        """Take out a request that was admitted or ended; nothing happens where it is not there."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FirstComeFirstServed:
    """In the order of arrival."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Request] = OrderedDict()

    def push(self, request: Request) -> None:
        self._requests[request.seq] = request

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def remove(self, request: Request) -> None:
        self._requests.pop(request.seq, None)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))
