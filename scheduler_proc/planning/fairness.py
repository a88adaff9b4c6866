"""The waiting queue that the flags ask for, and fairness: weighted shares of clients or tenants.

`FairShares` (--fair-clients, --keys, --tenants-by) is a waiting queue of waiting queues,
`WeightedTurns` gives decode rows by the weights of tenants.
"""

import heapq
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from sortedcontainers import SortedDict

from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.server.tenants import parent_name
from scheduler_proc.planning.policies import (
    REGISTRY,
    WINDOW,
    MatchPrefix,
    PolicyContext,
    WaitingQueue,
)
from scheduler_proc.state.batch import NextRows, move_to_end, take_turns
from scheduler_proc.state.request import Request

# The owners of shares of the server: clients, or tenants and their users.


class Share(NamedTuple):
    """The owner of a request: a client, a tenant, or a user of a tenant.

    Attributes:
        name: of the owner.
        weight: of the owner's share, beside the weights of the others.
    """

    name: bytes | str
    weight: float = 1.0


ShareOf = Callable[[Request], Share]


def client_share(request: Request) -> Share:
    """Return the share of a request's client: all are equal."""
    return Share(request.client)


def tenant_share(request: Request) -> Share:
    """Return the share of a request's tenant, with all of its users."""
    return Share(parent_name(request.tenant), request.weight)


def user_share(request: Request) -> Share:
    """Return the share of a user within a tenant: all are equal."""
    return Share(request.tenant)


# One waiting queue for each owner of a share.
#
# After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each owner has a
# counter of the tokens that were computed for it, divided by its weight, and the owner with the
# smallest counter is served next. An owner that begins to wait is lifted to the smallest counter
# of the waiting ones, so that nothing is saved up while it sends nothing.
#
# What a request will compute is known only at its end. When it is admitted, its owner is charged
# for the prompt and for as many tokens as its requests generate on average; when it ends, the
# charge is replaced by what was computed: prompt tokens that were not cached, and tokens that
# were generated. Of a request that goes on here, after another replica or worker has computed its
# first tokens, only the tokens count that are generated here. `settled` is the counter without the
# charges of requests that have not ended. It only grows, so newcomers are lifted to it: lifted to a
# counter with charges, they would wait for tokens that are given back later.
#
# The account of an owner without requests is kept while the waiting ones have smaller counters,
# so that leaving and coming back gains nothing: at most MAX_IDLE_ACCOUNTS are, and none when no
# request waits or runs any more.

MAX_IDLE_ACCOUNTS = 4096
# Tokens that requests of a new owner are expected to generate, and the weight of each later one.
INITIAL_MEAN_GENERATED = 256.0
MEAN_WEIGHT = 0.1


class Charge(NamedTuple):
    """What the owner of a running request was charged when it was admitted.

    Attributes:
        tokens: as many as it was charged for.
        num_before: tokens of the answer that the request had then.
        goes_on: it had its first token then.
    """

    request: Request
    tokens: float
    num_before: int
    goes_on: bool

    @property
    def num_computed(self) -> int:
        """Number of tokens that were computed for the request since then, without cached ones."""
        if self.goes_on:
            return self.num_generated
        return computed_tokens(self.request)

    @property
    def num_generated(self) -> int:
        """Number of tokens that the request has generated since then."""
        return self.request.num_generated - self.num_before


class ShareAccount:
    """The waiting requests of one owner, and what was computed for it.

    Attributes:
        name: of the owner.
        arrival: number of the account, which orders equal counters.
        settled: tokens of requests that have ended, divided by their weights.
        charged: the same, with the charges of running requests.
        running: the charges of running requests, by their numbers.
    """

    __slots__ = ("_mean_generated", "arrival", "charged", "name", "queue", "running", "settled")

    def __init__(self, name: bytes | str, queue: WaitingQueue, arrival: int) -> None:
        self.name = name
        self.queue = queue
        self.arrival = arrival
        self.settled = 0.0
        self.charged = 0.0
        self.running: dict[int, Charge] = {}
        self._mean_generated = INITIAL_MEAN_GENERATED

    def cost(self, request: Request) -> float:
        """Return the tokens that a waiting request is charged for when it is admitted.

        A request that was retracted costs nothing: it was charged when it was first admitted.
        """
        if request.seq in self.running:
            return 0.0
        num_generated = min(request.num_remaining_tokens, self._mean_generated)
        return num_generated if request.first_token_at else request.num_prompt + num_generated

    def observe_end(self, num_generated: int) -> None:
        """Take in how many tokens a request has generated here."""
        self._mean_generated += MEAN_WEIGHT * (num_generated - self._mean_generated)

    def upcoming(
        self, num_expected: int, max_count: int, budget: int, share_of: ShareOf
    ) -> Iterator[tuple[float, int, Request]]:
        """Yield the counter, arrival and request for each of the next requests.

        Args:
            num_expected: number of requests that the caller will probably consume.
            max_count: number of requests that it will consume at most.
            budget: as in WaitingQueue.first.
            share_of: share of the owner of a request.
        """
        counter, num_seen = self.charged, 0
        while num_seen < max_count:
            requests = self.queue.first(min(num_expected, max_count), budget)
            for request in islice(requests, num_seen, None):
                yield counter, self.arrival, request
                counter += self.cost(request) / share_of(request).weight
            if len(requests) < num_expected:
                return
            num_seen, num_expected = num_expected, 2 * num_expected


