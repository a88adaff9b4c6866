"""KV pages beyond the pool: which are stored and loaded, and which requests wait for them."""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quadriga.server.prefix_blocks import PAGE_HASH_BYTES, page_hash, split_hashes
from quadriga.wire.client import InfoValues
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import LoadPages, PagesLoaded, StoredPages, StorePages
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.prefix_tree import Node
from scheduler_proc.state.request import ALL_TOKENS, Request


@dataclass(slots=True)
class OffloadStats:
    """Totals since start, beyond restarts of the worker.

    Attributes:
        loads: transfers from the tiers to the pool.
        loaded_tokens: tokens whose keys and values were loaded.
        load_seconds: duration of the loads.
        stored_pages: pages that the tiers have taken in.
        missed_pages: pages at which a load ended early, because they were not there any more.
        damaged_pages: pages whose file was not what was written.
        disk_failed: whether the disk takes no pages at present.
    """

    loads: int = 0
    loaded_tokens: int = 0
    load_seconds: float = 0.0
    stored_pages: int = 0
    missed_pages: int = 0
    damaged_pages: int = 0
    disk_failed: bool = False

    def info(self, num_pages: int) -> InfoValues:
        """Return the values of the server info.

        Args:
            num_pages: pages in the tiers, or on their way there.
        """
        return {
            "kv_offload_pages": num_pages,
            "kv_offload_disk_failed": int(self.disk_failed),
            "kv_offload_loads_total": self.loads,
            "kv_offload_loaded_tokens_total": self.loaded_tokens,
            "kv_offload_load_seconds_total": self.load_seconds,
            "kv_offload_stored_pages_total": self.stored_pages,
            "kv_offload_missed_pages_total": self.missed_pages,
            "kv_offload_damaged_pages_total": self.damaged_pages,
        }


# Decide which pages the worker copies to the tiers beyond the pool, and which it brings back.
#
# A page has a name: the hash of all tokens up to its end, and of the salt. Each page that enters
# the prefix tree is stored under its name, unless it is already. A request that could be
# admitted, and whose next page is not in the tree but in a tier, waits in the queue until the
# worker has loaded what it can use; then it finds these pages in the tree. A load holds its pages
# as a request does, so that they are counted, and cannot be given to others.


@dataclass(slots=True, eq=False)
class PageLoad:
    """Pages that the worker loads. It holds these, and the path above them.

    Attributes:
        hashes: names of the pages that are loaded.
        waiting: numbers of the requests that wait for them.
    """

    tokens: "array[int]"
    cache_salt: bytes
    hashes: list[bytes]
    num_computed_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    first_page: int = 0
    page_capacity: int = 0
    prefix_path: list[Node] = field(default_factory=list)
    num_shareable: int = ALL_TOKENS
    waiting: list[int] = field(default_factory=list)


class KVOffload(Protocol):
    """The tiers beyond the pool, as the core and the scheduler use them."""

    @property
    def loads(self) -> Collection[PageLoad]:
        """Transfers to the pool that are under way, each of which holds pages."""

    @property
    def is_storing(self) -> bool:
        """Whether the worker has been asked to store pages, and has not said that it has."""

    def awaits(self, request: Request) -> bool:
        """Return whether a waiting request waits for a load that has begun."""

    def begin_load(self, request: Request) -> bool:
        """Load what a request that can be admitted finds in the tiers, once for each admission.

        Returns:
            Whether there is anything, for which the request has to wait.
        """

    def on_message(self, message: StoredPages | PagesLoaded) -> None:
        """Take in what a transfer has brought."""

    def take_messages(self) -> Sequence[LoadPages | StorePages]:
        """Return the messages for the worker since the last call.

        To be called after each plan that was sent, so that the worker copies pages after they are
        computed and before another plan reuses them.
        """

    def info(self) -> InfoValues:
        """Return gauges and counters, as docs/protocol.md lists them."""


class NoOffload:
    """No tiers beyond the pool: nothing is stored and nothing loaded."""

    loads: Collection[PageLoad] = ()
    is_storing = False

    def awaits(self, request: Request) -> bool:  # noqa: ARG002
        """Return False: no load has begun."""
        return False

    def begin_load(self, request: Request) -> bool:  # noqa: ARG002
        """Return False: there is nothing to load."""
        return False

    def on_message(self, message: StoredPages | PagesLoaded) -> None:
        """Do nothing."""

    def take_messages(self) -> Sequence[LoadPages | StorePages]:
        """Return no message."""
        return ()

    def info(self) -> InfoValues:
        """Return no gauges and counters: the tiers do not exist."""
        return {}


