"""What a scheduler reports to the frontend beside the texts.

`ReplicaReport` gathers it; `PageChanges` notes which blocks of the prefix tree were added and
evicted, for the frontend's router.
"""

from collections.abc import Iterable

from quadriga.server.prefix_blocks import block_hash, pages_per_block
from quadriga.wire.packing import pack_ids
from quadriga.wire.to_detok import EndedRequest, HeldChoice, ReplicaNews
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.prefix_tree import Node
from scheduler_proc.state.request import Request


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


class ReplicaReport:
    """Gather what the frontend has to know beside the texts.

    Every report restates which requests are open here and which ends can be replayed, after a
    restart of the frontend or of the detokenizer. Where requests can move to another replica, each
    step has a report, too, so that the frontend knows their tokens and the pages of the pool.

    Args:
        notes_steps: requests can move.

    Attributes:
        restates: the next report does not build on earlier ones.
        frontend: as in ReplicaNews.
    """

    def __init__(self, notes_steps: bool = False) -> None:
        self._notes_steps = notes_steps
        self._changes: PageChanges | None = None
        self.restates = notes_steps
        self.frontend = 0

    def watch(self, kv: KVCache) -> None:
        """Report the pages of a new, empty pool from now on."""
        if self._notes_steps:
            self._changes = PageChanges(kv.page_size)
            kv.tree.observers.append(self._changes)
            self.restates = True

    def restate(self) -> None:
        """Report everything, for a frontend or detokenizer that knows nothing."""
        if self._changes is not None:
            self._changes.restate()
        self.restates = True

    def take(
        self, kv: KVCache, live: Iterable[Request], ended: Iterable[EndedRequest]
    ) -> ReplicaNews | None:
        """Return the report, and begin a new one. None where there is nothing to report.

        Args:
            kv: the pool.
            live: all open requests.
            ended: the ended requests that can be replayed.
        """
        restates, self.restates = self.restates, False
        if not (restates or self._notes_steps):
            return None
        added, evicted = (b"", b"") if self._changes is None else self._changes.take()
        if not restates:
            return ReplicaNews(added, evicted, kv.num_available)
        held = [_held(request) for request in live]
        return ReplicaNews(added, b"", kv.num_available, True, held, list(ended), self.frontend)


def _held(request: Request) -> HeldChoice:
    return HeldChoice(
        request.seq,
        request.client,
        request.request_id,
        request.index,
        pack_ids(request.published),
        request.first_token_at,
        request.placement,
    )