class FairShares:
    """A waiting queue of waiting queues. Within an owner's queue, its policy decides.

    Args:
        make_queue: makes the queue of an owner.
        share_of: share of the owner of a request.
    """

    def __init__(self, make_queue: Callable[[], WaitingQueue], share_of: ShareOf) -> None:
        self._make_queue = make_queue
        self._share_of = share_of
        self._accounts: dict[bytes | str, ShareAccount] = {}
        # The accounts with waiting requests: by what decides, and by what newcomers are lifted to.
        self._turns: SortedDict = SortedDict()
        self._by_settled: SortedDict = SortedDict()
        self._idle: dict[bytes | str, None] = {}
        self._floor = 0.0
        self._num_arrivals = 0
        self._num_running = 0
        self._length = 0

    @property
    def lookahead(self) -> int:
        """The lookahead of the owner whose turn it is."""
        return self._turns.peekitem(0)[1].queue.lookahead if self._turns else 0

    # --- the queue --------------------------------------------------------------------------------

    def push(self, request: Request) -> None:
        """Add a request to the queue of its owner."""
        name = self._share_of(request).name
        account = self._accounts.get(name)
        if account is None:
            account = ShareAccount(name, self._make_queue(), self._num_arrivals)
            self._accounts[name] = account
            self._num_arrivals += 1
        self._idle.pop(name, None)
        if not len(account.queue):
            self._lift(account)
        account.queue.push(request)
        self._length += 1
        self._insert(account)

    def first(self, count: int, budget: int) -> list[Request]:
        """Return the next requests, in the order of their turns."""
        # The first `count` requests are of the first `count` owners.
        accounts: list[ShareAccount] = list(islice(self._turns.values(), count))
        num_expected = count // max(1, len(accounts)) + 2
        upcoming = [a.upcoming(num_expected, count, budget, self._share_of) for a in accounts]
        return [request for *_, request in islice(heapq.merge(*upcoming), count)]

    def take(self, request: Request) -> None:
        """Remove a request that is admitted, and charge its owner unless it was charged before."""
        share = self._share_of(request)
        account = self._accounts[share.name]
        self._delete(account)
        account.queue.take(request)
        self._length -= 1
        charge = account.cost(request)
        if charge:
            goes_on = request.first_token_at > 0
            account.running[request.seq] = Charge(request, charge, request.num_generated, goes_on)
            account.charged += charge / share.weight
            self._num_running += 1
        self._insert(account)
        self._forget_if_idle(account)

    def remove(self, request: Request) -> None:
        """Remove a request that ended, if it waits, and give its owner back what it has not used.

        A request that was never admitted costs nothing.
        """
        account = self._accounts.get(self._share_of(request).name)
        if account is None:
            return
        self._delete(account)
        num_before = len(account.queue)
        account.queue.remove(request)
        self._length -= num_before - len(account.queue)
        if request.seq in account.running:
            self._settle(account, request)
        self._insert(account)
        self._forget_if_idle(account)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        return iter([request for account in self._accounts.values() for request in account.queue])

    # --- counters ---------------------------------------------------------------------------------

    def _settle(self, account: ShareAccount, request: Request) -> None:
        """Replace the charge of a request by what was computed for it."""
        charge = account.running.pop(request.seq)
        self._num_running -= 1
        computed, weight = charge.num_computed, self._share_of(request).weight
        account.settled += computed / weight
        account.charged += (computed - charge.tokens) / weight
        account.observe_end(charge.num_generated)
        if not account.running:
            account.charged = account.settled  # without the rounding errors of the sums

    def _lift(self, account: ShareAccount) -> None:
        """Lift an account that begins to wait to the smallest counter of those that wait."""
        running = sum(
            charge.num_computed / self._share_of(charge.request).weight
            for charge in account.running.values()
        )
        lift = self._lowest_settled() - account.settled - running
        if lift > 0:
            account.settled += lift
            account.charged += lift

    def _lowest_settled(self) -> float:
        """Return the smallest counter of the owners that wait, or that waited last."""
        if self._by_settled:
            self._floor = max(self._floor, self._by_settled.peekitem(0)[0][0])
        return self._floor

    def _insert(self, account: ShareAccount) -> None:
        if len(account.queue):
            self._turns[account.charged, account.arrival] = account
            self._by_settled[account.settled, account.arrival] = account

    def _delete(self, account: ShareAccount) -> None:
        self._lowest_settled()
        self._turns.pop((account.charged, account.arrival), None)
        self._by_settled.pop((account.settled, account.arrival), None)

    def _forget_if_idle(self, account: ShareAccount) -> None:
        """Forget an account without requests as soon as that changes nothing."""
        if not self._length and not self._num_running:
            self._accounts.clear()
            self._idle.clear()
            self._floor = 0.0
        elif not len(account.queue) and not account.running:
            self._idle[account.name] = None
            if account.settled <= self._floor:
                self._forget(account.name)
            elif len(self._idle) > MAX_IDLE_ACCOUNTS:
                self._forget(next(iter(self._idle)))

    def _forget(self, name: bytes | str) -> None:
        del self._accounts[name], self._idle[name]


