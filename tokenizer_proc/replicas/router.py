"""The choice of a replica for a request: by its cached prefix and by the load of each replica.

`PageIndex` has the blocks that replicas have cached, `Ledger` counts what each has to do, and
`Router` chooses. Without clock and sockets, so that the simulator has it.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from quadriga.server.config.engine_args import BY_CACHE, BY_LOAD, IN_TURN
from quadriga.server.prefix_blocks import split_hashes
from quadriga.wire.to_detok import ReplicaNews

KeyT = TypeVar("KeyT", bound=Hashable)

MAX_BLOCKS = 262_144


class PageIndex(Generic[KeyT]):
    """Sets of replicas by the hashes of blocks, as bits of integers.

    A replica reports the blocks that its cache gains and loses. Beside these, the blocks of a
    request that was sent are expected there until its first token, which comes after the report of
    its blocks: so that requests that arrive together with one new prefix go to one replica.

    A wrong bit costs the computation of a prompt and no more, as each replica looks for itself.

    Args:
        max_blocks: reported blocks; the ones that were not matched for the longest time are
            forgotten first.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._reported: OrderedDict[bytes, int] = OrderedDict()
        self._expected: dict[bytes, dict[int, int]] = {}
        self._of_request: dict[KeyT, tuple[int, list[bytes]]] = {}

    def __len__(self) -> int:
        return len(self._reported)

    @property
    def num_expected(self) -> int:
        """Number of blocks that are expected at some replica."""
        return len(self._expected)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the replicas that have the first block, the first two, and so on, as bits."""
        matched: list[int] = []
        reported, expected = self._reported, self._expected
        holders = -1
        for block in hashes:
            found = reported.get(block, 0)
            if found:
                reported.move_to_end(block)
            if (counts := expected.get(block)) is not None:
                for replica in counts:
                    found |= 1 << replica
            holders &= found
            if not holders:
                break
            matched.append(holders)
        return matched

    def report(self, replica: int, added: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """Take in which blocks a replica has gained, and has lost after that."""
        reported, bit = self._reported, 1 << replica
        for block in added:
            reported[block] = reported.get(block, 0) | bit
            reported.move_to_end(block)
        for block in evicted:
            self._clear(block, bit)
        while len(reported) > self._max_blocks:
            reported.popitem(last=False)

    def forget_replica(self, replica: int) -> None:
        """Forget what a replica has reported."""
        bit = 1 << replica
        for block in [block for block, holders in self._reported.items() if holders & bit]:
            self._clear(block, bit)

    def _clear(self, block: bytes, bit: int) -> None:
        holders = self._reported.get(block, 0) & ~bit
        if holders:
            self._reported[block] = holders
        else:
            self._reported.pop(block, None)

    # --- expected blocks --------------------------------------------------------------------------

    def expect(self, key: KeyT, replica: int, hashes: list[bytes]) -> None:
        """Expect the blocks of a request at the replica that it is sent to."""
        self.settle(key)
        if not hashes:
            return
        self._of_request[key] = replica, hashes
        for block in hashes:
            counts = self._expected.setdefault(block, {})
            counts[replica] = counts.get(replica, 0) + 1

    def settle(self, key: KeyT) -> None:
        """Expect nothing more of a request: its replica has reported its blocks, or it is over."""
        replica, hashes = self._of_request.pop(key, (0, []))
        for block in hashes:
            counts = self._expected[block]
            counts[replica] -= 1
            if not counts[replica]:
                del counts[replica]
                if not counts:
                    del self._expected[block]


# What an open choice costs the others, in prompt tokens; docs/engineering/replicas.md.
ROW_TOKENS = 16
# Added to the cost of a replica whose waiting queue is full: any other one is better.
QUEUE_IS_FULL = 1e12


@dataclass(slots=True)
class ReplicaLoad:
    """What one replica has to do.

    Attributes:
        num_prefill_tokens: tokens of prompts that are not computed yet, as far as is known.
        num_open: choices that have not ended.
        num_waiting: choices that have no token yet.
        num_available: KV pages that could be allocated when it last reported; -1: not known.
    """

    num_prefill_tokens: int = 0
    num_open: int = 0
    num_waiting: int = 0
    num_available: int = -1


@dataclass(slots=True)
class _Entry:
    replica: int
    num_prefill_tokens: int
    num_open: int
    started: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)


class Ledger(Generic[KeyT]):
    """Count requests from the choice of their replica to the end of their last choice.

    Args:
        num_replicas: number of replicas.
        max_waiting: choices that a replica's waiting queue takes.

    Attributes:
        loads: one for each replica.
        costs: the load of each replica, in prompt tokens.
        num_open: open choices of all replicas.
    """

    def __init__(self, num_replicas: int, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._entries: dict[KeyT, _Entry] = {}
        self.loads = [ReplicaLoad() for _ in range(num_replicas)]
        self.costs = [0.0] * num_replicas
        self.num_open = 0

    def __contains__(self, key: KeyT) -> bool:
        return key in self._entries

    def open(self, key: KeyT, replica: int, num_prefill_tokens: int, num_choices: int) -> None:
        """Count a request that is sent to a replica; one that is open moves there."""
        self.close(key)
        self._entries[key] = _Entry(replica, num_prefill_tokens, num_choices)
        self._add(replica, num_prefill_tokens, num_choices, num_choices)

    def start(self, key: KeyT, index: int) -> bool:
        """Count the first token of a choice. Return whether it is the request's first one."""
        entry = self._entries.get(key)
        if entry is None or index in entry.started or index in entry.ended:
            return False
        # A new frontend may know of fewer choices than there are.
        if len(entry.started) >= entry.num_open:
            return False
        is_first = not entry.started
        entry.started.add(index)
        num_prefill_tokens, entry.num_prefill_tokens = entry.num_prefill_tokens, 0
        self._add(entry.replica, -num_prefill_tokens, 0, -1)
        return is_first

    def end(self, key: KeyT, index: int) -> None:
        """Count the end of a choice, which may have no token."""
        entry = self._entries.get(key)
        if entry is None or index in entry.ended:
            return
        entry.ended.add(index)
        if len(entry.ended) >= entry.num_open:
            self.close(key)

    def close(self, key: KeyT) -> None:
        """Take a request out, however far it is."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            num_waiting = entry.num_open - len(entry.started)
            self._add(entry.replica, -entry.num_prefill_tokens, -entry.num_open, -num_waiting)

    def set_available(self, replica: int, num_pages: int) -> None:
        """Take in how many KV pages of a replica could be allocated."""
        self.loads[replica].num_available = num_pages

    def _add(self, replica: int, num_prefill_tokens: int, num_open: int, num_waiting: int) -> None:
        load = self.loads[replica]
        load.num_prefill_tokens += num_prefill_tokens
        load.num_open += num_open
        self.num_open += num_open
        load.num_waiting += num_waiting
        cost = float(load.num_prefill_tokens + ROW_TOKENS * load.num_open)
        if load.num_waiting >= self._max_waiting:
            cost += QUEUE_IS_FULL
        self.costs[replica] = cost


# The choice of a replica for a request. Without clock and sockets, so that the simulator has it.
#
# cost(replica) = UNCACHED_WEIGHT * uncached prompt tokens + load + tokens without a free page
#                 + OVERLOAD_TOKENS * open choices beyond OVERLOAD_FACTOR * mean + OVERLOAD_MARGIN
#
# The least costly replica gets the request. So a prefix stays where it is cached until the queue
# there costs more than computing it again, and is cached at two replicas from then on (Preble,
# Srivatsa et al., ICLR 2025). A replica with far more open choices than the others gives prefixes
# away earlier: the copy is computed once, and shares the load from then on. The load is counted
# here and not reported, because a report is late, and overwrites what was sent
# meanwhile.

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
        goes_on: it has tokens, and its pages are where a replica has computed them for others.
        ends_at_once: it ends with its first token, or with a vector.
    """

    num_tokens: int
    hashes: list[bytes]
    num_choices: int = 1
    goes_on: bool = False
    ends_at_once: bool = False


