"""Fairness: turns of clients, weighted shares of tenants, and the queue that the flags ask for.

`FairClients` (--fair-clients) and `FairTenants` (--fair-tenants) are waiting queues of waiting
queues, `WeightedTurns` gives decode rows by the weights of tenants. `make_queue` and `make_turns`
return what the flags ask for.
"""

import heapq
from collections.abc import Callable, Iterator
from itertools import islice

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

# Turns between clients (--fair-clients): deficit round robin over one waiting queue per client.
#
# After Shreedhar and Varghese, "Efficient Fair Queueing using Deficit Round Robin" (1995): in
# each round a client may spend QUANTUM tokens more, saves what it does not use, and is served as
# far as that lasts. Here the rounds are not walked through. A client that has spent `spent`
# tokens since round `first_round` can afford a request of c tokens in round first_round +
# ceil((spent + c) / QUANTUM). That round is its place in a sorted order, so rounds in which no
# client can afford a request, and clients whose turn is far away, cost nothing.
#
# The cost of a request is its prompt and all that it may still generate. It must be affordable
# before the request is served, so no client owes anything, and a client without waiting requests
# can be forgotten: it comes back as a new one, whose first turn is in the round after the present
# one.
#
# Which request a client would send next may depend on the prefix tree and on the room in a step.
# To ask every client in every step would cost too much, so a client keeps the place of the
# request that was next when a request of it was last pushed, removed or taken. The request that
# its policy chooses later takes this place, and is charged with its own cost.

# As rounds cost nothing, it need not be as large as the largest request. It bounds how many tokens
# of one client come in a row.
QUANTUM = 512


