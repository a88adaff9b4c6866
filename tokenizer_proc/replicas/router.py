"""The choice of a replica for a request. Without clock and sockets, so that the simulator has it.

    cost(replica) = UNCACHED_WEIGHT * uncached prompt tokens + load + tokens without a free page
                    + OVERLOAD_TOKENS * open choices beyond OVERLOAD_FACTOR * mean + OVERLOAD_MARGIN

The least costly replica gets the request. So a prefix stays where it is cached until the queue
there costs more than computing it again, and is cached at two replicas from then on (Preble,
Srivatsa et al., ICLR 2025). A replica with far more open choices than the others gives prefixes
away earlier: the copy is computed once, and shares the load from then on. The load is counted here
(ledger.py) and not reported, because a report is late, and overwrites what was sent meanwhile.
"""

import math
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from quadriga.config.replica_args import BY_CACHE, BY_LOAD, IN_TURN
from quadriga.prefix_blocks import split_hashes
from quadriga.wire.messages.replica_news import ReplicaNews
from tokenizer_proc.replicas.ledger import Ledger
from tokenizer_proc.replicas.page_index import MAX_BLOCKS, PageIndex

KeyT = TypeVar("KeyT", bound=Hashable)

# A token that is computed again delays this request, and all that come after it.
UNCACHED_WEIGHT = 2
# What a choice costs, in prompt tokens, beyond this multiple of the replicas' mean and this margin.
OVERLOAD_FACTOR, OVERLOAD_MARGIN, OVERLOAD_TOKENS = 1.25, 2, 256
# Holders of one length of a prefix that are compared.
MAX_CANDIDATES = 32
# Why a replica was chosen: it has the longest cached prefix, a shorter one or none because the
# others have too much to do, the least load, or its turn.
HIT, SPILL, LEAST, TURN = "hit", "spill", "least", "turn"


class Routed(NamedTuple):
    """The choice for a request: the replica, its cached tokens there, and why it was chosen."""

    replica: int
    num_cached: int
    why: str


class Prompt(NamedTuple):
    """What the router has to know of a request.

    Attributes:
        num_tokens: length of what has to be computed.
        hashes: of its blocks; empty if nothing of it may come from a cache.
        num_choices: number of its choices.
    """

    num_tokens: int
    hashes: list[bytes]
    num_choices: int = 1


