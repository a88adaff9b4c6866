"""The prefix tree: which pages hold the KV of which beginning of a token sequence.

One node is one page: the `page_size` tokens that follow those of its parent. A page is the
smallest thing that two requests can share, so a node never needs to be split, and a match is
always a whole number of pages.

A request locks a whole path from the root. So a locked node's parent is locked, too, and paths are
unlocked deepest node first: among the unlocked nodes, in the order in which they lost their last
lock, a node always comes before its parent. That order is therefore the order of eviction: least
recently used first, leaves before their parents, without a search.

A pin keeps an unlocked node from that order, as long as it has one (see pins.py). A path is pinned
from the root, too; a node that loses its last pin counts as just used.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol


class Node:
    """A cached page.

    Attributes:
        parent: None for the root, and for a node that was evicted.
        depth: number of pages from the root down to this one.
        ref_count: number of requests that lock it.
        num_pins: number of pins that it has.
        is_shared: whether requests may match it. Once they may not, they never may again.
    """

    __slots__ = ("children", "depth", "is_shared", "key", "num_pins", "page", "parent", "ref_count")

    def __init__(self, parent: "Node | None", key: bytes, page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.ref_count = 0
        self.num_pins = 0
        self.is_shared = True
        self.children: dict[bytes, Node] = {}

    def path(self) -> "list[Node]":
        """Return the nodes from below the root down to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


class TreeObserver(Protocol):
    """Hears which nodes get a page, lose it, and leave the tree."""

    def add(self, node: Node) -> None:
        """Take in that a node has a page."""

    def evict(self, node: Node) -> None:
        """Take in that a node has lost its page."""

    def forget(self, node: Node) -> None:
        """Take in that a node has left the tree."""


class PrefixTree:
    """Nodes by their tokens. It only knows the numbers of pages; evicted ones are the caller's.

    Attributes:
        observers: hear of every change.
    """

    def __init__(self) -> None:
        self.observers: list[TreeObserver] = []
        self.root = Node(None, b"", -1)
        self._unlocked: OrderedDict[Node, None] = OrderedDict()  # and without a pin
        self._pinned: set[Node] = set()  # and unlocked
        self._num_withdrawn = 0

    @property
    def num_unlocked(self) -> int:
        """Number of pages that can be evicted; those with pins when these have given way."""
        return len(self._unlocked) + len(self._pinned)

    @property
    def num_unpinned(self) -> int:
        """Number of pages that can be evicted now."""
        return len(self._unlocked)

    def add(self, parent: Node, key: bytes, page: int) -> Node:
        """Add a node, locked by the request that computes the page, and return it."""
        node = parent.children[key] = Node(parent, key, page)
        node.ref_count = 1
        for observer in self.observers:
            observer.add(node)
        return node

    def lock(self, node: Node) -> None:
        """Add a lock, which keeps the node from eviction. Its parent must be locked before."""
        if node.ref_count == 0:
            if node.num_pins:
                self._pinned.remove(node)
            else:
                del self._unlocked[node]
        node.ref_count += 1

    def unlock(self, path: list[Node]) -> None:
        """Take one lock from each node of a path that was locked from the root."""
        for node in reversed(path):
            node.ref_count -= 1
            if node.ref_count == 0:
                if node.num_pins:
                    self._pinned.add(node)
                else:
                    self._unlocked[node] = None

    def pin(self, node: Node) -> None:
        """Add a pin to a node that has a page."""
        if node.ref_count == 0 and node.num_pins == 0:
            del self._unlocked[node]
            self._pinned.add(node)
        node.num_pins += 1

    def unpin(self, node: Node) -> None:
        """Take a pin from a node, after those below it."""
        node.num_pins -= 1
        if node.ref_count == 0 and node.num_pins == 0:
            self._pinned.remove(node)
            self._unlocked[node] = None

    def evict(self, count: int) -> list[int]:
        """Remove the `count` least recently used nodes without a pin, and return their pages."""
        pages = []
        for _ in range(count):
            node, _none = self._unlocked.popitem(last=False)
            assert node.parent is not None, "the root is not evicted"
            assert not node.children, "only leaves are evicted"
            del node.parent.children[node.key]
            node.parent = None
            for observer in self.observers:
                observer.evict(node)
                observer.forget(node)
            pages.append(node.page)
        return pages

    def withdraw(self, node: Node) -> None:
        """Let no request match a node or those below it any more; those that lock them keep them.

        It stays in the tree until it is evicted, under a key that is not one of tokens.
        """
        if not node.is_shared:
            return
        assert node.parent is not None, "a locked node is in the tree"
        del node.parent.children[node.key]
        self._num_withdrawn += 1
        node.key = b"withdrawn %d" % self._num_withdrawn
        node.parent.children[node.key] = node
        stack = [node]
        while stack:
            below = stack.pop()
            below.is_shared = False
            for observer in self.observers:
                observer.evict(below)
            stack += below.children.values()

    def nodes(self) -> Iterator[Node]:
        """Yield every node below the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def check(self) -> None:
        """Raise AssertionError where locks, order or depths contradict each other."""
        place = {node: number for number, node in enumerate(self._unlocked)}
        for node in self.nodes():
            parent = node.parent
            assert parent is not None
            assert node.depth == parent.depth + 1
            self._check_place(node, node in place)
            if parent is not self.root:
                assert parent.ref_count >= node.ref_count, "a child is locked without its parent"
                assert parent.num_pins >= node.num_pins, "a child is pinned without its parent"
                if parent in place:
                    assert place[node] < place[parent], "a parent would go first"

    def _check_place(self, node: Node, is_evictable: bool) -> None:
        """Raise AssertionError where a node with a page is not where its locks and pins say."""
        is_unlocked = node.ref_count == 0
        assert is_evictable == (is_unlocked and node.num_pins == 0), (
            "an unlocked node has locks or pins, or a node without them is missing"
        )
        assert (node in self._pinned) == (is_unlocked and node.num_pins > 0), (
            "a pinned node has locks or no pins, or one without locks is missing"
        )
