"""The pages of the KV pool: free ones, cached ones, and those that requests hold.

Where a page lies in memory is the worker's business; here it is a number from 0 to num_pages - 1.
Free + cached + held = all, always. Cached pages are the unlocked ones of the prefix tree: they are
as good as free, and evicted when they are needed.
"""

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from quadriga.server.tenants import parent_name
from scheduler_proc.state.pins import Pins, PinStats
from scheduler_proc.state.prefix_tree import Node, PrefixTree
from scheduler_proc.state.request import ALL_TOKENS, Request


class PageHolder(Protocol):
    """What holds pages: a request, or a transfer of the pages of its tokens.

    The attributes mean what they mean in Request.
    """

    tokens: "array[int]"
    cache_salt: bytes
    num_computed_tokens: int
    pages: list[int]
    first_page: int
    page_capacity: int
    prefix_path: list[Node]
    num_shareable: int


class PinLimits(NamedTuple):
    """How many pages pins may keep: a share of the pool, 0 to 1. stats: counters of the pins."""

    fraction: float
    stats: PinStats


NO_PINS = PinLimits(0.0, PinStats())


class KVCache:
    """Allocate pages to requests, take them back, and find what is already computed.

    Attributes:
        pins: the cached pages that are kept for a time.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        prefix_cache: bool = True,
        limits: PinLimits = NO_PINS,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.tree = self._make_tree()
        self.pins = Pins(self.tree, int(limits.fraction * num_pages), limits.stats)
        self._prefix_cache = prefix_cache
        self._free = list(range(num_pages - 1, -1, -1))

    def _make_tree(self) -> PrefixTree:
        return PrefixTree()

    @property
    def num_free(self) -> int:
        """Number of pages that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of pages that only the prefix cache has."""
        return self.tree.num_unlocked

    @property
    def num_available(self) -> int:
        """Number of pages that can be allocated now."""
        return len(self._free) + self.tree.num_unlocked

    @property
    def num_held(self) -> int:
        """Number of pages that requests hold."""
        return self.num_pages - self.num_available

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the whole pool holds."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def min_pages(self, num_tokens: int) -> int:
        """Return the number of pages without which a request of `num_tokens` tokens cannot run."""
        return self.pages_for(num_tokens)

    def growth(self, requests: Iterable[Request], max_tokens: int) -> int:
        """Return for how many tokens requests may still take pages, at most `max_tokens` each.

        What is known of a waiting request does not count: see `pages_needed`.
        """
        growth = 0
        for request in requests:
            remaining = request.max_total_tokens - request.num_known_tokens
            growth += remaining if remaining < max_tokens else max_tokens
        return growth

    # --- a request's way --------------------------------------------------------------------------

    def match_prefix(self, request: Request) -> Node:
        """Return the deepest node that holds a beginning of a waiting request's tokens.

        The search continues where the last one of this request ended. At least one token is left
        to compute: a step that computes nothing samples nothing. Prompt logprobs and
        some vectors need the whole prompt computed, so such a request matches nothing.
        """
        node, root = request.prefix_node, self.tree.root
        if node is None or not node.is_shared or (node.parent is None and node is not root):
            node = root  # the node was evicted, or is not shared any more
        elif request.prefix_miss and request.prefix_miss not in node.children:
            return node
        request.prefix_miss = b""
        if self._prefix_cache and not request.computes_all:
            max_depth = (request.num_known_tokens - request.num_read_at_end) // self.page_size
            while node.depth < max_depth:
                key = self.page_key(request, node.depth)
                child = node.children.get(key)
                if child is None:
                    request.prefix_miss = key
                    break
                node = child
        request.prefix_node = node
        return node

    def num_cached_tokens(self, request: Request) -> int:
        """Return how many tokens of a waiting request are cached."""
        return self.match_prefix(request).depth * self.page_size

    def pages_needed(self, request: Request) -> int:
        """Return how many available pages `allocate` would use.

        These are new pages, and cached ones that no other request holds.
        """
        node: Node | None = self.match_prefix(request)
        assert node is not None
        count = self.pages_for(request.num_known_tokens) - node.depth
        while node is not None and node.ref_count == 0 and node.parent is not None:
            count += 1
            node = node.parent
        return count

    def allocate(self, request: Request) -> None:
        """Lock the cached pages of the request's tokens, and allocate pages for the others.

        They must be available: see `pages_needed`.
        """
        path = self.match_prefix(request).path()
        self.pins.use(path)
        self.hold(request, path, self.pages_for(request.num_known_tokens))

    def hold(self, holder: PageHolder, path: list[Node], num_pages: int) -> None:
        """Give `num_pages` pages to a holder: those of a path, which it locks, and then others."""
        for node in path:
            self.tree.lock(node)
        holder.prefix_path, holder.num_shareable = path, ALL_TOKENS
        holder.num_computed_tokens = len(path) * self.page_size
        holder.pages = [node.page for node in path]
        holder.pages += self._take(num_pages - len(path))
        holder.page_capacity = len(holder.pages) * self.page_size

    def append_page(self, request: Request) -> int:
        """Append one page to the request and return its number. A page must be available."""
        self.cache_computed(request)
        page = self._free.pop() if self._free else self._evict(1)[0]
        request.pages.append(page)
        request.page_capacity += self.page_size
        return page

    def cache_computed(self, holder: PageHolder) -> None:
        """Put the holder's full pages into the tree, as far as their tokens are computed.

        Planned counts as computed, if the tokens are known: plans run in order, so a request that
        matches such a page reads it later. Where the same tokens are cached already, the holder
        keeps its own page and continues below that node. An unlocked node takes over the holder's
        page and its old one becomes free, so that the number of available pages stays; a locked
        one stays as it is, and the holder's page is a duplicate (see `free_duplicates`).
        """
        if not self._prefix_cache:
            return
        path, tree = holder.prefix_path, self.tree
        num_known = min(holder.num_computed_tokens, len(holder.tokens))
        num_full = min(num_known, holder.num_shareable) // self.page_size
        for index in range(len(path), num_full):
            parent = path[-1] if path else tree.root
            key = self.page_key(holder, index)
            node = parent.children.get(key)
            if node is None:
                node = tree.add(parent, key, holder.pages[index])
            else:
                if node.ref_count == 0:
                    self._replace_page(node, holder.pages[index])
                tree.lock(node)
            path.append(node)

    def withdraw(self, request: Request, position: int) -> None:
        """Share no page of a request with tokens from `position` on, whose KV is not finite."""
        request.num_shareable = min(request.num_shareable, position)
        first = position // self.page_size
        for node, page in zip(request.prefix_path[first:], request.pages[first:]):  # noqa: B905
            if node.page == page:
                self.tree.withdraw(node)

    def release(self, holder: PageHolder) -> None:
        """Take the holder's pages back. What it has computed stays cached."""
        self.cache_computed(holder)
        self._give_back(holder, holder.first_page, len(holder.pages))
        holder.pages, holder.prefix_path, holder.page_capacity = [], [], 0
        holder.first_page = 0

    def keep(self, request: Request) -> None:
        """Pin what a request holds and has computed, if it has asked for that."""
        if request.cache is not None:
            self.cache_computed(request)
            num_prompt = request.num_prompt // self.page_size
            path, first = request.prefix_path, request.first_page
            if num_kept := request.cache.num_tokens:
                path = path[: num_kept // self.page_size]
                num_prompt = len(path) + 1  # other prompts go on behind its last page
            tenant = parent_name(request.tenant)
            self.pins.keep(path, first, num_prompt, tenant, request.cache, request.weight)

    def release_unseen(self, holders: Iterable[Request]) -> None:
        """Take the pages back that no token to come can see; here every token sees all pages."""

    def free_duplicates(self, request: Request) -> bool:
        """Free the pages whose content the request has twice. Return whether there were any.

        One copy is in a page of its own, the other in a node that no other request locks.
        """
        duplicates = [(node, page) for node, page in _held_twice(request) if node.ref_count == 1]
        for node, page in duplicates:
            self._free.append(node.page)
            node.page = page
        return bool(duplicates)

    def flush(self) -> int:
        """Free all cached pages, also pinned ones, and return their number."""
        self.pins.release_all()
        count = self.tree.num_unlocked
        self._free += self.tree.evict(count)
        return count

    def _give_back(self, holder: PageHolder, first: int, end: int) -> None:
        """Unlock the nodes of pages `first` to `end` - 1 of a holder, free those not in them."""
        pages, path = holder.pages[first:end], holder.prefix_path[first:end]
        self._free += (page for page, node in zip(pages, path) if page != node.page)  # noqa: B905
        self._free += pages[len(path) :]
        self.tree.unlock(path)

    def _replace_page(self, node: Node, page: int) -> None:
        """Give an unlocked node another page with the same tokens."""
        self._free.append(node.page)
        node.page = page

    def page_key(self, holder: PageHolder, index: int) -> bytes:
        """Return the key of a page; that of the first one begins with the holder's salt."""
        start = index * self.page_size
        key = holder.tokens[start : start + self.page_size].tobytes()
        return key if index else holder.cache_salt + key

    def _evict(self, count: int) -> list[int]:
        """Evict pages, pinned ones where there are no others."""
        if count > self.tree.num_unpinned:
            self.pins.give_way(count)
        return self.tree.evict(count)

    def _take(self, count: int) -> list[int]:
        num_missing = count - len(self._free)
        if num_missing > 0:
            self._free += self._evict(num_missing)
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def check(self, holders: Iterable[PageHolder]) -> None:
        """Raise AssertionError where a page is lost or used twice. holders: all that hold pages."""
        self.tree.check()
        self.pins.check()
        pages = list(self._free)
        pages += (node.page for node in self.tree.nodes() if node.page >= 0)
        held = sum(node.ref_count > 0 for node in self.tree.nodes())
        for holder in holders:
            private = holder.pages[max(len(holder.prefix_path), holder.first_page) :]
            private += [page for _node, page in _held_twice(holder)]
            pages += private
            held += len(private)
        assert len(pages) == len(set(pages)), "a page is in two places"
        assert self.num_free + self.num_cached + held == self.num_pages, (
            f"{self.num_free} free + {self.num_cached} cached + {held} held pages"
            f" are not {self.num_pages}"
        )


def _held_twice(holder: PageHolder) -> Iterator[tuple[Node, int]]:
    """Yield the nodes of a holder that has a page of its own with the same tokens, and the page."""
    first = holder.first_page
    for node, page in zip(holder.prefix_path[first:], holder.pages[first:]):  # noqa: B905
        if node.page != page:
            yield node, page