class ClientQueue:
    """The waiting requests of one client.

    Attributes:
        first_round: round in which the client arrived.
        arrival: number of the client, which orders the clients of a round.
        spent: tokens that the client was charged since it arrived.
        turn: round and arrival of its next request, as of the last update; it decides.
    """

    __slots__ = ("arrival", "first_round", "queue", "spent", "turn")

    def __init__(self, queue: WaitingQueue, first_round: int, arrival: int) -> None:
        self.queue = queue
        self.first_round = first_round
        self.arrival = arrival
        self.spent = 0
        self.turn = (first_round, arrival)

    def round_after(self, spent: int) -> int:
        """Return the first round in which the client can have spent so many tokens."""
        return self.first_round - (-spent // QUANTUM)

    def upcoming(
        self, num_expected: int, max_count: int, budget: int
    ) -> Iterator[tuple[int, int, Request]]:
        """Yield round, arrival and request for each of the next requests.

        Args:
            num_expected: number of requests that the caller will probably consume.
            max_count: number of requests that it will consume at most.
            budget: as in WaitingQueue.first.
        """
        (turn, _), spent, num_seen = self.turn, self.spent, 0
        while num_seen < max_count:
            requests = self.queue.first(min(num_expected, max_count), budget)
            for index, request in enumerate(islice(requests, num_seen, None), num_seen):
                spent += client_cost(request)
                if index > 0:
                    turn = max(turn, self.round_after(spent))
                yield turn, self.arrival, request
            if len(requests) < num_expected:
                return
            num_seen, num_expected = num_expected, 2 * num_expected


class FairClients:
    """A waiting queue of waiting queues. Within a client, the policy of its queue decides."""

    def __init__(self, make_queue: Callable[[], WaitingQueue]) -> None:
        self._make_queue = make_queue
        self._clients: dict[bytes, ClientQueue] = {}
        self._turns: SortedDict = SortedDict()
        self._outdated: dict[bytes, ClientQueue] = {}
        self._round = 0
        self._num_arrivals = 0
        self._length = 0

    @property
    def lookahead(self) -> int:
        """The lookahead of the client whose turn it is."""
        self._update_turns()
        return self._turns.peekitem(0)[1].queue.lookahead if self._turns else 0

    def push(self, request: Request) -> None:
        """Add a request to the queue of its client."""
        client = self._clients.get(request.client)
        if client is None:
            client = ClientQueue(self._make_queue(), self._round, self._num_arrivals)
            self._num_arrivals += 1
            self._clients[request.client] = self._turns[client.turn] = client
        client.queue.push(request)
        self._length += 1
        self._outdated[request.client] = client

    def first(self, count: int, budget: int) -> list[Request]:
        """Return the next requests, in the order of their turns."""
        # The first `count` requests are of the first `count` clients.
        self._update_turns()
        clients = list(islice(self._turns.values(), count))
        num_expected = count // max(1, len(clients)) + 2
        upcoming = [client.upcoming(num_expected, count, budget) for client in clients]
        return [request for *_, request in islice(heapq.merge(*upcoming), count)]

    def take(self, request: Request) -> None:
        """Remove a request that is admitted, and charge its client."""
        client = self._clients[request.client]
        client.queue.take(request)
        client.spent += client_cost(request)
        self._round = max(self._round, client.round_after(client.spent))
        self._on_removed(request.client, client)

    def remove(self, request: Request) -> None:
        """Remove a request, if it waits."""
        client = self._clients.get(request.client)
        if client is None:
            return
        before = len(client.queue)
        client.queue.remove(request)
        if len(client.queue) < before:
            self._on_removed(request.client, client)

    def _on_removed(self, name: bytes, client: ClientQueue) -> None:
        self._length -= 1
        if len(client.queue):
            self._outdated[name] = client
        else:
            self._outdated.pop(name, None)
            del self._clients[name], self._turns[client.turn]

    def _update_turns(self) -> None:
        """Update the turn of each client whose next request may have changed."""
        for client in self._outdated.values():
            spent = client.spent + client_cost(client.queue.first(1, 0)[0])
            del self._turns[client.turn]
            client.turn = (client.round_after(spent), client.arrival)
            self._turns[client.turn] = client
        self._outdated.clear()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        return iter([request for client in self._clients.values() for request in client.queue])


def client_cost(request: Request) -> int:
    """Return the tokens that a client is charged for: the prompt, and all that may be generated.

    A request that was retracted costs nothing: it was charged when it was first admitted.
    """
    return 0 if request.admitted_at else request.num_prompt + request.num_remaining_tokens


# Weighted fair shares between tenants (--fair-tenants): one waiting queue for each tenant.
#
# After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each tenant has a
# counter of the tokens that were computed for it, divided by its weight, and the tenant with the
# smallest counter is served next. A tenant that begins to wait is lifted to the smallest counter
# of the waiting ones, so that nothing is saved up while it sends nothing.
#
# What a request will compute is known only at its end. When it is admitted, its tenant is charged
# for the prompt and for as many tokens as its requests generate on average; when it ends, the
# charge is replaced by what was computed: prompt tokens that were not cached, and tokens that
# were generated. `settled` is the counter without the charges of requests that have not ended. It
# only grows, so newcomers are lifted to it: lifted to a counter with charges, they would wait for
# tokens that are given back later.
#
# The account of a tenant without requests is kept while the waiting ones have smaller counters,
# so that leaving and coming back gains nothing: at most MAX_IDLE_ACCOUNTS are, and none when no
# request waits or runs any more.

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


# Decode rows by the weights of tenants, where more requests run than a step has rows.
#
# Stride scheduling (Waldspurger and Weihl, "Stride Scheduling: Deterministic Proportional-Share
# Resource Management", 1995): each tenant has a pass, which grows by 1 / weight with each of its
# rows, and the tenant with the smallest pass has the next row. A tenant whose requests all have
# rows saves nothing up: its pass is lifted to that of the row that was given last.


class WeightedTurns:
    """The passes of the tenants that had rows in the last step."""

    def __init__(self) -> None:
        self._passes: dict[str, float] = {}
        self._last_pass = 0.0

    def next_rows(self, requests: dict[int, Request], count: int) -> list[Request]:
        """Return the requests that have the next rows, and move them to the end.

        Those of a tenant take equal turns.

        Args:
            requests: running requests by number, in the order of their turns.
            count: number of rows.
        """
        if len(requests) <= count:
            self._passes.clear()
            self._last_pass = 0.0
            return list(requests.values())
        tenants = self._turns_of_tenants(requests)
        group: list[Request] = []
        while len(group) < count:
            self._last_pass, name, turns = tenants[0]
            request = next(turns, None)
            if request is None:
                heapq.heappop(tenants)
                continue
            group.append(request)
            self._passes[name] = self._last_pass + 1 / request.weight
            heapq.heapreplace(tenants, (self._passes[name], name, turns))
        move_to_end(requests, group)
        return group

    def _turns_of_tenants(
        self, requests: dict[int, Request]
    ) -> list[tuple[float, str, Iterator[Request]]]:
        """Return a heap of the pass, name and requests of each tenant."""
        groups: dict[str, list[Request]] = {}
        for request in requests.values():
            groups.setdefault(parent_name(request.tenant), []).append(request)
        self._passes = {name: max(self._passes.get(name, 0.0), self._last_pass) for name in groups}
        tenants = [(self._passes[name], name, iter(group)) for name, group in groups.items()]
        heapq.heapify(tenants)
        return tenants


# The waiting queue and the decode turns that the flags ask for.

# Of each client: a step that serves 16 clients then looks at as many requests as without fairness.
FAIR_WINDOW = 8


def make_queue(args: SchedulerArgs, match_prefix: MatchPrefix, page_size: int) -> WaitingQueue:
    """Return the queue of --schedule-policy.

    With --fair-clients each client has one of its own, with --fair-tenants each user of a tenant.

    Args:
        args: flags of the scheduler.
        match_prefix: as in PolicyContext; only the policies of prefix.py call it.
        page_size: number of tokens in a page.
    """
    window = FAIR_WINDOW if args.is_fair else WINDOW
    context = PolicyContext(args, match_prefix, page_size, window)

    def make_one() -> WaitingQueue:
        return REGISTRY[args.schedule_policy].create(context)

    def make_users() -> WaitingQueue:
        return FairTenants(make_one, lambda request: request.tenant, lambda _: 1.0)

    if args.fair_tenants:
        return FairTenants(
            make_users,
            lambda request: parent_name(request.tenant),
            lambda request: request.weight,
        )
    return FairClients(make_one) if args.fair_clients else make_one()


def make_turns(args: SchedulerArgs) -> NextRows:
    """Return how decode rows are given: equally, or with --fair-tenants by weight."""
    return WeightedTurns().next_rows if args.fair_tenants else take_turns
