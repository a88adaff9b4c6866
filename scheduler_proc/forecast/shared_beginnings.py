"""How much of each waiting prompt will be cached when it is admitted.

A beginning is cached that the prefix tree has now, or that a prompt further ahead computes, until
its pages are evicted: the least recently used ones go first. What the waiting prompts use is played
in their order. The pages that the tree has now were used in an unknown order: how long a beginning
among them has not been used is spread evenly over all that it could be.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping

from scheduler_proc.core import SchedulerCore
from scheduler_proc.forecast.played import PlayedPrompt
from scheduler_proc.forecast.spread import Spread
from scheduler_proc.state.prefix_tree import Node
from scheduler_proc.state.request import Request

MAX_LEADERS = 4  # prompts with the same next page that a prompt is compared with


class _RecentUses:
    """What the prompts have used, up to as many tokens as the pool holds."""

    def __init__(self, num_tokens: int) -> None:
        self._num_free = float(num_tokens)
        self._sizes: OrderedDict[Hashable, float] = OrderedDict()

    def __contains__(self, name: Hashable) -> bool:
        return name in self._sizes

    def use(self, name: Hashable, num_tokens: float) -> None:
        """Use a beginning or the rest of a prompt, which takes pages for so many tokens."""
        if name in self._sizes:
            self._sizes.move_to_end(name)
            return
        self._sizes[name] = num_tokens
        self._num_free -= num_tokens
        while self._num_free < 0 and len(self._sizes) > 1:
            _name, freed = self._sizes.popitem(last=False)
            self._num_free += freed


class SharedBeginnings:
    """The beginnings of prompts that are cached, or about to be.

    Args:
        core: the pages and the prefix tree.
        partial: the prompts that are partly computed, by number.
    """

    def __init__(self, core: SchedulerCore, partial: Mapping[int, PlayedPrompt]) -> None:
        self._core = core
        self._page_size = core.kv.page_size
        self._num_available = core.kv.num_available * self._page_size
        self._uses = _RecentUses(core.kv.num_tokens)
        self._was_cached: set[Node] = set()
        self._num_reused = 0  # tokens of beginnings that the tree has now
        self._num_new = 0.0  # tokens for which the prompts up to now take pages
        self._ages = Spread()
        self._leaders: dict[tuple[Node, bytes], list[PlayedPrompt]] = {}
        for request in core.running.partial.values():
            self._add_partial(request, partial[request.seq])

    def prompt_of(self, request: Request, num_growing: float) -> PlayedPrompt:
        """Return the prompt of the next request of the queue, with what will be cached of it.

        Args:
            request: it waits.
            num_growing: number of tokens beyond its prompt for which it takes pages.
        """
        num_cached, node = self._core.kv.num_cached_tokens(request), request.prefix_node
        beginning = 0 if node is None else node.depth * self._page_size
        if node is not None and num_cached and not self._stays(node, beginning):
            num_cached = 0
        prompt = PlayedPrompt.of(request, num_cached)
        if node is not None and request.prefix_miss:
            self._follow(prompt, node, request.prefix_miss)
        if beginning:
            self._uses.use(node, beginning)
        if prompt.leader is not None:
            self._uses.use(prompt.leader.seq, 0)
        rest = prompt.num_known_tokens - max(beginning, prompt.num_computed_tokens)
        self._uses.use(prompt.seq, rest + num_growing)
        self._num_new += prompt.num_uncomputed_tokens + num_growing
        return prompt

    def _stays(self, node: Node, num_tokens: int) -> bool:
        """Return whether the tree will still have a beginning that it has now.

        Used for longer than a share of the available pages, it is evicted when as many have been
        taken, without those that beginnings among them have, which are used again.
        """
        if node in self._was_cached:
            return node in self._uses
        self._was_cached.add(node)
        share = 1.0 if node.ref_count else self._ages.next()
        stays = self._num_new <= share * (self._num_available - self._num_reused)
        self._num_reused += num_tokens if stays else 0
        return stays

    def _add_partial(self, request: Request, prompt: PlayedPrompt) -> None:
        """Take in a prompt that is partly computed: others may wait for the rest of it."""
        path, kv = request.prefix_path, self._core.kv
        node = path[-1] if path else kv.tree.root
        has_more = request.num_known_tokens >= (node.depth + 1) * self._page_size
        if has_more and not request.wants_prompt_logprobs:
            self._leaders[node, kv.page_key(request, node.depth)] = [prompt]
            self._uses.use(prompt.seq, prompt.num_known_tokens)

    def _follow(self, prompt: PlayedPrompt, node: Node, next_page: bytes) -> None:
        """Let a prompt follow the one that computes most of its beginning, if there is one."""
        leaders = self._leaders.setdefault((node, next_page), [])
        leaders[:] = [leader for leader in leaders if leader.seq in self._uses]
        num_pages = prompt.num_computed_tokens // self._page_size
        for leader in leaders:
            num_common = _num_common_pages(prompt, leader, self._page_size, node.depth + 1)
            if num_common > num_pages:
                prompt.leader, num_pages = leader, num_common
        prompt.num_led_tokens = prompt.num_computed_tokens = num_pages * self._page_size
        if len(leaders) < MAX_LEADERS:
            leaders.append(prompt)


def _num_common_pages(
    prompt: PlayedPrompt, leader: PlayedPrompt, page_size: int, num_equal: int
) -> int:
    """Return how many first pages two prompts have in common; `num_equal` are known to be."""
    limit = min(prompt.num_known_tokens - 1, leader.num_known_tokens) // page_size
    one, other = memoryview(prompt.tokens), memoryview(leader.tokens)
    while num_equal < limit:
        middle = (num_equal + limit + 1) // 2
        begin, end = num_equal * page_size, middle * page_size
        if one[begin:end] == other[begin:end]:
            num_equal = middle
        else:
            limit = middle - 1
    return num_equal