class TieredOffload:
    """The names of the pages in the tiers, and the transfers to and from them.

    It observes the prefix tree. The methods are those of the protocol `KVOffload`.
    """

    def __init__(self, kv: KVCache, stored: bytes, stats: OffloadStats) -> None:
        """Initialize.

        Args:
            kv: the pool, which is empty.
            stored: names of the pages in the tiers, joined.
            stats: counters.
        """
        self.stats = stats
        self._kv = kv
        # Whether a page can be loaded. The worker has been asked to store it, if it cannot yet.
        self._can_load = dict.fromkeys(split_hashes(stored, PAGE_HASH_BYTES), True)
        self._names: dict[Node, bytes] = {kv.tree.root: b""}
        self._to_store: dict[Node, None] = {}
        self._loads: dict[int, PageLoad] = {}
        self.loads: Collection[PageLoad] = self._loads.values()
        self._loading: dict[bytes, PageLoad] = {}
        self._waiting: dict[int, PageLoad] = {}
        self._next_load = 0
        self._messages: list[LoadPages | StorePages] = []
        kv.tree.observers.append(self)

    # --- the prefix tree changes ------------------------------------------------------------------

    def add(self, node: Node) -> None:
        """Take in that a node has a page, which is to be stored unless it is already."""
        assert node.parent is not None
        name = self._names[node] = page_hash(self._names[node.parent], node.key)
        if name not in self._can_load:
            self._to_store[node] = None

    def evict(self, node: Node) -> None:
        """Take in that a node has lost its page."""
        self._to_store.pop(node, None)

    def forget(self, node: Node) -> None:
        """Take in that a node has left the tree."""
        self._names.pop(node, None)

    @property
    def is_storing(self) -> bool:
        """Whether the worker has been asked to store pages, and has not said that it has."""
        if self.stats.disk_failed:
            return False
        return bool(self._to_store) or not all(self._can_load.values())

    # --- loads ------------------------------------------------------------------------------------

    def awaits(self, request: Request) -> bool:
        """Return whether a waiting request waits for a load that has begun."""
        return request.seq in self._waiting

    def begin_load(self, request: Request) -> bool:
        """Load what a request that can be admitted finds in the tiers; return whether it waits."""
        if not request.may_load or request.computes_all:
            return False
        node = self._kv.match_prefix(request)
        names = self._names_below(node, request)
        load = self._loading.get(names[0]) if names else None
        if load is None:
            request.may_load = False
            if not names:
                return False
            load = self._load(request, node, names)
        load.waiting.append(request.seq)
        self._waiting[request.seq] = load
        return True

    def _names_below(self, node: Node, request: Request) -> list[bytes]:
        """Return the names of the request's next pages that can be loaded, or are being loaded."""
        kv, name, names = self._kv, self._names[node], list[bytes]()
        for index in range(node.depth, (request.num_known_tokens - 1) // kv.page_size):
            name = page_hash(name, kv.page_key(request, index))
            if not self._can_load.get(name) or (names and name in self._loading):
                break
            names.append(name)
        return names

    def _load(self, request: Request, node: Node, names: list[bytes]) -> PageLoad:
        num_pages = node.depth + len(names)
        tokens = request.tokens[: num_pages * self._kv.page_size]
        load = PageLoad(tokens, request.cache_salt, names)
        self._kv.hold(load, node.path(), num_pages)
        self._loads[self._next_load] = load
        self._loading.update(dict.fromkeys(names, load))
        pages = pack_ids(load.pages[node.depth :])
        self._messages.append(LoadPages(self._next_load, pages, b"".join(names)))
        self._next_load += 1
        return load

    def _on_loaded(self, message: PagesLoaded) -> None:
        """Put the pages of a load into the prefix tree, and let requests wait no longer."""
        load = self._loads.pop(message.load)
        num_loaded, num_missed = message.num_loaded, len(load.hashes) - message.num_loaded
        load.num_computed_tokens += num_loaded * self._kv.page_size
        for name in load.hashes:
            del self._loading[name]
        for name in load.hashes[num_loaded : num_loaded + 1]:
            self._can_load.pop(name, None)
        self._kv.release(load)
        for seq in load.waiting:
            del self._waiting[seq]
        stats = self.stats
        stats.loads += 1
        stats.loaded_tokens += num_loaded * self._kv.page_size
        stats.load_seconds += message.seconds
        stats.missed_pages += num_missed > 0

    # --- the worker -------------------------------------------------------------------------------

    def on_message(self, message: StoredPages | PagesLoaded) -> None:
        """Take in what a transfer has brought."""
        if isinstance(message, PagesLoaded):
            self._on_loaded(message)
        else:
            self._on_stored(message)

    def _on_stored(self, message: StoredPages) -> None:
        """Take in which pages the tiers have gained and lost."""
        added = split_hashes(message.added, PAGE_HASH_BYTES)
        self._can_load.update(dict.fromkeys(added, True))
        for name in split_hashes(message.removed, PAGE_HASH_BYTES):
            self._can_load.pop(name, None)
        self.stats.stored_pages += len(message.added) // PAGE_HASH_BYTES
        self.stats.damaged_pages += message.num_damaged
        self.stats.disk_failed = message.disk_failed

    def take_messages(self) -> list[LoadPages | StorePages]:
        """Return the messages for the worker since the last call."""
        messages, self._messages = self._messages, []
        if self._to_store:
            pages = pack_ids([node.page for node in self._to_store])
            names = [self._names[node] for node in self._to_store]
            messages.append(StorePages(pages, b"".join(names)))
            self._can_load.update(dict.fromkeys(names, False))
            self._to_store = {}
        return messages

    def info(self) -> InfoValues:
        """Return gauges and counters, as docs/protocol.md lists them."""
        return self.stats.info(len(self._can_load))
