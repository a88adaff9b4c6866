"""Scheduling policies: the contract of a waiting queue, and policies that look at requests only.

`policy` registers a class under its name in --schedule-policy. Policies that look at the prefix
tree are in prefix.py, turns between clients in fair.py. See docs/adding-a-policy.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

from sortedcontainers import SortedDict

from quadriga.config.scheduler_args import SchedulerArgs
from scheduler_proc.state.request import Request

# shortest: 4,000 more tokens to compute are made up for by 40 seconds of waiting.
AGEING_TOKENS_PER_SECOND = 100
DEFAULT_PACK_LOOKAHEAD = 32
DEFAULT_PACK_FIFO_EVERY = 8


class WaitingQueue(Protocol):
    """The waiting requests, in the order in which they are admitted.

    A round of admission is one call of `first` and the calls of `take` that follow it. A request
    must not change its tokens, priority or client while it waits. No operation may take time that
    grows with the length of the queue, except for a logarithm.
    """

    @property
    def lookahead(self) -> int:
        """Number of requests without room that admission may skip in the round that begins now.

        With 0 the first request that has no room ends the round, so that no other overtakes it.
        """

    def push(self, request: Request) -> None:
        """Add a request that arrived or was retracted."""

    def first(self, count: int, budget: int) -> list[Request]:
        """Return the next requests to admit, in order, without removing them.

        The same call returns the same list until the queue changes; a smaller `count` returns the
        beginning of it.

        Args:
            count: maximum number of requests.
            budget: prompt tokens that the step can still compute.
        """

    def take(self, request: Request) -> None:
        """Remove a request that is admitted.

        Raises:
            KeyError: the request does not wait.
        """

    def remove(self, request: Request) -> None:
        """Remove a request that ended, if it waits. It is called for every request at its end."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class CachedPage(Protocol):
    """A node of the prefix tree."""

    @property
    def parent(self) -> "CachedPage | None":
        """The node above; None for the root."""

    @property
    def depth(self) -> int:
        """Number of pages from the root down to this one."""


MatchPrefix = Callable[[Request], CachedPage]


class PolicyContext(NamedTuple):
    """What a policy may use besides the requests.

    Attributes:
        match_prefix: returns the deepest cached page of a waiting request's tokens.
        page_size: number of tokens in a page.
        window: number of oldest requests that one round may pass to `match_prefix`.
    """

    args: SchedulerArgs
    match_prefix: MatchPrefix
    page_size: int
    window: int


class _Policy(Protocol):
    def create(self, context: PolicyContext, /) -> WaitingQueue: ...


PolicyClass = TypeVar("PolicyClass", bound=_Policy)
REGISTRY: dict[str, _Policy] = {}


def policy(name: str) -> Callable[[PolicyClass], PolicyClass]:
    """Register a class as --schedule-policy `name`."""

    def register(queue_class: PolicyClass) -> PolicyClass:
        REGISTRY[name] = queue_class
        return queue_class

    return register


class SortedQueue(ABC):
    """A waiting queue in the order of a key, which is read once, when a request is pushed.

    Attributes:
        orders_by_due_time: among requests of one priority, those go first that are due first.
    """

    orders_by_due_time = False

    def __init__(self) -> None:
        self._keys: dict[int, tuple[float, ...]] = {}
        self._requests: SortedDict = SortedDict()

    @classmethod
    def create(cls, context: PolicyContext) -> "SortedQueue":
        """Return an empty queue."""
        return cls()

    @abstractmethod
    def key(self, request: Request) -> tuple[float, ...]:
        """Return the sort key: smaller goes first. It ends with the seq, so that no two are equal.

        A request that was retracted and waits again has the seq that it had.
        """

    @property
    def lookahead(self) -> int:
        """Zero: no request is overtaken."""
        return 0

    def push(self, request: Request) -> None:
        """Add a request."""
        key = self._keys[request.seq] = self.key(request)
        self._requests[key] = request

    def first(self, count: int, budget: int) -> list[Request]:
        """Return the requests with the smallest keys."""
        return list(islice(self._requests.values(), count))

    def take(self, request: Request) -> None:
        """Remove a request that is admitted."""
        del self._requests[self._keys.pop(request.seq)]

    def remove(self, request: Request) -> None:
        """Remove a request, if it waits."""
        if request.seq in self._keys:
            SortedQueue.take(self, request)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))


