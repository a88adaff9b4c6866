"""Pins: which cached prefixes stay in the prefix tree, for how long, and which give way first.

A request may ask that what it has computed is kept for a time (`CacheHint`). When it ends, its path
in the prefix tree gets a pin. Pinned pages are evicted after all others, so that they wait for the
next turn of a conversation while other requests fill the pool.

- The time counts from the last use. A later request uses a pin if its prompt contains the pin's
  prompt; if it has the same owner and key, its own pin replaces that one when it ends.
- All pins together have at most a share of the pool. Beyond it, pages lose their pin: those of the
  tenant that has the most for its weight, and of its pins the one that was used least recently
  first, the last pages of its path before the first ones. So tenants that want more than there is
  have shares by their weights, and one alone may have all of it.
- A pin never keeps a request from running. Pinned pages that no request holds count as available,
  and where nothing else can be evicted, the pins of all tenants give way, the least recently used
  one first.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from quadriga.wire.cache import CacheHint
from quadriga.wire.client import InfoValues
from scheduler_proc.state.prefix_tree import Node, PrefixTree


@dataclass(slots=True)
class PinStats:
    """Totals since start, beyond restarts of the worker.

    Attributes:
        gave_way: pages that lost their pin because a request needed a page.
        over_limit: pages that lost their pin because the pins had more than their share.
        expired: pins whose time was over.
        released: pins that were released by name, or with the whole cache.
    """

    gave_way: int = 0
    over_limit: int = 0
    expired: int = 0
    released: int = 0


@dataclass(slots=True, eq=False)
class Pin:
    """A path that is kept.

    Attributes:
        owner: tenant whose request has asked for it, and the key that the request has given it.
        ttl_s: seconds from the last use.
        expires_at: Unix seconds.
        end: deepest pinned node; the others are those above it.
        num_nodes: number of pinned nodes.
        anchor: the node on the path that a request must hold, too, to use the pin.
    """

    owner: tuple[str, str]
    ttl_s: float
    expires_at: float
    end: Node
    num_nodes: int
    anchor: Node


@dataclass(slots=True)
class TenantPins:
    """The pins of one tenant.

    Attributes:
        weight: its share, in proportion to the weights of the others.
        pins: by their last use.
        nodes: number of its pins at each of its nodes.
    """

    weight: float = 1.0
    pins: "OrderedDict[Pin, None]" = field(default_factory=OrderedDict)
    nodes: "Counter[Node]" = field(default_factory=Counter)

    def num_pages(self) -> float:
        """Return its pinned pages, over its weight."""
        return len(self.nodes) / self.weight

    def num_pins(self) -> float:
        """Return its pins, over its weight."""
        return len(self.pins) / self.weight


@dataclass(slots=True)
class Pins:
    """The pins of a prefix tree, which they observe.

    Attributes:
        tree: the tree.
        max_pages: number of pages that may be pinned.
        stats: counters.
        num_pages: number of pinned pages.
        now: Unix seconds, as of the last call of `advance`.
    """

    tree: PrefixTree
    max_pages: int
    stats: PinStats
    num_pages: int = 0
    now: float = 0.0
    _pins: "OrderedDict[Pin, None]" = field(default_factory=OrderedDict)  # by their last use
    _tenants: dict[str, TenantPins] = field(default_factory=dict)
    _at: dict[Node, list[Pin]] = field(default_factory=dict)  # by their anchors
    _deadlines: list[tuple[float, int, Pin]] = field(default_factory=list)  # a heap
    _order: "count[int]" = field(default_factory=count)

    def __post_init__(self) -> None:
        """Observe the tree."""
        self.tree.observers.append(self)

    def __len__(self) -> int:
        """Return the number of pins."""
        return len(self._pins)

    # --- a request's way --------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Take in the time, and end the pins whose time is over."""
        self.now = now
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            _at, _order, pin = heapq.heappop(deadlines)
            if pin not in self._pins:
                continue
            if pin.expires_at > now:  # it was used meanwhile
                self._push_deadline(pin)
            else:
                self._remove(pin)
                self.stats.expired += 1

    def use(self, path: list[Node]) -> None:
        """Let the time of the pins begin again whose anchor is on a path."""
        if not self._pins:
            return
        for node in path:
            for pin in self._at.get(node, ()):
                pin.expires_at = self.now + pin.ttl_s
                self._pins.move_to_end(pin)
                self._tenants[pin.owner[0]].pins.move_to_end(pin)

    def keep(
        self,
        path: list[Node],
        first: int,
        num_prompt: int,
        tenant: str,
        hint: CacheHint,
        weight: float = 1.0,
    ) -> None:
        """Pin a path, in place of the pins of the same owner that it continues.

        Args:
            path: nodes that a request holds.
            first: index of the first one that is pinned.
            num_prompt: number of nodes that have tokens of its prompt only.
            tenant: the request's tenant.
            hint: what the request has asked for.
            weight: the tenant's share, in proportion to the weights of the others.
        """
        shared = next((i for i, node in enumerate(path) if not node.is_shared), len(path))
        path, owner = path[:shared], (tenant, hint.key)
        if len(path) <= first or self.max_pages == 0:
            return
        continued = [pin for node in path for pin in self._at.get(node, ()) if pin.owner == owner]
        # The next prompt may differ in the last page of this one, where the answer begins.
        anchor = path[min(max(num_prompt - 2, 0), len(path) - 1)]
        pin = Pin(owner, hint.ttl_s, self.now + hint.ttl_s, path[-1], len(path) - first, anchor)
        of_tenant = self._tenants.setdefault(tenant, TenantPins())
        of_tenant.weight = weight
        of_tenant.pins[pin] = None
        for node in path[first:]:
            self._add_to(node, of_tenant)
        self._pins[pin] = None
        self._at.setdefault(anchor, []).append(pin)
        self._push_deadline(pin)
        for replaced in continued:
            self._remove(replaced)
        self._limit()

    def give_way(self, num_pages: int) -> None:
        """Unpin as many pages as an eviction of `num_pages` needs. So many can be evicted."""
        while self.tree.num_unpinned < num_pages:
            oldest = next(iter(self._pins))
            # A pin whose end is held by a request has nothing to give, as a rule.
            pin = next((pin for pin in self._pins if not pin.end.ref_count), oldest)
            self.stats.gave_way += self._shorten(pin)

    def release(self, tenant: str, key: str | None) -> int:
        """End the pins of a tenant that have a key, or all of it. Return their number.

        They are as good as any other cached page from then on.

        Args:
            tenant: name of the tenant.
            key: the key; None: any.
        """
        ended = [
            pin for pin in self._pins if pin.owner[0] == tenant and key in (None, pin.owner[1])
        ]
        for pin in ended:
            self._remove(pin)
        self.stats.released += len(ended)
        return len(ended)

    def release_all(self) -> None:
        """End all pins."""
        self.stats.released += len(self._pins)
        for pin in list(self._pins):
            self._remove(pin)

    def info(self) -> InfoValues:
        """Return the values of the server info."""
        return {
            "cache_pins": len(self._pins),
            "cache_pinned_pages": self.num_pages,
            "cache_pinned_pages_max": self.max_pages,
            "cache_pins_gave_way_total": self.stats.gave_way,
            "cache_pins_over_limit_total": self.stats.over_limit,
            "cache_pins_expired_total": self.stats.expired,
            "cache_pins_released_total": self.stats.released,
        }

    # --- the prefix tree changes ------------------------------------------------------------------

    def add(self, node: Node) -> None:
        """Do nothing: a node with a new page has no pin."""

    def evict(self, node: Node) -> None:
        """End the pins of a node that no request can match any more."""
        if node.num_pins:
            for pin in [pin for pin in self._pins if node in _nodes(pin)]:
                self._remove(pin)

    def forget(self, node: Node) -> None:
        """Do nothing: a node without a page has no pin."""

    # --- pins and their nodes ---------------------------------------------------------------------

    def _push_deadline(self, pin: Pin) -> None:
        heapq.heappush(self._deadlines, (pin.expires_at, next(self._order), pin))

    def _limit(self) -> None:
        """Shorten pins until all together have their share at most.

        The number of pins is bounded, too: one for each page.
        """
        while self.num_pages > self.max_pages:
            self._take_from_largest(TenantPins.num_pages, lambda: self.num_pages)
        while len(self._pins) > self.max_pages:
            self._take_from_largest(TenantPins.num_pins, lambda: len(self._pins))

    def _take_from_largest(
        self, size: Callable[[TenantPins], float], total: Callable[[], int]
    ) -> None:
        """Shorten the pins of the tenant that has the most, until another has more or all fit."""
        largest, *others = heapq.nlargest(2, self._tenants.values(), size)
        next_size = size(others[0]) if others else 0.0
        while total() > self.max_pages and size(largest) >= next_size and largest.pins:
            self.stats.over_limit += self._shorten(next(iter(largest.pins)))

    def _shorten(self, pin: Pin) -> int:
        """Take a pin from its deepest node. Return the number of pages that have none any more."""
        node = pin.end
        assert node.parent is not None, "a pinned node is in the tree"
        if pin.num_nodes == 1:
            return self._remove(pin)
        if node is pin.anchor:
            self._take_from_anchor(pin)
            pin.anchor = node.parent
            self._at.setdefault(pin.anchor, []).append(pin)
        pin.end, pin.num_nodes = node.parent, pin.num_nodes - 1
        return self._take_from(node, self._tenants[pin.owner[0]])

    def _remove(self, pin: Pin) -> int:
        """End a pin. Return the number of pages that have none any more."""
        nodes, of_tenant = _nodes(pin), self._tenants[pin.owner[0]]
        del self._pins[pin], of_tenant.pins[pin]
        if not of_tenant.pins:
            del self._tenants[pin.owner[0]]
        self._take_from_anchor(pin)
        pin.num_nodes = 0
        if len(self._deadlines) > 2 * len(self._pins) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self._pins]
            heapq.heapify(self._deadlines)
        return sum(self._take_from(node, of_tenant) for node in nodes)

    def _take_from_anchor(self, pin: Pin) -> None:
        pins = self._at[pin.anchor]
        pins.remove(pin)
        if not pins:
            del self._at[pin.anchor]

    def _add_to(self, node: Node, of_tenant: TenantPins) -> None:
        self.tree.pin(node)
        of_tenant.nodes[node] += 1
        self.num_pages += node.num_pins == 1

    def _take_from(self, node: Node, of_tenant: TenantPins) -> int:
        self.tree.unpin(node)
        of_tenant.nodes[node] -= 1
        if not of_tenant.nodes[node]:
            del of_tenant.nodes[node]
        is_last = node.num_pins == 0
        self.num_pages -= is_last
        return is_last

    def check(self) -> None:
        """Raise AssertionError where pins and nodes contradict each other."""
        num_pins: Counter[Node] = Counter()
        of_tenants: dict[str, Counter[Node]] = {}
        for pin in self._pins:
            assert pin in self._at[pin.anchor]
            nodes = _nodes(pin)
            assert nodes, "a pin has no node"
            assert pin in self._tenants[pin.owner[0]].pins
            of_tenants.setdefault(pin.owner[0], Counter()).update(nodes)
            num_pins.update(nodes)
            for node in nodes:
                assert node.is_shared, "a page is pinned that no request can match"
        assert sum(map(len, self._at.values())) == len(self._pins)
        assert self.num_pages == len(num_pins) <= self.max_pages
        assert {name: each.nodes for name, each in self._tenants.items()} == of_tenants
        assert sum(len(each.pins) for each in self._tenants.values()) == len(self._pins)
        in_tree = {node: node.num_pins for node in self.tree.nodes() if node.num_pins}
        assert in_tree == num_pins, "a node has other pins than those whose path it is on"


def _nodes(pin: Pin) -> list[Node]:
    """Return the nodes of a pin, the deepest one first."""
    nodes, node = [], pin.end
    for _ in range(pin.num_nodes):
        assert node.parent is not None, "a pinned node is in the tree"
        nodes.append(node)
        node = node.parent
    return nodes
