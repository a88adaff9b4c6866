"""The pages of a model in which every layer's attention has a window.

A token at position p sees the positions from p - window + 1 to p. So a request gives a page back as
soon as no token to come can see it, and a long prompt gets its pages chunk by chunk: whatever its
length, a request holds the pages of one window and of the tokens of its next step. Plans run in
order, so that steps in flight have read such a page before another request writes to it.

A page that was given back stays in the prefix tree until it is evicted. Its node then stays without
a page, as long as there are nodes below it. A request that matches a path needs only those of its
pages that the next token can see.
"""

from collections.abc import Iterable
from typing import NamedTuple

from quadriga.server.models.families.windows import num_seen_pages
from scheduler_proc.state.kv_cache import NO_PINS, KVCache, PinLimits
from scheduler_proc.state.prefix_tree import Node, PrefixTree
from scheduler_proc.state.request import ALL_TOKENS, Request

NO_PAGE = -1  # of a node whose page was evicted
UNSEEN = 0  # stands in a page table for a page that is not held, because no token to come sees it


class WindowedTree(PrefixTree):
    """A prefix tree of which any unlocked node may be evicted, in the order of the last locks.

    A path may be locked from any node on. A node leaves the tree when it has neither page nor
    children.
    """

    def __init__(self, num_seen: int) -> None:
        """Make an empty tree. num_seen: number of pages that the first token of a page can see."""
        super().__init__()
        self._num_seen = num_seen
        self._usable: dict[Node, Node] = {}

    def usable(self, node: Node) -> Node:
        """Return the deepest node on the path of `node` below which a request can continue.

        All pages are there that a token after it sees.
        """
        found = self._usable.get(node)
        if found is None:
            found = self._usable[node] = self._find_usable(node)
        return found

    def _find_usable(self, node: Node) -> Node:
        found, num_pages = node, 0
        while node.parent is not None and num_pages < self._num_seen:
            num_pages += 1
            if node.page == NO_PAGE:
                found, num_pages = node.parent, 0
            node = node.parent
        return found

    def restore(self, node: Node, page: int) -> None:
        """Give a page to a node without one. The node is unlocked."""
        node.page = page
        self._unlocked[node] = None
        self._usable.clear()
        for observer in self.observers:
            observer.add(node)

    def withdraw(self, node: Node) -> None:
        """Let no request match a node or those below it any more."""
        super().withdraw(node)
        self._usable.clear()

    def evict(self, count: int) -> list[int]:
        """Take the pages of the `count` least recently used nodes, and return them."""
        pages = []
        for _ in range(count):
            node, _none = self._unlocked.popitem(last=False)
            pages.append(node.page)
            node.page = NO_PAGE
            for observer in self.observers:
                observer.evict(node)
            while node.page == NO_PAGE and not node.children and node.parent is not None:
                parent, node.parent = node.parent, None
                del parent.children[node.key]
                for observer in self.observers:
                    observer.forget(node)
                node = parent
        self._usable.clear()
        return pages

    def check(self) -> None:
        """Raise AssertionError where locks, pages or depths contradict each other."""
        for node in self.nodes():
            assert node.parent is not None
            assert node.depth == node.parent.depth + 1
            if node.page == NO_PAGE:
                assert node.ref_count == 0, "a node without a page is locked"
                assert node.num_pins == 0, "a node without a page is pinned"
                assert node.children, "a node has neither page nor children"
                assert node not in self._unlocked, "a node without a page can be evicted"
            else:
                self._check_place(node, node in self._unlocked)


class PageSpan(NamedTuple):
    """The pages that a waiting request would hold: numbers first to end - 1 of its page table.

    Attributes:
        matched: node of the last one that is cached; the root if none is.
    """

    matched: Node
    first: int
    end: int


