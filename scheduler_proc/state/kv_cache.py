"""The pages of the KV pool: free ones, cached ones, and those that requests hold.

Where a page lies in memory is the worker's business; here it is a number from 0 to num_pages - 1.
Free + cached + held = all, always. Cached pages are those of the prefix tree that nobody uses:
they are as good as free, and evicted when they are needed.
"""

from collections.abc import Iterable

from scheduler_proc.state.prefix_tree import Node, PrefixTree
from scheduler_proc.state.request import Request


class KVCache:
    """Gives pages to requests and takes them back; finds what is already computed."""

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.tree = PrefixTree()
        self._prefix_cache = prefix_cache
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self.tree.num_unused

    @property
    def num_available(self) -> int:
        """Pages that can be had now."""
        return len(self._free) + self.tree.num_unused

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    # --- a request's way --------------------------------------------------------------------------

    def locate(self, request: Request) -> Node:
        """The deepest node that holds a beginning of a waiting request's tokens.

        It goes on from where it found the request the last time. One token at least is left to
        compute: a step that computes nothing samples nothing. Whoever wants to know the
        log-probabilities of a prompt has to compute the whole of it.
        """
        node, root = request.node, self.tree.root
        if node is None or (node.parent is None and node is not root):  # evicted
            node = root
        elif request.missing and request.missing not in node.children:
            return node
        request.missing = b""
        if self._prefix_cache and not request.tells_prompt:
            most = (request.known - 1) // self.page_size
            while node.depth < most:
                key = self._key(request, node.depth)
                child = node.children.get(key)
                if child is None:
                    request.missing = key
                    break
                node = child
        request.node = node
        return node

    def pages_needed(self, request: Request) -> int:
        """How many of the available pages `seat` would use up: new ones, and cached ones that
        nobody else uses."""
        node: Node | None = self.locate(request)
        assert node is not None
        count = self.pages_for(request.known) - node.depth
        while node is not None and node.users == 0 and node.parent is not None:
            count += 1
            node = node.parent
        return count

    def seat(self, request: Request) -> None:
        """Hold what is cached of the request's known tokens, and take pages for the rest, which
        must be available: ask `pages_needed`."""
        path = self.locate(request).path()
        for node in path:
            self.tree.hold(node)
        request.path = path
        request.computed = len(path) * self.page_size
        request.pages = [node.page for node in path]
        request.pages += self._take(self.pages_for(request.known) - len(path))
        request.capacity = len(request.pages) * self.page_size

    def grow(self, request: Request) -> int:
        """One more page for the request, which must be available. Its number."""
        self.cache_computed(request)
        page = self._free.pop() if self._free else self.tree.evict(1)[0]
        request.pages.append(page)
        request.capacity += self.page_size
        return page

    def cache_computed(self, request: Request) -> None:
        """Put the request's full pages into the tree, as far as their tokens are known and
        computed or planned: plans run in order, so whoever finds a page there reads it later.

        Where the same tokens are cached already, the request keeps its own page and goes on below
        that node. A node without users takes over the page and its old one is free, so that no
        page less is available than before; one that is in use stays as it is, and the own page is
        nobody else's (see `free_duplicates`).
        """
        if not self._prefix_cache:
            return
        path, tree = request.path, self.tree
        full = min(request.computed, len(request.tokens)) // self.page_size
        for index in range(len(path), full):
            parent = path[-1] if path else tree.root
            key = self._key(request, index)
            node = parent.children.get(key)
            if node is None:
                node = tree.add(parent, key, request.pages[index])
            else:
                if node.users == 0:
                    self._free.append(node.page)
                    node.page = request.pages[index]
                tree.hold(node)
            path.append(node)

    def release(self, request: Request) -> None:
        """Take back what the request holds; what it has computed stays cached."""
        self.cache_computed(request)
        path = request.path
        own = [page for page, node in zip(request.pages, path) if page != node.page]  # noqa: B905
        self._free += own
        self._free += request.pages[len(path) :]
        self.tree.let_go(path)
        request.pages, request.path, request.capacity = [], [], 0

    def free_duplicates(self, request: Request) -> bool:
        """Free pages whose content the request has twice: in a page of its own, and in that of a
        node that nobody else uses. Whether there were any."""
        own = [
            (node, page)
            for node, page in zip(request.path, request.pages)  # noqa: B905
            if node.page != page and node.users == 1
        ]
        for node, page in own:
            self._free.append(node.page)
            node.page = page
        return bool(own)

    def flush(self) -> int:
        """Free the cached pages that nobody uses. How many there were."""
        count = self.tree.num_unused
        self._free += self.tree.evict(count)
        return count

    def _key(self, request: Request, index: int) -> bytes:
        start = index * self.page_size
        return request.tokens[start : start + self.page_size].tobytes()

    def _take(self, count: int) -> list[int]:
        lacking = count - len(self._free)
        if lacking > 0:
            self._free += self.tree.evict(lacking)
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def check(self, seated: Iterable[Request]) -> None:
        """Raise AssertionError where a page is lost or used twice. seated: all who hold pages."""
        self.tree.check()
        pages = list(self._free)
        pages += (node.page for node in self.tree.nodes())
        held = sum(node.users > 0 for node in self.tree.nodes())
        for request in seated:
            own = request.pages[len(request.path) :]
            own += [p for p, n in zip(request.pages, request.path) if p != n.page]  # noqa: B905
            pages += own
            held += len(own)
        assert len(pages) == len(set(pages)), "a page is in two places"
        assert self.num_free + self.num_cached + held == self.num_pages, (
            f"{self.num_free} free + {self.num_cached} cached + {held} held pages"
            f" are not {self.num_pages}"
        )
