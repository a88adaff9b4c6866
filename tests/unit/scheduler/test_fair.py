"""Shares of clients and of tenants: by computed tokens, without credit for time away."""

import itertools
import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.server.config.engine_args import SchedulerArgs
from scheduler_proc.planning.fairness import (
    FairShares,
    ShareOf,
    client_share,
    make_queue,
    tenant_share,
)
from scheduler_proc.planning.policies import FirstComeFirstServed, Pack, PriorityFirst, WaitingQueue
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.request import Request
from tests.unit.scheduler.requests import jain, waiting_request


@pytest.fixture(params=[client_share, tenant_share])
def share_of(request: pytest.FixtureRequest) -> ShareOf:
    key: ShareOf = request.param
    return key


@pytest.fixture
def queue(share_of: ShareOf) -> FairShares:
    return FairShares(FirstComeFirstServed, share_of)


def of(seq: int, owner: str, prompt: int = 10, new: int = 90, weight: float = 1.0) -> Request:
    """Return a request of a client and tenant of the same name; only tenants have weights."""
    request = waiting_request(seq, prompt, new, client=owner.encode())
    request.tenant, request.weight = owner, weight
    return request


def sized(seq: int, owner: str, tokens: int) -> Request:
    """Return a request that is charged for so many tokens."""
    return of(seq, owner, tokens - 1, 1)


def admit(queue: WaitingQueue) -> Request:
    request = queue.first(1, 1000)[0]
    queue.take(request)
    request.admitted_at = 1.0
    return request


def end(queue: WaitingQueue, request: Request, num_generated: int, num_cached: int = 0) -> None:
    request.first_token_at = 2.0
    request.cached_tokens = num_cached
    request.tokens.extend([5] * num_generated)
    queue.remove(request)


@given(
    waiting=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(2, 1500)), min_size=1),
    share_of=st.sampled_from([client_share, tenant_share]),
    at_once=st.integers(1, 20),
)
@settings(deadline=None, max_examples=60)
def test_owners_that_wait_are_never_more_than_a_request_apart(
    waiting: list[tuple[str, int]], share_of: ShareOf, at_once: int
) -> None:
    queue = FairShares(FirstComeFirstServed, share_of)
    for seq, (owner, tokens) in enumerate(waiting):
        queue.push(sized(seq, owner, tokens))
    looked = queue.first(1000, 1)
    taken: list[Request] = []
    spent = dict.fromkeys({owner for owner, _ in waiting}, 0)
    left = Counter(owner for owner, _ in waiting)
    while len(queue):
        for request in queue.first(at_once, 1):
            waits = [spent[owner] for owner, count in left.items() if count]
            assert max(waits) - min(waits) <= 1500
            assert spent[request.tenant] == min(waits)
            queue.take(request)
            taken.append(request)
            spent[request.tenant] += request.num_prompt + 1
            left[request.tenant] -= 1
    assert taken == looked


@pytest.mark.parametrize("slots", [1, 8, 40])
def test_shares_of_computed_tokens_are_kept_whatever_is_asked_for(
    queue: FairShares, share_of: ShareOf, slots: int
) -> None:
    """Owners ask for 10 to 100 times of what they then generate, and hit the cache unevenly."""
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    asked = {"a": 50, "b": 1000, "c": 4000}
    numbers, draw = itertools.count(), random.Random(1)
    shares = dict.fromkeys(weights, 0.0)
    running: deque[Request] = deque()

    def send(owner: str) -> None:
        queue.push(of(next(numbers), owner, draw.randint(5, 50), asked[owner], weights[owner]))

    for owner in weights:
        for _ in range(100):
            send(owner)
    for _ in range(4000):
        if len(running) == slots:
            request = running[draw.randrange(slots)]
            running.remove(request)
            generated, cached = draw.randint(1, 40), draw.randint(0, request.num_prompt - 1)
            end(queue, request, generated, cached)
            computed = request.num_prompt - cached + generated
            shares[request.tenant] += computed / share_of(request).weight
            send(request.tenant)
        running.append(admit(queue))
    assert jain(list(shares.values())) >= 0.995


def test_an_owner_that_comes_back_gets_its_share_and_no_more(queue: FairShares) -> None:
    numbers = itertools.count()
    for _ in range(500):
        queue.push(of(next(numbers), "a"))
    for _ in range(200):
        end(queue, admit(queue), 90)
    for _ in range(500):
        queue.push(of(next(numbers), "b"))
    taken: Counter[str] = Counter()
    for _ in range(100):
        request = admit(queue)
        taken[request.tenant] += 1
        end(queue, request, 90)
    assert abs(taken["a"] - taken["b"]) <= 2


@pytest.mark.parametrize("tokens", [10, 500, 5000])
def test_an_owner_that_returns_for_each_request_gets_no_more_tokens_than_one_that_waits(
    queue: FairShares, tokens: int
) -> None:
    """B has exactly one request waiting, and is away as soon as it is admitted."""
    numbers = itertools.count()
    for _ in range(3000):
        queue.push(sized(next(numbers), "a", 100))
    queue.push(sized(next(numbers), "b", tokens))
    spent: Counter[str] = Counter()
    for _ in range(1500):
        request = admit(queue)
        spent[request.tenant] += request.num_prompt + 1
        if request.tenant == "b":
            queue.push(sized(next(numbers), "b", tokens))
    assert 0 < spent["b"] <= spent["a"] + 2 * tokens


