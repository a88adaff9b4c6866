"""The waiting queue, and the order in which it is admitted: one contract, a small class a policy."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from scheduler_proc.request import Request


class WaitingQueue(Protocol):
    """What admission needs of a policy. No operation's cost grows with the length of the queue
    (a logarithm is allowed)."""

    lookahead: int
    """How many requests that do not fit admission may pass over in one round; 0: the first one
    that does not fit ends the round, so that nobody overtakes it for ever."""

    def push(self, request: Request) -> None:
        """Add a request that arrived, or that was retracted and wants to run again."""

    def first(self, count: int, budget: int) -> list[Request]:
        """The requests to admit next, at most `count`, in this order. budget: the prompt tokens
        that the step can still take, for policies that care."""

    def take(self, request: Request) -> None:
        """Remove a request that is admitted."""

    def remove(self, request: Request) -> None:
        """Remove a request that ended; nothing happens where it is not there."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FirstComeFirstServed:
    """In the order of arrival; a retracted request keeps its place."""

    lookahead = 0

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Request] = OrderedDict()

    def push(self, request: Request) -> None:
        self._requests[request.seq] = request

    def first(self, count: int, budget: int) -> list[Request]:
        return list(islice(self._requests.values(), count))

    def take(self, request: Request) -> None:
        del self._requests[request.seq]

    def remove(self, request: Request) -> None:
        self._requests.pop(request.seq, None)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))