class WindowedKVCache(KVCache):
    """Pages of requests that hold no more than the window and a step need."""

    tree: WindowedTree

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        window: int,
        max_row_tokens: int,
        prefix_cache: bool,
        limits: PinLimits = NO_PINS,
    ) -> None:
        """Make an empty pool.

        Args:
            num_pages: size of the pool.
            page_size: in tokens.
            window: number of tokens, itself included, that a token sees.
            max_row_tokens: tokens of a prompt that one step computes; 0: all of them.
            prefix_cache: whether pages are cached.
            limits: how many pages pins may keep.
        """
        self._num_seen = num_seen_pages(window, page_size)
        super().__init__(num_pages, page_size, prefix_cache, limits)
        self._window = window
        self._max_row_tokens = max_row_tokens

    def _make_tree(self) -> WindowedTree:
        return WindowedTree(self._num_seen)

    # --- sizes ------------------------------------------------------------------------------------

    def min_pages(self, num_tokens: int) -> int:
        """Return the number of pages without which a request of `num_tokens` tokens cannot run."""
        return min(self.pages_for(num_tokens), self._num_seen + 1)

    def growth(self, requests: Iterable[Request], max_tokens: int) -> int:
        """Return for how many tokens requests may still take pages, at most `max_tokens` each."""
        growth = 0
        for request in requests:
            num_held = len(request.pages) - request.first_page
            if request.slot < 0:  # what it needs to be admitted is counted by `pages_needed`
                span = self._span(request)
                num_held = span.end - span.first
            limit = max(0, self._num_seen + 1 - num_held) * self.page_size
            growth += min(request.num_remaining_tokens, max_tokens, limit)
        return growth

    def _span(self, request: Request) -> PageSpan:
        matched = self.match_prefix(request)
        first, end = (
            max(matched.depth - self._num_seen, 0),
            self.pages_for(request.num_known_tokens),
        )
        if self._max_row_tokens:
            end = min(end, matched.depth + self.pages_for(self._max_row_tokens) + 1)
        return PageSpan(matched, first, min(end, first + self.num_pages))

    # --- a request's way --------------------------------------------------------------------------

    def match_prefix(self, request: Request) -> Node:
        """Return the deepest node below which a waiting request can continue."""
        return self.tree.usable(super().match_prefix(request))

    def pages_needed(self, request: Request) -> int:
        """Return how many available pages `allocate` would use."""
        node, first, end = self._span(request)
        count = end - node.depth
        while node.depth > first and node.parent is not None:
            count += node.ref_count == 0
            node = node.parent
        return count

    def allocate(self, request: Request) -> None:
        """Lock the cached pages that the next token sees, and allocate those of the next step."""
        matched, first, end = self._span(request)
        path = matched.path()
        self.pins.use(path)
        for node in path[first:]:
            self.tree.lock(node)
        request.prefix_path, request.first_page = path, first
        request.num_shareable = ALL_TOKENS
        request.num_computed_tokens = len(path) * self.page_size
        request.pages = [UNSEEN] * first + [node.page for node in path[first:]]
        request.pages += self._take(end - len(path))
        request.page_capacity = end * self.page_size

    def release_unseen(self, holders: Iterable[Request]) -> None:
        """Take the pages back that no token to come can see."""
        for request in holders:
            first = (request.num_computed_tokens + 1 - self._window) // self.page_size
            if first > request.first_page:
                self.cache_computed(request)
                if self._prefix_cache:  # the last node is the parent of the next one
                    first = min(first, len(request.prefix_path) - 1)
                if first > request.first_page:
                    self._give_back(request, request.first_page, first)
                    request.first_page = first

    def _replace_page(self, node: Node, page: int) -> None:
        if node.page == NO_PAGE:
            self.tree.restore(node, page)
        else:
            super()._replace_page(node, page)


def make_kv_cache(
    num_pages: int,
    page_size: int,
    window: int,
    max_row_tokens: int,
    prefix_cache: bool,
    limits: PinLimits = NO_PINS,
) -> KVCache:
    """Return an empty pool. window: 0 if a layer sees all tokens."""
    if window:
        return WindowedKVCache(num_pages, page_size, window, max_row_tokens, prefix_cache, limits)
    return KVCache(num_pages, page_size, prefix_cache, limits)
