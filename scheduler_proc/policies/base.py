"""The waiting queue, and the order in which it is admitted: one contract, a small class a policy.

Those that look at the prefix tree are in prefix.py, turns between clients in fair.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from sortedcontainers import SortedDict

from scheduler_proc.state.request import Request

AGEING_TOKENS_PER_SECOND = 100
"""shortest: a second of waiting counts as much as so many tokens less to compute. Then 4,000 tokens
more are made up for in 40 seconds."""


class WaitingQueue(Protocol):
    """What admission needs of a policy. No operation's cost grows with the length of the queue
    (a logarithm is allowed).

    A round of admission is one call of `first`, and the calls of `take` that follow it. A request
    must not change its tokens, its priority or its client while it waits.
    """

    @property
    def lookahead(self) -> int:
        """How many requests that do not fit admission may pass over in the round that begins now;
        0: the first one that does not fit ends the round, so that nobody overtakes it for ever."""

    def push(self, request: Request) -> None:
        """Add a request that arrived, or that was retracted and wants to run again."""

    def first(self, count: int, budget: int) -> list[Request]:
        """The requests to admit next, at most `count`, in this order. budget: the prompt tokens
        that the step can still take, for policies that care.

        Only looks: asked again it says the same, and asked for fewer, the beginning of the same.
        """

    def take(self, request: Request) -> None:
        """Remove a request that is admitted. KeyError where it does not wait."""

    def remove(self, request: Request) -> None:
        """Remove a request that ended; nothing happens where it is not there."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class SortedQueue(ABC):
    """Requests in the order of a key, which is read once, when they are pushed."""

    def __init__(self) -> None:
        self._keys: dict[int, tuple[float, ...]] = {}
        self._requests: SortedDict = SortedDict()

    @abstractmethod
    def key(self, request: Request) -> tuple[float, ...]:
        """Smaller goes first. No two requests have the same: it ends with the seq."""

    @property
    def lookahead(self) -> int:
        return 0

    def push(self, request: Request) -> None:
        key = self._keys[request.seq] = self.key(request)
        self._requests[key] = request

    def first(self, count: int, budget: int) -> list[Request]:
        return list(islice(self._requests.values(), count))

    def take(self, request: Request) -> None:
        del self._requests[self._keys.pop(request.seq)]

    def remove(self, request: Request) -> None:
        if request.seq in self._keys:
            SortedQueue.take(self, request)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))


class FirstComeFirstServed(SortedQueue):
    """fcfs: in the order of arrival; a retracted request has its old place."""

    def key(self, request: Request) -> tuple[float, ...]:
        return (request.seq,)


class ShortestFirst(SortedQueue):
    """shortest: the fewest tokens still to compute, prompt and output, first.

    Waiting makes shorter. As it does so for all alike, who is before whom never changes, and the
    time of arrival in the key is enough.
    """

    def key(self, request: Request) -> tuple[float, ...]:
        remaining = request.num_uncomputed_tokens + request.num_remaining_tokens
        return (remaining + AGEING_TOKENS_PER_SECOND * request.received_at, request.seq)


class PriorityFirst(SortedQueue):
    """priority: the largest priority first, among equals the oldest. Strict: as long as more
    important requests come, the others wait."""

    def key(self, request: Request) -> tuple[float, ...]:
        return (-request.priority, request.seq)


class Rounds:
    """Counts rounds of admission in which something was taken: each `every`-th is the oldest
    request's, and lasts until it has brought something."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._number = 1
        self._taken = False

    def begin(self) -> None:
        """`first` is called: what was taken belongs to the round before."""
        if self._taken:
            self._number += 1
            self._taken = False

    def take(self) -> None:
        self._taken = True

    @property
    def for_the_oldest(self) -> bool:
        """Whether the round that begins, or would begin now, is one of those."""
        return (self._number + self._taken) % self._every == 0


class Pack(FirstComeFirstServed):
    """pack: fills the step's token budget from the oldest `window` requests: the largest prompts
    that still fit first (first fit decreasing), then the others as they came.

    Every `fifo_every`-th round is first come, first served, and nobody is passed over in it. So a
    prompt that fits nowhere has its turn.
    """

    def __init__(self, window: int, fifo_every: int) -> None:
        super().__init__()
        self._window = window
        self._rounds = Rounds(fifo_every)

    @property
    def lookahead(self) -> int:
        return 0 if self._rounds.for_the_oldest else self._window

    def first(self, count: int, budget: int) -> list[Request]:
        self._rounds.begin()
        if self._rounds.for_the_oldest:
            return super().first(count, budget)
        oldest = super().first(max(count, self._window), budget)
        packed = _fill(oldest[: self._window], budget)
        chosen = {request.seq for request in packed}
        return (packed + [request for request in oldest if request.seq not in chosen])[:count]

    def take(self, request: Request) -> None:
        super().take(request)
        self._rounds.take()


def _fill(requests: list[Request], budget: int) -> list[Request]:
    """First fit decreasing into one bin."""
    packed = []
    for request in sorted(requests, key=lambda request: -request.num_uncomputed_tokens):
        if request.num_uncomputed_tokens <= budget:
            packed.append(request)
            budget -= request.num_uncomputed_tokens
    return packed
