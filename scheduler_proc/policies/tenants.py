"""Weighted fair shares between tenants (--fair-tenants): one waiting queue for each tenant.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each tenant has a
counter of the tokens that were computed for it, divided by its weight, and the tenant with the
smallest counter is served next. A tenant that begins to wait is lifted to the smallest counter of
the waiting ones, so that nothing is saved up while it sends nothing.

What a request will compute is known only at its end. When it is admitted, its tenant is charged for
the prompt and for as many tokens as its requests generate on average; when it ends, the charge is
replaced by what was computed: prompt tokens that were not cached, and tokens that were generated.
`settled` is the counter without the charges of requests that have not ended. It only grows, so
newcomers are lifted to it: lifted to a counter with charges, they would wait for tokens that are
given back later.

The account of a tenant without requests is kept while the waiting ones have smaller counters, so
that leaving and coming back gains nothing: at most MAX_IDLE_ACCOUNTS are, and none when no request
waits or runs any more.
"""

import heapq
from collections.abc import Callable, Iterator
from itertools import islice

from sortedcontainers import SortedDict

from scheduler_proc.policies.base import WaitingQueue
from scheduler_proc.state.request import Request

MAX_IDLE_ACCOUNTS = 4096
# Tokens that requests of a new tenant are expected to generate, and the weight of each later one.
INITIAL_MEAN_GENERATED = 256.0
MEAN_WEIGHT = 0.1


class TenantAccount:
    """The waiting requests of one tenant, and what was computed for it.

    Attributes:
        arrival: number of the account, which orders equal counters.
        settled: tokens of requests that have ended, divided by their weights.
        charged: the same, with the charges of running requests.
        running: running requests by number, each with the tokens that were charged for it.
    """

    __slots__ = ("_mean_generated", "arrival", "charged", "queue", "running", "settled")

    def __init__(self, queue: WaitingQueue, arrival: int) -> None:
        self.queue = queue
        self.arrival = arrival
        self.settled = 0.0
        self.charged = 0.0
        self.running: dict[int, tuple[Request, float]] = {}
        self._mean_generated = INITIAL_MEAN_GENERATED

    def cost(self, request: Request) -> float:
        """Return the tokens that a waiting request is charged for when it is admitted.

        A request that was retracted costs nothing: it was charged when it was first admitted.
        """
        if request.admitted_at:
            return 0.0
        return request.num_prompt + min(request.num_remaining_tokens, self._mean_generated)

    def observe_end(self, request: Request) -> None:
        """Take in how many tokens a request has generated."""
        self._mean_generated += MEAN_WEIGHT * (request.num_generated - self._mean_generated)

    def upcoming(
        self,
        num_expected: int,
        max_count: int,
        budget: int,
        weight_of: Callable[[Request], float],
    ) -> Iterator[tuple[float, int, Request]]:
        """Yield the counter, arrival and request for each of the next requests.

        Args:
            num_expected: number of requests that the caller will probably consume.
            max_count: number of requests that it will consume at most.
            budget: as in WaitingQueue.first.
            weight_of: weight of the tenant of a request.
        """
        counter, num_seen = self.charged, 0
        while num_seen < max_count:
            requests = self.queue.first(min(num_expected, max_count), budget)
            for request in islice(requests, num_seen, None):
                yield counter, self.arrival, request
                counter += self.cost(request) / weight_of(request)
            if len(requests) < num_expected:
                return
            num_seen, num_expected = num_expected, 2 * num_expected


