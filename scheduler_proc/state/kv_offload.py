"""KV pages beyond the pool: which are stored and loaded, and which requests wait for them."""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

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
        fetched_pages: pages among the loaded ones that came from other replicas.
        fetch_seconds: duration of the loads with such pages.
        fetch_page_s: seconds for each page in the fastest of these; 0.0 before the first one.
    """

    loads: int = 0
    loaded_tokens: int = 0
    load_seconds: float = 0.0
    stored_pages: int = 0
    missed_pages: int = 0
    damaged_pages: int = 0
    disk_failed: bool = False
    fetched_pages: int = 0
    fetch_seconds: float = 0.0
    fetch_page_s: float = 0.0

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

    def transfer_info(self, page_bytes: int) -> InfoValues:
        """Return the values of pages from other replicas. page_bytes: size of a page."""
        return {
            "kv_transfer_pages_total": self.fetched_pages,
            "kv_transfer_bytes_total": self.fetched_pages * page_bytes,
            "kv_transfer_seconds_total": self.fetch_seconds,
        }


# Decide which pages the worker copies to the tiers beyond the pool, and which it brings back.
#
# A page has a name: the hash of all tokens up to its end, and of the salt. Each page that enters
# the prefix tree is stored under its name, unless it is already. A request that could be
# admitted, and whose next page is not in the tree but in a tier, waits in the queue until the
# worker has loaded what it can use; then it finds these pages in the tree. A load holds its pages
# as a request does, so that they are counted, and cannot be given to others.
#
# Where replicas have roles, the tiers of those that compute prompts are tiers of the others, too.
# What these have is not known here: a request that has tokens, and so was computed before, looks
# for all of its pages there. The load ends at the first one that is missing or damaged.


class TierFacts(NamedTuple):
    """What a worker says of its tiers.

    Attributes:
        stored: names of the pages in the own tiers, joined; None: there are no own tiers.
        fetches: pages can be loaded from the tiers of other replicas.
        page_bytes: size of a page.
    """

    stored: bytes | None = None
    fetches: bool = False
    page_bytes: int = 0

    @property
    def are_none(self) -> bool:
        """Whether there are no tiers at all."""
        return self.stored is None and not self.fetches


NO_TIERS = TierFacts()

# Of the pages that can be allocated, those that a load takes for a request that does not run yet.
AHEAD_SHARE = 0.5


@dataclass(slots=True, eq=False)
class PageLoad:
    """Pages that the worker loads. It holds these, and the path above them.

    Attributes:
        hashes: names of the pages that are loaded.
        waiting: numbers of the requests that wait for them.
        is_ahead: it was begun for a request that is not here yet.
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
    is_ahead: bool = False


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

    def expects_pages(self, request: Request) -> bool:
        """Return whether a waiting request's prompt was computed before, perhaps elsewhere.

        It is expected to find its pages in the tiers, and to have little left to compute then.
        """

    def begin_load(self, request: Request) -> bool:
        """Load what a request that can be admitted finds in the tiers, once for each admission.

        Returns:
            Whether there is anything, for which the request has to wait.
        """

    def load_at_once(self, request: Request) -> None:
        """Load the pages of a new request whose prompt another replica has computed.

        Only if there is room for more than these. The request waits for them.
        """

    def load_ahead(self, token_ids: "array[int]", cache_salt: bytes) -> None:
        """Load the first pages of a prompt that another replica computes, if there is room.

        They go to the prefix tree, and nothing holds them there.

        Args:
            token_ids: tokens that fill these pages, and perhaps some more.
            cache_salt: as of Request.
        """

    def num_stored(self, request: Request, num_known: int) -> int:
        """Return how many of a prompt's first pages are in the own tiers.

        Args:
            request: its prompt is being computed.
            num_known: so many are.
        """

    def has_stored_prompt(self, request: Request) -> bool:
        """Return whether every full page of a running request's prompt is in the own tiers."""

    def store_again(self, request: Request) -> None:
        """Store the pages of a running request's prompt that made room for others meanwhile."""

    def waiting_for(self, load: int) -> Sequence[int]:
        """Return the numbers of the requests that wait for a load. load: its number."""

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

    def expects_pages(self, request: Request) -> bool:  # noqa: ARG002
        """Return False: there are no tiers."""
        return False

    def begin_load(self, request: Request) -> bool:  # noqa: ARG002
        """Return False: there is nothing to load."""
        return False

    def load_at_once(self, request: Request) -> None:
        """Do nothing: there are no tiers."""

    def load_ahead(self, token_ids: "array[int]", cache_salt: bytes) -> None:
        """Do nothing: there are no tiers."""

    def num_stored(self, request: Request, num_known: int) -> int:  # noqa: ARG002
        """Return 0: nothing is stored."""
        return 0

    def has_stored_prompt(self, request: Request) -> bool:  # noqa: ARG002
        """Return False: nothing is stored."""
        return False

    def store_again(self, request: Request) -> None:
        """Do nothing."""

    def waiting_for(self, load: int) -> Sequence[int]:  # noqa: ARG002
        """Return no number: no load has begun."""
        return ()

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

    def __init__(self, kv: KVCache, facts: TierFacts, stats: OffloadStats) -> None:
        """Initialize.

        Args:
            kv: the pool, which is empty.
            facts: what the worker says of its tiers.
            stats: counters.
        """
        self.stats = stats
        self._kv = kv
        self._fetches, self._page_bytes = facts.fetches, facts.page_bytes
        self._stores = facts.stored is not None
        # Whether a page can be loaded. The worker has been asked to store it, if it cannot yet.
        self._can_load = dict.fromkeys(split_hashes(facts.stored or b"", PAGE_HASH_BYTES), True)
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
        if self._stores and name not in self._can_load:
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

    def num_stored(self, request: Request, num_known: int) -> int:
        """Return how many of a prompt's first pages are in the own tiers."""
        path = request.prefix_path
        end = min(self._num_first_pages(request), len(path)) if self._stores else 0
        while num_known < end and self._can_load.get(self._names[path[num_known]]):
            num_known += 1
        return num_known

    def has_stored_prompt(self, request: Request) -> bool:
        """Return whether every full page of a running request's prompt is in the own tiers."""
        num_pages = self._num_first_pages(request)
        path = request.prefix_path[:num_pages]
        return (
            self._stores
            and len(path) == num_pages
            and all(self._can_load.get(self._names[node]) for node in reversed(path))
        )

    def _num_first_pages(self, request: Request) -> int:
        """Return the number of full pages of a prompt and of the given tokens after it."""
        return (request.num_prompt + len(request.given_ids)) // self._kv.page_size

    def store_again(self, request: Request) -> None:
        """Store the pages of a running request's prompt that made room for others meanwhile."""
        if self._stores and not self.stats.disk_failed:
            for node in request.prefix_path[: self._num_first_pages(request)]:
                if self._names[node] not in self._can_load and node.is_shared:
                    self._to_store[node] = None

    # --- loads ------------------------------------------------------------------------------------

    def awaits(self, request: Request) -> bool:
        """Return whether a waiting request waits for a load that has begun."""
        return request.seq in self._waiting

    def expects_pages(self, request: Request) -> bool:
        """Return whether a waiting request's prompt was computed before, perhaps elsewhere."""
        return self._fetches and request.may_load and request.first_token_at > 0

    def begin_load(self, request: Request) -> bool:
        """Load what a request that can be admitted finds in the tiers; return whether it waits."""
        if not request.may_load or request.computes_all:
            return False
        kv = self._kv
        node = kv.match_prefix(request)
        names = self._names_below(node, request)
        load = self._loading.get(names[0]) if names else None
        if load is None:
            request.may_load = False
            if not names:
                return False
            num_tokens = (node.depth + len(names)) * kv.page_size
            load = PageLoad(request.tokens[:num_tokens], request.cache_salt, names)
            self._begin(load, node)
        self._let_wait(request, load)
        return True

    def _let_wait(self, request: Request, load: PageLoad) -> None:
        load.waiting.append(request.seq)
        self._waiting[request.seq] = load

    def _names_below(self, node: Node, request: Request) -> list[bytes]:
        """Return the names of the request's next pages that can be loaded, or are being loaded."""
        kv, name, names = self._kv, self._names[node], list[bytes]()
        fetches = self._fetches and request.first_token_at > 0
        for index in range(node.depth, (request.num_known_tokens - 1) // kv.page_size):
            name = page_hash(name, kv.page_key(request, index))
            can_load = fetches or self._can_load.get(name)
            if not can_load or (names and name in self._loading):
                break
            names.append(name)
        return names

    def load_at_once(self, request: Request) -> None:
        """Load the pages of a new request whose prompt another replica has computed."""
        if self.expects_pages(request) and not request.computes_all:
            load = self._begin_early(request.tokens[:-1], request.cache_salt, is_ahead=False)
            if load is not None:
                request.may_load = False
                self._let_wait(request, load)

    def load_ahead(self, token_ids: "array[int]", cache_salt: bytes) -> None:
        """Load the first pages of a prompt that another replica computes, if there is room."""
        if self._fetches:
            self._begin_early(token_ids, cache_salt, is_ahead=True)

    def _begin_early(
        self, token_ids: "array[int]", cache_salt: bytes, is_ahead: bool
    ) -> PageLoad | None:
        """Begin to load the pages of some tokens that are not in the pool.

        Returns:
            The load; None where nothing is missing, an earlier load brings a part of it, or there
            is no room for more than these pages.
        """
        kv, num_pages = self._kv, len(token_ids) // self._kv.page_size
        if num_pages > AHEAD_SHARE * kv.num_available:
            return None
        load = PageLoad(token_ids[: num_pages * kv.page_size], cache_salt, [], is_ahead=is_ahead)
        node = kv.tree.root
        while node.depth < num_pages and (
            child := node.children.get(kv.page_key(load, node.depth))
        ):
            node = child
        name = self._names[node]
        for index in range(node.depth, num_pages):
            name = page_hash(name, kv.page_key(load, index))
            if name in self._loading:
                return None
            load.hashes.append(name)
        if not load.hashes:
            return None
        self._begin(load, node)
        return load

    def _begin(self, load: PageLoad, node: Node) -> None:
        """Begin a load of pages. node: the last page before them."""
        names = load.hashes
        self._kv.hold(load, node.path(), node.depth + len(names))
        self._loads[self._next_load] = load
        self._loading.update(dict.fromkeys(names, load))
        pages = pack_ids(load.pages[node.depth :])
        self._messages.append(
            LoadPages(self._next_load, pages, b"".join(names), is_ahead=load.is_ahead)
        )
        self._next_load += 1

    def _on_loaded(self, message: PagesLoaded) -> None:
        """Put the pages of a load into the prefix tree, and let requests wait no longer."""
        load = self._loads.pop(message.load)
        num_loaded, num_missed = message.num_loaded, len(load.hashes) - message.num_loaded
        load.num_computed_tokens += num_loaded * self._kv.page_size
        for name in load.hashes:
            del self._loading[name]
        for name in load.hashes[num_loaded : num_loaded + 1]:
            self._can_load.pop(name, None)
        if message.num_fetched and self._stores:  # they need not be stored here, too
            self._can_load.update(dict.fromkeys(load.hashes[:num_loaded], True))
        self._kv.release(load)
        for seq in load.waiting:
            del self._waiting[seq]
        stats = self.stats
        stats.loads += 1
        stats.loaded_tokens += num_loaded * self._kv.page_size
        stats.load_seconds += message.seconds
        stats.missed_pages += num_missed > 0 and not load.is_ahead
        stats.damaged_pages += message.num_damaged
        if message.num_fetched:
            stats.fetched_pages += message.num_fetched
            stats.fetch_seconds += message.seconds
            page_s = message.seconds / message.num_fetched
            stats.fetch_page_s = min(stats.fetch_page_s or page_s, page_s)

    def waiting_for(self, load: int) -> Sequence[int]:
        """Return the numbers of the requests that wait for a load. load: its number."""
        return self._loads[load].waiting

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
        values = self.stats.info(len(self._can_load))
        return values | self.stats.transfer_info(self._page_bytes) if self._fetches else values
