"""What a router has to know of a prefix tree: the blocks that it has gained and lost."""

from quadriga.prefix_blocks import block_hash, pages_per_block
from scheduler_proc.state.prefix_tree import Node


class PageChanges:
    """Hashes of the blocks whose last page was added to a tree, or evicted, since the last report.

    Args:
        page_size: tokens of a page.
    """

    def __init__(self, page_size: int) -> None:
        self._pages_per_block = pages_per_block(page_size)
        self._hashes: dict[Node, bytes] = {}
        self._added: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}

    def add(self, node: Node) -> None:
        """Take in that a node has a page."""
        if node.depth % self._pages_per_block:
            return
        found = self._hashes.get(node)
        if found is None:
            found = self._hashes[node] = self._hash(node)
        self._evicted.pop(found, None)
        self._added[found] = None

    def _hash(self, last: Node) -> bytes:
        keys, node = [], last
        for _ in range(self._pages_per_block):
            keys.append(node.key)
            assert node.parent is not None
            node = node.parent
        keys.reverse()
        return block_hash(self._hashes.get(node, b""), b"".join(keys))

    def evict(self, node: Node) -> None:
        """Take in that a node has lost its page."""
        found = self._hashes.get(node)
        if found is not None:
            self._added.pop(found, None)
            self._evicted[found] = None

    def forget(self, node: Node) -> None:
        """Take in that a node has left the tree."""
        self._hashes.pop(node, None)

    def take(self) -> tuple[bytes, bytes]:
        """Return the joined hashes of added and of evicted blocks, and begin a new report."""
        changes = b"".join(self._added), b"".join(self._evicted)
        self._added, self._evicted = {}, {}
        return changes

    def restate(self) -> None:
        """Let the next report hold every block of the tree, for a reader that knows nothing.

        A block without its last page is in it only where the page was lost since the last report.
        """
        self._added = dict.fromkeys(self._hashes.values())
        self._evicted = {}
