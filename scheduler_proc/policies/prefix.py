"""Policies that admit requests whose prefix is in the prefix tree while it is still there.

Both look at the oldest `window` requests only, so that the cost of a round is bounded and a request
that has waited long is always among them.
"""

from bisect import bisect_left
from typing import NamedTuple

from scheduler_proc.policies.base import (
    AdmissionRounds,
    CachedPage,
    FirstComeFirstServed,
    MatchPrefix,
    PolicyContext,
    policy,
)
from scheduler_proc.state.request import Request

WINDOW = 128
# lpm: a request without cached tokens waits 16 seconds longer than one with 4,000.
AGEING_TOKENS_PER_SECOND = 250
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
                AGEING_TOKENS_PER_SECOND * request.received_at
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