class FairTenants:
    """A waiting queue of waiting queues. Within a tenant, the policy of its queue decides.

    Args:
        make_queue: makes the queue of a tenant.
        name_of: name of the tenant of a request.
        weight_of: weight of the tenant of a request.
    """

    def __init__(
        self,
        make_queue: Callable[[], WaitingQueue],
        name_of: Callable[[Request], str],
        weight_of: Callable[[Request], float],
    ) -> None:
        self._make_queue = make_queue
        self._name_of = name_of
        self._weight_of = weight_of
        self._accounts: dict[str, TenantAccount] = {}
        # The accounts with waiting requests: by what decides, and by what newcomers are lifted to.
        self._turns: SortedDict = SortedDict()
        self._by_settled: SortedDict = SortedDict()
        self._idle: dict[str, None] = {}
        self._floor = 0.0
        self._num_arrivals = 0
        self._num_running = 0
        self._length = 0

    @property
    def lookahead(self) -> int:
        """The lookahead of the tenant whose turn it is."""
        return self._turns.peekitem(0)[1].queue.lookahead if self._turns else 0

    # --- the queue --------------------------------------------------------------------------------

    def push(self, request: Request) -> None:
        """Add a request to the queue of its tenant."""
        name = self._name_of(request)
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = TenantAccount(self._make_queue(), self._num_arrivals)
            self._num_arrivals += 1
        self._idle.pop(name, None)
        if not len(account.queue):
            self._lift(account)
        account.queue.push(request)
        self._length += 1
        self._insert(account)

    def first(self, count: int, budget: int) -> list[Request]:
        """Return the next requests, in the order of their turns."""
        # The first `count` requests are of the first `count` tenants.
        accounts: list[TenantAccount] = list(islice(self._turns.values(), count))
        num_expected = count // max(1, len(accounts)) + 2
        upcoming = [a.upcoming(num_expected, count, budget, self._weight_of) for a in accounts]
        return [request for *_, request in islice(heapq.merge(*upcoming), count)]

    def take(self, request: Request) -> None:
        """Remove a request that is admitted, and charge its tenant unless it was charged before."""
        account = self._accounts[self._name_of(request)]
        self._delete(account)
        account.queue.take(request)
        self._length -= 1
        charge = account.cost(request)
        if charge:
            account.running[request.seq] = request, charge
            account.charged += charge / self._weight_of(request)
            self._num_running += 1
        self._insert(account)
        self._forget_if_idle(self._name_of(request), account)

    def remove(self, request: Request) -> None:
        """Remove a request that ended, if it waits, and give its tenant back what it has not used.

        A request that was never admitted costs nothing.
        """
        account = self._accounts.get(self._name_of(request))
        if account is None:
            return
        self._delete(account)
        num_before = len(account.queue)
        account.queue.remove(request)
        self._length -= num_before - len(account.queue)
        if request.seq in account.running:
            self._settle(account, request)
        self._insert(account)
        self._forget_if_idle(self._name_of(request), account)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        return iter([request for account in self._accounts.values() for request in account.queue])

    # --- counters ---------------------------------------------------------------------------------

    def _settle(self, account: TenantAccount, request: Request) -> None:
        """Replace the charge of a request by what was computed for it."""
        _, charge = account.running.pop(request.seq)
        self._num_running -= 1
        computed, weight = computed_tokens(request), self._weight_of(request)
        account.settled += computed / weight
        account.charged += (computed - charge) / weight
        account.observe_end(request)
        if not account.running:
            account.charged = account.settled  # without the rounding errors of the sums

    def _lift(self, account: TenantAccount) -> None:
        """Lift an account that begins to wait to the smallest counter of those that wait."""
        running = sum(
            computed_tokens(request) / self._weight_of(request)
            for request, _ in account.running.values()
        )
        lift = self._lowest_settled() - account.settled - running
        if lift > 0:
            account.settled += lift
            account.charged += lift

    def _lowest_settled(self) -> float:
        """Return the smallest counter of the tenants that wait, or that waited last."""
        if self._by_settled:
            self._floor = max(self._floor, self._by_settled.peekitem(0)[0][0])
        return self._floor

    def _insert(self, account: TenantAccount) -> None:
        if len(account.queue):
            self._turns[account.charged, account.arrival] = account
            self._by_settled[account.settled, account.arrival] = account

    def _delete(self, account: TenantAccount) -> None:
        self._lowest_settled()
        self._turns.pop((account.charged, account.arrival), None)
        self._by_settled.pop((account.settled, account.arrival), None)

    def _forget_if_idle(self, name: str, account: TenantAccount) -> None:
        """Forget an account without requests as soon as that changes nothing."""
        if not self._length and not self._num_running:
            self._accounts.clear()
            self._idle.clear()
            self._floor = 0.0
        elif not len(account.queue) and not account.running:
            self._idle[name] = None
            if account.settled <= self._floor:
                self._forget(name)
            elif len(self._idle) > MAX_IDLE_ACCOUNTS:
                self._forget(next(iter(self._idle)))

    def _forget(self, name: str) -> None:
        del self._accounts[name], self._idle[name]


def computed_tokens(request: Request) -> int:
    """Return the tokens computed for a request that runs or has ended, without cached ones."""
    num_prompt = request.num_prompt
    if not request.first_token_at:
        num_prompt = min(num_prompt, request.num_computed_tokens)
    return max(0, num_prompt - request.cached_tokens) + request.num_generated