class _Weights(NamedTuple):
    """Of the cost of a replica: of an uncached token, and the open choices that are usual."""

    uncached: float
    mean_open: float


class Router(Generic[KeyT]):
    """Choose replicas, and keep count of what they have.

    Args:
        method: one of LOAD_BALANCE_METHODS.
        num_replicas: number of replicas, all of which take requests at first.
        block_tokens: tokens of a block.
        page_size: tokens of a page.
        max_waiting: choices that a replica's waiting queue takes.

    Attributes:
        has_roles: some replicas compute prompts for the others, or may do so.
        num_prefill: how many do so now: the first ones.
        num_changes: how often this number has changed.
        ledger: the load of each replica.
        index: what is cached where.
    """

    has_roles = False
    num_prefill = 0
    num_changes = 0

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
        self._turns: Counter[int] = Counter()  # the last replica of each group that had its turn
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

    def hands_over(self, replica: int) -> bool:  # noqa: ARG002
        """Return whether requests go on elsewhere when this replica has computed their prompts."""
        return False

    def has_next(self, num_tokens: int, replica: int) -> bool:  # noqa: ARG002
        """Return whether `find_next` would return a replica for so many tokens."""
        return False

    def find_next(self, prompt: Prompt, replica: int) -> Routed | None:  # noqa: ARG002
        """Return where a request goes on whose prompt a replica has computed; None: it stays."""
        return None

    def choose_ahead(
        self,
        prompt: Prompt,  # noqa: ARG002
        replica: int,  # noqa: ARG002
        before: int | None,  # noqa: ARG002
    ) -> int | None:
        """Return where pages are loaded of a prompt that a replica computes; None: nowhere."""
        return None

    def follow_load(self, now: float) -> bool:  # noqa: ARG002
        """Change the roles of replicas by the load, if they do so. Return whether they changed."""
        return False

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
        return self.choose_among(prompt, self._down)

    def choose_among(
        self,
        prompt: Prompt,
        down: set[int],
        uncached_weight: float = UNCACHED_WEIGHT,
        group: int = 0,
    ) -> Routed:
        """Choose the replica of a request.

        Args:
            prompt: what is known of the request.
            down: replicas that do not come into question; at least one other is left.
            uncached_weight: cost of a prompt token that is not cached there.
            group: the replicas that have turns together.
        """
        if self._method == IN_TURN:
            return Routed(self._next_in_turn(down, group), 0, TURN)
        least = Routed(self._least_loaded(down, group), 0, LEAST)
        if self._method == BY_LOAD:
            return least
        matched = self.index.match(prompt.hashes)
        if not matched:
            return least
        weights = _Weights(uncached_weight, self._mean_open(down))
        best = self._with_cached(least.replica, matched)
        best_cost = self._cost(best, prompt.num_tokens, weights)
        for candidate in self._holders(matched, down):
            cost = self._cost(candidate, prompt.num_tokens, weights)
            if cost < best_cost:
                best, best_cost = candidate, cost
        return best

    def _with_cached(self, replica: int, matched: list[int]) -> Routed:
        """Return the choice of a replica, whatever part of a prefix it has."""
        depth = sum(holders >> replica & 1 for holders in matched)
        why = HIT if depth == len(matched) else SPILL
        return Routed(replica, depth * self._block_tokens, why)

    def _holders(self, matched: list[int], down: set[int]) -> Iterator[Routed]:
        """Yield replicas with a part of a prefix, those with the longest part first."""
        seen, deepest = 0, len(matched)
        for depth in range(deepest, 0, -1):
            new = matched[depth - 1] & ~seen
            seen |= new
            for replica in islice(self._in_turn(new), MAX_CANDIDATES):
                if replica not in down:
                    why = HIT if depth == deepest else SPILL
                    yield Routed(replica, depth * self._block_tokens, why)

    def _in_turn(self, holders: int) -> Iterator[int]:
        """Yield the replicas of a set, from another one on each time, so that all are compared."""
        turn = self._turns[0]
        later = holders >> turn << turn
        for part in (later, holders ^ later):
            while part:
                lowest = part & -part
                part ^= lowest
                yield lowest.bit_length() - 1

    def _mean_open(self, down: set[int]) -> float:
        """Return the mean number of open choices of the replicas that come into question."""
        num_open, loads = self.ledger.num_open, self.ledger.loads
        if down is not self._down:
            num_open = sum(load.num_open for n, load in enumerate(loads) if n not in down)
        return num_open / (len(loads) - len(down))

    def _cost(self, routed: Routed, num_tokens: int, weights: _Weights) -> float:
        num_uncached = num_tokens - routed.num_cached
        load = self.ledger.loads[routed.replica]
        cost = weights.uncached * num_uncached + self.ledger.costs[routed.replica]
        num_beyond = load.num_open - OVERLOAD_FACTOR * weights.mean_open - OVERLOAD_MARGIN
        if num_beyond > 0:
            cost += OVERLOAD_TOKENS * num_beyond
        if load.num_available >= 0:
            room = load.num_available * self._page_size
            cost += max(0, num_uncached + load.num_prefill_tokens - room)
        return cost

    def _next_in_turn(self, down: set[int], group: int) -> int:
        num_replicas, turn = len(self._is_up), self._turns[group]
        for _ in range(num_replicas):
            turn = (turn + 1) % num_replicas
            if turn not in down:
                break
        self._turns[group] = turn
        return turn

    def _least_loaded(self, down: set[int], group: int) -> int:
        """Return the replica with the least load; equal ones have turns."""
        costs = self.ledger.costs
        if down:
            costs = costs.copy()
            for replica in down:
                costs[replica] = math.inf
        least = min(costs)
        start = (self._turns[group] + 1) % len(costs)
        try:
            turn = costs.index(least, start)
        except ValueError:
            turn = costs.index(least)
        self._turns[group] = turn
        return turn

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
