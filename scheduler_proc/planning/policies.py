"""Scheduling policies: the contract of a waiting queue, and the orders of --schedule-policy.

`policy` registers a class under its name; see docs/engineering/adding-a-policy.md. The first
policies look at requests only; `lpm` and `dfs-weight` look at the prefix tree, too.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

from sortedcontainers import SortedDict

from quadriga.server.config.engine_args import SchedulerArgs
from scheduler_proc.state.request import Request

# shortest: 4,000 more tokens to compute are made up for by 40 seconds of waiting.
AGEING_TOKENS_PER_SECOND = 100


class AdmissionQueue(Protocol):
    """The waiting requests, in the order in which they are admitted.

    A round of admission is one call of `first` and the calls of `take` that follow it.
    """

    @property
    def lookahead(self) -> int:
        """Number of requests without room that admission may skip in the round that begins now.

        With 0 the first request that has no room ends the round, so that no other overtakes it.
        """

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

    def __len__(self) -> int: ...


class WaitingQueue(AdmissionQueue, Protocol):
    """A queue that a policy orders.

    A request must not change its tokens, priority or client while it waits. No operation may take
    time that grows with the length of the queue, except for a logarithm.
    """

    def push(self, request: Request) -> None:
        """Add a request that arrived or was retracted."""

    def remove(self, request: Request) -> None:
        """Remove a request that ended, if it waits. It is called for every request at its end."""

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
        """Return a queue with the window of the arguments."""
        return cls(context.args.pack_lookahead, context.args.pack_fifo_every)

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


# Policies that admit requests whose prefix is in the prefix tree while it is still there.
#
# Both look at the oldest `window` requests only, so that the cost of a round is bounded and a
# request that has waited long is always among them.

WINDOW = 128
# lpm: a request without cached tokens waits 16 seconds longer than one with 4,000.
AGEING_CACHED_TOKENS_PER_SECOND = 250
OLDEST_FIRST_EVERY = 8  # rounds of dfs-weight


@policy("lpm")
class LongestPrefixFirst(FirstComeFirstServed):
    """Admit the request with the most cached tokens first, among equals the oldest.

    A second of waiting counts as AGEING_TOKENS_PER_SECOND cached tokens. As it does so for all
    requests alike, the time of arrival stands for it.
    """

    def __init__(self, match_prefix: MatchPrefix, page_size: int, window: int = WINDOW) -> None:
        super().__init__()
        self._match_prefix = match_prefix
        self._page_size = page_size
        self._window = window

    @classmethod
    def create(cls, context: PolicyContext) -> "LongestPrefixFirst":
        """Return an empty queue."""
        return cls(context.match_prefix, context.page_size, context.window)

    def first(self, count: int, budget: int) -> list[Request]:
        """Return the window in the order of cached tokens, then the others as they arrived."""
        oldest = super().first(max(count, self._window), budget)
        match_prefix, page_size = self._match_prefix, self._page_size
        ordered = sorted(
            oldest[: self._window],
            key=lambda request: (
                AGEING_CACHED_TOKENS_PER_SECOND * request.received_at
                - match_prefix(request).depth * page_size
            ),
        )
        return (ordered + oldest[self._window :])[:count]


class MatchedNode(NamedTuple):
    """A node that requests of the window match.

    Attributes:
        path: the nodes from below the root down to this one.
        members: indexes of these requests in the window.
    """

    path: tuple[CachedPage, ...]
    members: list[int]


@policy("dfs-weight")
class DepthFirst(FirstComeFirstServed):
    """Admit requests depth first through the prefix tree, the branch with more requests first.

    So requests that share a prefix follow one another while it is cached. The requests of a node
    come after the requests below it, as in SGLang: the cache evicts leaves first, so deeper pages
    are lost sooner, and a node's own pages stay as long as it has children. Among equal branches,
    the one with the oldest request comes first. In every OLDEST_FIRST_EVERY-th round the oldest
    request of all comes first, as a small branch could starve otherwise.
    """

    def __init__(self, match_prefix: MatchPrefix, window: int = WINDOW) -> None:
        super().__init__()
        self._match_prefix = match_prefix
        self._window = window
        self._rounds = AdmissionRounds(OLDEST_FIRST_EVERY)
        self._paths: dict[CachedPage, tuple[CachedPage, ...]] = {}
        self._matched: list[CachedPage] = []
        self._order: list[int] = []

    @classmethod
    def create(cls, context: PolicyContext) -> "DepthFirst":
        """Return an empty queue."""
        return cls(context.match_prefix, context.window)

    def first(self, count: int, budget: int) -> list[Request]:
        """Return the window depth first, then the others as they arrived."""
        self._rounds.begin()
        oldest = super().first(max(count, self._window), budget)
        window = oldest[: self._window]
        self._sort(list(map(self._match_prefix, window)))
        ordered = [window[index] for index in self._order]
        if window and self._rounds.serves_oldest:
            ordered.remove(window[0])
            ordered.insert(0, window[0])
        return (ordered + oldest[self._window :])[:count]

    def take(self, request: Request) -> None:
        """Remove a request that is admitted."""
        super().take(request)
        self._rounds.on_take()

    def _sort(self, matched: list[CachedPage]) -> None:
        """Bring `_order` up to date. It depends on the matched nodes, which seldom change."""
        if matched == self._matched:
            return
        members: dict[CachedPage, list[int]] = {}
        for index, node in enumerate(matched):
            members.setdefault(node, []).append(index)
        self._paths = {node: self._path(node) for node in members}
        self._matched = matched
        self._order = []
        if members:
            nodes = [MatchedNode(self._paths[node], indexes) for node, indexes in members.items()]
            _walk(nodes, 0, self._order)

    def _path(self, node: CachedPage) -> tuple[CachedPage, ...]:
        """Return the path of a node, walking up to the first node whose path is known."""
        below: list[CachedPage] = []
        path = self._paths.get(node)
        while path is None:
            if node.parent is None:
                path = ()
            else:
                below.append(node)
                node = node.parent
                path = self._paths.get(node)
        return (*path, *reversed(below))


def _walk(nodes: list[MatchedNode], depth: int, order: list[int]) -> None:
    """Append the members of nodes whose paths share their first `depth` nodes, depth first."""
    depth = _common_depth(nodes, depth)
    members_here: list[int] = []
    branches: dict[CachedPage, list[MatchedNode]] = {}
    for node in nodes:
        if len(node.path) == depth:
            members_here = node.members
        else:
            branches.setdefault(node.path[depth], []).append(node)
    # Nodes are in the order of their oldest member, so branches are, and a stable sort keeps that.
    for branch in sorted(branches.values(), key=_weight):
        if len(branch) == 1:
            order += branch[0].members
        else:
            _walk(branch, depth + 1, order)
    order += members_here


def _weight(branch: list[MatchedNode]) -> int:
    return -sum(len(node.members) for node in branch)


def _common_depth(nodes: list[MatchedNode], depth: int) -> int:
    """Return how many nodes all paths share, given that they share the first `depth`."""
    first = nodes[0].path
    length = len(first)
    for path, _members in nodes:
        length = min(length, len(path))
        if length > depth and path[length - 1] is not first[length - 1]:
            length = _fork_depth(first, path, depth, length)
    return length


def _fork_depth(
    path: tuple[CachedPage, ...], other: tuple[CachedPage, ...], low: int, high: int
) -> int:
    """Return the depth between `low` and `high` at which two paths fork.

    In a tree, paths that meet at some depth are the same above it, so that it can be bisected.
    """
    depths = range(low, high)
    return low + bisect_left(depths, True, key=lambda depth: path[depth] is not other[depth])