def test_leaving_for_a_moment_gains_nothing(queue: FairShares) -> None:
    """B has one request at a time, and is away while it runs."""
    numbers = itertools.count()
    for _ in range(3000):
        queue.push(of(next(numbers), "a"))
    queue.push(of(next(numbers), "b", 100, 900))
    computed: Counter[str] = Counter()
    running: deque[Request] = deque()
    for _ in range(2000):
        if len(running) == 4:
            request = running.popleft()
            generated = 90 if request.tenant == "a" else 900
            end(queue, request, generated)
            computed[request.tenant] += request.num_prompt + generated
            if request.tenant == "b":
                queue.push(of(next(numbers), "b", 100, 900))
        running.append(admit(queue))
    assert computed["b"] <= 1.05 * computed["a"] + 4000


def test_a_request_that_is_never_admitted_costs_nothing_and_a_retracted_one_costs_once(
    queue: FairShares,
) -> None:
    aborted = of(0, "a", 10, 10_000)
    queue.push(aborted)
    for seq in range(1, 8):
        queue.push(of(seq, "ab"[seq % 2]))
    queue.remove(aborted)
    first = admit(queue)
    queue.push(first)  # retracted
    assert first in queue.first(2, 100)
    order = [admit(queue).tenant for _ in range(7)]
    assert Counter(order) == {"a": 3, "b": 4, first.tenant: 3 if first.tenant == "a" else 4}
    assert len(queue) == 0


def gone_on(seq: int, owner: str, prompt: int) -> Request:
    """Return a request whose prompt and first tokens another replica has computed."""
    request = of(seq, owner, prompt, 90)
    request.tokens.extend([5] * 3)
    request.num_known_tokens = len(request.tokens)
    request.admitted_at, request.first_token_at = 1.0, 1.5
    return request


def test_a_request_that_goes_on_here_counts_with_the_tokens_that_it_generates_here(
    queue: FairShares,
) -> None:
    """Of b all prompts are computed elsewhere, of a none."""
    numbers, spent = itertools.count(), Counter[str]()
    for _ in range(300):
        queue.push(of(next(numbers), "a", 10))
        queue.push(gone_on(next(numbers), "b", 6000))
    for _ in range(300):
        request = admit(queue)
        queue.push(request)  # retracted once
        queue.take(request)
        end(queue, request, 87)
        spent[request.tenant] += 10 + 87 if request.tenant == "a" else 87
    assert 0.95 < spent["a"] / spent["b"] < 1.05


def test_accounts_are_bounded_and_gone_with_the_last_request(
    queue: FairShares, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_proc.planning.fairness.MAX_IDLE_ACCOUNTS", 10)
    queue.push(of(10_000, "keep"))
    for seq in range(1000):
        request = of(seq, str(seq))
        queue.push(request)
        if seq % 4:
            queue.take(request)
            request.admitted_at = 1.0
        end(queue, request, 50)
        queue.remove(request)  # ends twice, of an owner that may be forgotten
    assert len(queue._accounts) <= 12
    while len(queue):
        end(queue, admit(queue), 1)
    assert not queue._accounts
    assert not queue._turns
    assert not queue._by_settled
    assert not queue._idle


def test_users_share_within_their_tenant() -> None:
    args = SchedulerArgs(fair_tenants=True)
    queue = make_queue(args, lambda _: KVCache(1, 1).tree.root, 4)
    numbers = itertools.count()
    for _ in range(50):
        for user in range(9):
            queue.push(of(next(numbers), f"many/{user}"))
        queue.push(of(next(numbers), "one"))
    taken: Counter[str] = Counter()
    for _ in range(90):
        request = admit(queue)
        taken[request.tenant] += 1
        end(queue, request, 90)
    assert taken["one"] == 45
    assert {taken[f"many/{user}"] for user in range(9)} == {5}


def test_with_equal_owners_the_order_is_that_of_arrival(queue: FairShares) -> None:
    for seq in range(20):
        queue.push(of(seq, "abc"[seq % 3]))
    assert [admit(queue).seq for _ in range(20)] == list(range(20))


def test_an_owner_that_was_skipped_is_first_in_the_next_step(queue: FairShares) -> None:
    for seq in range(40):
        queue.push(sized(seq, "ab"[seq % 2], 500))
    first, second, third = queue.first(3, 1000)
    assert [first.tenant, second.tenant, third.tenant] == ["a", "b", "a"]
    queue.take(first)
    queue.take(third)
    assert queue.first(1, 1000) == [second]


def test_within_an_owner_its_own_policy_decides(share_of: ShareOf) -> None:
    queue = FairShares(PriorityFirst, share_of)
    for seq, (owner, priority) in enumerate([("a", -5), ("b", 1), ("a", 9), ("b", 7)]):
        request = of(seq, owner)
        request.priority = priority
        queue.push(request)
    assert [request.seq for request in queue.first(4, 100)] == [2, 3, 0, 1]


def test_lookahead_is_that_of_the_owner_whose_turn_it_is(share_of: ShareOf) -> None:
    queue = FairShares(lambda: Pack(window=5, fifo_every=2), share_of)
    assert queue.lookahead == 0
    for seq in range(4):
        queue.push(sized(seq, "ab"[seq % 2], 500))
    assert queue.lookahead == 5
    queue.take(queue.first(1, 1000)[0])  # a's; b has taken nothing yet
    assert queue.lookahead == 5
    queue.take(queue.first(1, 1000)[0])
    assert queue.lookahead == 0


def test_the_cost_of_asking_does_not_grow_with_the_owners(share_of: ShareOf) -> None:
    asked = 0

    class Counting(FirstComeFirstServed):
        def first(self, count: int, budget: int) -> list[Request]:
            nonlocal asked
            asked += 1
            return super().first(count, budget)

    queue = FairShares(Counting, share_of)
    for seq in range(5000):
        queue.push(of(seq, str(seq)))
    queue.first(16, 100)
    asked = 0
    for request in queue.first(16, 100):
        queue.take(request)
    assert asked <= 16
    queue.first(16, 100)
    assert asked <= 32