@policy("fcfs")
class FirstComeFirstServed(SortedQueue):
    """Admit requests in the order of arrival, or of the times at which their first tokens are due.

    Without ttft_target and deadlines the order is that of arrival: all have the same target. With
    them it is earliest deadline first (Liu and Layland, 1973). As a request without a target is
    due some seconds after its arrival, later ones with a target do not starve it. A retracted
    request has its old place.
    """

    orders_by_due_time = True

    def key(self, request: Request) -> tuple[float, ...]:
        """Return the time at which the first token is due, then the order of arrival."""
        return (request.due_at, request.seq)


@policy("shortest")
class ShortestFirst(SortedQueue):
    """Admit the request with the fewest tokens left to compute, prompt and output, first.

    Waiting makes every request shorter by AGEING_TOKENS_PER_SECOND. As it does so for all alike,
    the order of two requests never changes, and the key needs no more than the time of arrival.
    """

    def key(self, request: Request) -> tuple[float, ...]:
        """Return the number of tokens left, with the time of arrival in tokens."""
        num_left = request.num_uncomputed_tokens + request.num_remaining_tokens
        return (num_left + AGEING_TOKENS_PER_SECOND * request.received_at, request.seq)


@policy("priority")
class PriorityFirst(SortedQueue):
    """Admit the largest priority first, among equals the request whose first token is due first.

    Strict: a request waits as long as requests of larger priority keep arriving.
    """

    orders_by_due_time = True

    def key(self, request: Request) -> tuple[float, ...]:
        """Return the priority, the time at which the first token is due, the order of arrival."""
        return (-request.priority, request.due_at, request.seq)


class AdmissionRounds:
    """Count the rounds of admission in which a request was taken.

    Each `every`-th round serves the oldest request first, and lasts until a request was taken.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._number = 1
        self._was_taken = False

    def begin(self) -> None:
        """Begin a round: requests taken up to now belong to the round before."""
        if self._was_taken:
            self._number += 1
            self._was_taken = False

    def on_take(self) -> None:
        """Record that a request was taken."""
        self._was_taken = True

    @property
    def serves_oldest(self) -> bool:
        """Whether the round that begins, or would begin now, serves the oldest request first."""
        return (self._number + self._was_taken) % self._every == 0


@policy("pack")
class Pack(FirstComeFirstServed):
    """Fill the token budget of a step from the oldest `window` requests (first fit decreasing).

    The requests that do not fit follow in the order of arrival. Each `fifo_every`-th round is
    first come, first served, and skips no request, so that a prompt which never fits is served.
    """

    orders_by_due_time = False

    def __init__(self, window: int, fifo_every: int) -> None:
        super().__init__()
        self._window = window
        self._rounds = AdmissionRounds(fifo_every)

    @classmethod
    def create(cls, context: PolicyContext) -> "Pack":
        """Return a queue as --pack-lookahead and --pack-fifo-every want it."""
        args = context.args
        return cls(
            args.pack_lookahead or DEFAULT_PACK_LOOKAHEAD,
            args.pack_fifo_every or DEFAULT_PACK_FIFO_EVERY,
        )

    @property
    def lookahead(self) -> int:
        """The window, except in the rounds that are first come, first served."""
        return 0 if self._rounds.serves_oldest else self._window

    def first(self, count: int, budget: int) -> list[Request]:
        """Return the prompts that fill the budget, then the others in the order of arrival."""
        self._rounds.begin()
        if self._rounds.serves_oldest:
            return super().first(count, budget)
        oldest = super().first(max(count, self._window), budget)
        packed = _fill(oldest[: self._window], budget)
        packed_seqs = {request.seq for request in packed}
        return (packed + [r for r in oldest if r.seq not in packed_seqs])[:count]

    def take(self, request: Request) -> None:
        """Remove a request that is admitted."""
        super().take(request)
        self._rounds.on_take()


def _fill(requests: list[Request], budget: int) -> list[Request]:
    """Return the largest prompts that fit into the budget together (first fit decreasing)."""
    packed = []
    for request in sorted(requests, key=lambda request: -request.num_uncomputed_tokens):
        if request.num_uncomputed_tokens <= budget:
            packed.append(request)
            budget -= request.num_uncomputed_tokens
    return packed