def computed_tokens(request: Request) -> int:
    """Return the tokens computed for a request that runs or has ended, without cached ones."""
    num_prompt = request.num_prompt
    if not request.first_token_at:
        num_prompt = min(num_prompt, request.num_computed_tokens)
    num_generated = request.num_generated - request.num_cached_given
    return max(0, num_prompt - request.cached_tokens) + num_generated


# Decode rows by the weights of tenants, where more requests run than a step has rows.
#
# Stride scheduling (Waldspurger and Weihl, "Stride Scheduling: Deterministic Proportional-Share
# Resource Management", 1995): each tenant has a pass, which grows by 1 / weight with each of its
# rows, and the tenant with the smallest pass has the next row. A tenant whose requests all have
# rows saves nothing up: its pass is lifted to that of the row that was given last.


class WeightedTurns:
    """The passes of the owners that had rows in the last step."""

    def __init__(self, share_of: ShareOf) -> None:
        self._share_of = share_of
        self._passes: dict[bytes | str, float] = {}
        self._last_pass = 0.0

    def next_rows(self, requests: dict[int, Request], count: int) -> list[Request]:
        """Return the requests that have the next rows, and move them to the end.

        Those of an owner take equal turns.

        Args:
            requests: running requests by number, in the order of their turns.
            count: number of rows.
        """
        if len(requests) <= count:
            self._passes.clear()
            self._last_pass = 0.0
            return list(requests.values())
        owners = self._turns_of_owners(requests)
        group: list[Request] = []
        while len(group) < count:
            self._last_pass, name, turns = owners[0]
            request = next(turns, None)
            if request is None:
                heapq.heappop(owners)
                continue
            group.append(request)
            self._passes[name] = self._last_pass + 1 / self._share_of(request).weight
            heapq.heapreplace(owners, (self._passes[name], name, turns))
        move_to_end(requests, group)
        return group

    def _turns_of_owners(
        self, requests: dict[int, Request]
    ) -> list[tuple[float, bytes | str, Iterator[Request]]]:
        """Return a heap of the pass, name and requests of each owner."""
        groups: dict[bytes | str, list[Request]] = {}
        for request in requests.values():
            groups.setdefault(self._share_of(request).name, []).append(request)
        self._passes = {name: max(self._passes.get(name, 0.0), self._last_pass) for name in groups}
        owners = [(self._passes[name], name, iter(group)) for name, group in groups.items()]
        heapq.heapify(owners)
        return owners


# The waiting queue and the turns of decode rows that the flags ask for.
#
# Of each client: a step that serves 16 clients then looks at as many requests as without fairness.
FAIR_WINDOW = 8


def make_queue(args: SchedulerArgs, match_prefix: MatchPrefix, page_size: int) -> WaitingQueue:
    """Return the queue of --schedule-policy.

    With --fair-clients each client has one of its own, with tenants each user of a tenant.

    Args:
        args: flags of the scheduler.
        match_prefix: as in PolicyContext; only the policies that look at the prefix tree call it.
        page_size: number of tokens in a page.
    """
    window = FAIR_WINDOW if args.is_fair else WINDOW
    context = PolicyContext(args, match_prefix, page_size, window)

    def make_one() -> WaitingQueue:
        return REGISTRY[args.schedule_policy].create(context)

    def make_users() -> WaitingQueue:
        return FairShares(make_one, user_share)

    if args.fair_tenants:
        return FairShares(make_users, tenant_share)
    return FairShares(make_one, client_share) if args.fair_clients else make_one()


def make_turns(args: SchedulerArgs) -> NextRows:
    """Return how decode rows are given: equally, or with tenants by weight."""
    return WeightedTurns(tenant_share).next_rows if args.fair_tenants else take_turns
