"""Waiting queues that admit what is in the prefix tree while it is there.

Both look at the oldest `window` requests only: so the cost of a round is bounded, and whoever has
waited long is among those that are looked at. `locate` gives the deepest cached node of a waiting
request's tokens.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple, Protocol

from scheduler_proc.policies.base import FirstComeFirstServed, Rounds
from scheduler_proc.state.request import Request

WINDOW = 128
AGEING_TOKENS_PER_SECOND = 250
"""lpm: a second of waiting counts as much as so many cached tokens. Then whoever has nothing cached
waits 16 seconds longer than one of whom 4,000 tokens are cached."""
OLDEST_FIRST_EVERY = 8
"""dfs-weight: in every so many rounds the oldest request goes first."""


class CachedPage(Protocol):
    """A node of the prefix tree. depth: pages from the root, which has no parent, to here."""

    @property
    def parent(self) -> "CachedPage | None": ...

    @property
    def depth(self) -> int: ...


Locate = Callable[[Request], CachedPage]


class LongestPrefixFirst(FirstComeFirstServed):
    """lpm: the most cached tokens first; among equals the oldest.

    Waiting counts like cached tokens, for all alike, so that the time of arrival can stand for it.
    """

    def __init__(self, locate: Locate, page_size: int, window: int = WINDOW) -> None:
        super().__init__()
        self._locate = locate
        self._page_size = page_size
        self._window = window

    def first(self, count: int, budget: int) -> list[Request]:
        oldest = super().first(max(count, self._window), budget)
        locate, page_size = self._locate, self._page_size
        ordered = sorted(
            oldest[: self._window],
            key=lambda request: (
                AGEING_TOKENS_PER_SECOND * request.received_at - locate(request).depth * page_size
            ),
        )
        return (ordered + oldest[self._window :])[:count]


class Place(NamedTuple):
    """A node where requests were located: the nodes from below the root down to it, and which
    requests of the window these are."""

    path: tuple[CachedPage, ...]
    members: list[int]


class DepthFirst(FirstComeFirstServed):
    """dfs-weight: down the prefix tree, at each node into the child first below which more
    requests wait; so those that share a prefix follow one another, and it is still there.

    The requests of a node come after those below it, as in SGLang: the cache loses leaves first,
    so what is deeper is lost sooner, while their own pages stay as long as something hangs on them.
    Among equals, the oldest first; in every OLDEST_FIRST_EVERY-th round the oldest of all goes
    ahead, as a small branch could wait for ever otherwise.
    """

    def __init__(self, locate: Locate, window: int = WINDOW) -> None:
        super().__init__()
        self._locate = locate
        self._window = window
        self._rounds = Rounds(OLDEST_FIRST_EVERY)
        self._paths: dict[CachedPage, tuple[CachedPage, ...]] = {}
        self._located: list[CachedPage] = []
        self._order: list[int] = []

    def first(self, count: int, budget: int) -> list[Request]:
        self._rounds.begin()
        oldest = super().first(max(count, self._window), budget)
        window = oldest[: self._window]
        self._sort(list(map(self._locate, window)))
        ordered = [window[index] for index in self._order]
        if window and self._rounds.for_the_oldest:
            ordered.remove(window[0])
            ordered.insert(0, window[0])
        return (ordered + oldest[self._window :])[:count]

    def take(self, request: Request) -> None:
        super().take(request)
        self._rounds.take()

    def _sort(self, located: list[CachedPage]) -> None:
        """Bring `_order` up to date. It depends on the nodes alone; mostly none has changed."""
        if located == self._located:
            return
        members: dict[CachedPage, list[int]] = {}
        for index, node in enumerate(located):
            members.setdefault(node, []).append(index)
        self._paths = {node: self._path(node) for node in members}
        self._located = located
        self._order = []
        if members:
            _walk([Place(self._paths[n], m) for n, m in members.items()], 0, self._order)

    def _path(self, node: CachedPage) -> tuple[CachedPage, ...]:
        """Walks up only as far as a node whose path is known from the last time."""
        below: list[CachedPage] = []
        known = self._paths.get(node)
        while known is None:
            if node.parent is None:
                known = ()
            else:
                below.append(node)
                node = node.parent
                known = self._paths.get(node)
        return (*known, *reversed(below))


def _walk(places: list[Place], depth: int, order: list[int]) -> None:
    """Append the members of places that have the first `depth` nodes in common, depth first."""
    depth = _common(places, depth)
    ending: list[int] = []
    branches: dict[CachedPage, list[Place]] = {}
    for place in places:
        if len(place.path) == depth:
            ending = place.members
        else:
            branches.setdefault(place.path[depth], []).append(place)
    # Places come by the age of their oldest member, so branches do, and sorting keeps that.
    for branch in sorted(branches.values(), key=_weight):
        if len(branch) == 1:
            order += branch[0].members
        else:
            _walk(branch, depth + 1, order)
    order += ending


def _weight(branch: list[Place]) -> int:
    return -sum(len(place.members) for place in branch)


def _common(places: list[Place], depth: int) -> int:
    """How many nodes the paths have in common; `depth` of them are known to be."""
    first = places[0].path
    length = len(first)
    for path, _members in places:
        length = min(length, len(path))
        if length > depth and path[length - 1] is not first[length - 1]:
            length = _parting(first, path, depth, length)
    return length


def _parting(
    one: tuple[CachedPage, ...], other: tuple[CachedPage, ...], low: int, high: int
) -> int:
    """Where two paths part, between low and high. In a tree, paths that meet at some depth are the
    same down to it, so that it can be bisected."""
    candidates = range(low, high)
    return low + bisect_left(candidates, True, key=lambda depth: one[depth] is not other[depth])
