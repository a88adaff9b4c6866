"""The prefix tree: which pages hold the KV of which beginning of a token sequence.

One node is one page: the `page_size` tokens that follow those of its parent. A page is the
smallest thing that two requests can share, so a node never needs to be split, and what is found is
always a whole number of pages.

Users hold a whole path from the root. So whoever uses a node uses its parent too, and paths are
let go deepest node first: among the nodes without users, in the order in which they lost their
last one, a node always comes before its parent. That order is therefore the order of eviction:
least recently used first, leaves before what they hang on, without searching.
"""

from collections import OrderedDict
from collections.abc import Iterator


class Node:
    """A cached page. depth: pages from the root to here; users: requests that hold it.

    parent is None for the root, and for a node that was evicted.
    """

    __slots__ = ("children", "depth", "key", "page", "parent", "users")

    def __init__(self, parent: "Node | None", key: bytes, page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.users = 0
        self.children: dict[bytes, Node] = {}

    def path(self) -> "list[Node]":
        """The nodes from below the root down to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


class PrefixTree:
    """Nodes by their tokens. It knows pages by number only, and takes and gives none of its own
    accord: what `evict` returns belongs to the caller."""

    def __init__(self) -> None:
        self.root = Node(None, b"", -1)
        self._unused: OrderedDict[Node, None] = OrderedDict()

    @property
    def num_unused(self) -> int:
        """Pages that nobody uses and that can be evicted."""
        return len(self._unused)

    def add(self, parent: Node, key: bytes, page: int) -> Node:
        """A new node with one user: the one who computes the page."""
        node = parent.children[key] = Node(parent, key, page)
        node.users = 1
        return node

    def hold(self, node: Node) -> None:
        """One more user. The parent must be held before."""
        if node.users == 0:
            del self._unused[node]
        node.users += 1

    def let_go(self, path: list[Node]) -> None:
        """One user less for every node of a path that was held from the root."""
        for node in reversed(path):
            node.users -= 1
            if node.users == 0:
                self._unused[node] = None

    def evict(self, count: int) -> list[int]:
        """Remove the `count` least recently used nodes; their pages."""
        pages = []
        for _ in range(count):
            node, _none = self._unused.popitem(last=False)
            assert node.parent is not None and not node.children, "only leaves are evicted"
            del node.parent.children[node.key]
            node.parent = None
            pages.append(node.page)
        return pages

    def nodes(self) -> Iterator[Node]:
        """Every node below the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def check(self) -> None:
        """Raise AssertionError where users, order or depths contradict each other."""
        place = {node: number for number, node in enumerate(self._unused)}
        for node in self.nodes():
            parent = node.parent
            assert parent is not None and node.depth == parent.depth + 1
            assert (node.users == 0) == (node in place), "unused nodes are those without users"
            if parent is not self.root:
                assert parent.users >= node.users, "a child is used without its parent"
                assert parent.users or place[node] < place[parent], "a parent would go first"