class Router(Generic[KeyT]):
    """Choose replicas, and keep count of what they have.

    Args:
        method: one of LOAD_BALANCE_METHODS.
        num_replicas: number of replicas, all of which take requests at first.
        block_tokens: tokens of a block.
        page_size: tokens of a page.
        max_waiting: choices that a replica's waiting queue takes.

    Attributes:
        ledger: the load of each replica.
        index: what is cached where.
    """

    def __init__(
        self,
        method: str,
        num_replicas: int,
        block_tokens: int,
        page_size: int,
        max_waiting: int,
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        self._method = method
        self._block_tokens = block_tokens
        self._page_size = page_size
        self._turn = 0
        self._is_up = [True] * num_replicas
        self._down: set[int] = set()
        self.ledger = Ledger[KeyT](num_replicas, max_waiting)
        self.index = PageIndex[KeyT](max_blocks)

    def set_up(self, replica: int, is_up: bool) -> None:
        """Set whether a replica takes requests."""
        self._is_up[replica] = is_up
        if is_up:
            self._down.discard(replica)
        else:
            self._down.add(replica)

    def is_up(self, replica: int) -> bool:
        """Return whether a replica takes requests."""
        return self._is_up[replica]

    @property
    def has_replica(self) -> bool:
        """Whether any replica takes requests."""
        return any(self._is_up)

    # --- choose -----------------------------------------------------------------------------------

    def place(self, key: KeyT, prompt: Prompt) -> Routed:
        """Choose the replica of a request, and count the request there.

        At least one replica must take requests.
        """
        routed = self.choose(prompt)
        self.count(key, routed.replica, prompt, routed.num_cached)
        return routed

    def count(self, key: KeyT, replica: int, prompt: Prompt, num_cached: int = 0) -> None:
        """Count a request at a replica that was chosen otherwise."""
        num_uncached = prompt.num_tokens - num_cached
        self.ledger.open(key, replica, num_uncached, prompt.num_choices)
        if self._method == BY_CACHE:
            self.index.expect(key, replica, prompt.hashes)

    def choose(self, prompt: Prompt) -> Routed:
        """Choose the replica of a request."""
        if self._method == IN_TURN:
            return Routed(self._next_in_turn(), 0, TURN)
        least = Routed(self._least_loaded(), 0, LEAST)
        if self._method == BY_LOAD:
            return least
        matched = self.index.match(prompt.hashes)
        if not matched:
            return least
        best = self._with_cached(least.replica, matched)
        best_cost = self._cost(best, prompt.num_tokens)
        for candidate in self._holders(matched):
            cost = self._cost(candidate, prompt.num_tokens)
            if cost < best_cost:
                best, best_cost = candidate, cost
        return best

    def _with_cached(self, replica: int, matched: list[int]) -> Routed:
        """Return the choice of a replica, whatever part of a prefix it has."""
        depth = sum(holders >> replica & 1 for holders in matched)
        why = HIT if depth == len(matched) else SPILL
        return Routed(replica, depth * self._block_tokens, why)

    def _holders(self, matched: list[int]) -> Iterator[Routed]:
        """Yield replicas with a part of a prefix, those with the longest part first."""
        seen, deepest = 0, len(matched)
        for depth in range(deepest, 0, -1):
            new = matched[depth - 1] & ~seen
            seen |= new
            for replica in islice(self._in_turn(new), MAX_CANDIDATES):
                if self._is_up[replica]:
                    why = HIT if depth == deepest else SPILL
                    yield Routed(replica, depth * self._block_tokens, why)

    def _in_turn(self, holders: int) -> Iterator[int]:
        """Yield the replicas of a set, from another one on each time, so that all are compared."""
        later = holders >> self._turn << self._turn
        for part in (later, holders ^ later):
            while part:
                lowest = part & -part
                part ^= lowest
                yield lowest.bit_length() - 1

    def _cost(self, routed: Routed, num_tokens: int) -> float:
        num_uncached = num_tokens - routed.num_cached
        load = self.ledger.loads[routed.replica]
        cost = UNCACHED_WEIGHT * num_uncached + self.ledger.costs[routed.replica]
        mean = self.ledger.num_open / (len(self._is_up) - len(self._down))
        num_beyond = load.num_open - OVERLOAD_FACTOR * mean - OVERLOAD_MARGIN
        if num_beyond > 0:
            cost += OVERLOAD_TOKENS * num_beyond
        if load.num_available >= 0:
            room = load.num_available * self._page_size
            cost += max(0, num_uncached + load.num_prefill_tokens - room)
        return cost

    def _next_in_turn(self) -> int:
        num_replicas = len(self._is_up)
        for _ in range(num_replicas):
            self._turn = (self._turn + 1) % num_replicas
            if self._is_up[self._turn]:
                break
        return self._turn

    def _least_loaded(self) -> int:
        """Return the replica with the least load; equal ones have turns."""
        costs = self.ledger.costs
        if self._down:
            costs = costs.copy()
            for replica in self._down:
                costs[replica] = math.inf
        least = min(costs)
        start = (self._turn + 1) % len(costs)
        try:
            self._turn = costs.index(least, start)
        except ValueError:
            self._turn = costs.index(least)
        return self._turn

    # --- what replicas report ---------------------------------------------------------------------

    def on_news(self, replica: int, news: ReplicaNews) -> None:
        """Take in the blocks and pages that a replica has. Comes before its first tokens."""
        if news.restates:
            self.index.forget_replica(replica)
        if self._method == BY_CACHE:
            self.index.report(replica, split_hashes(news.added), split_hashes(news.evicted))
        self.ledger.set_available(replica, news.num_available)

    def on_start(self, key: KeyT, index: int) -> None:
        """Count the first token of a choice."""
        if self.ledger.start(key, index):
            self.index.settle(key)

    def on_end(self, key: KeyT, index: int) -> None:
        """Count the end of a choice."""
        self.ledger.end(key, index)
        if key not in self.ledger:
            self.index.settle(key)

    def forget(self, key: KeyT) -> None:
        """Take a request out, however far it is."""
        self.ledger.close(key)
        self.index.settle(key)
