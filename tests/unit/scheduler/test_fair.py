"""Turns between clients: shared by tokens, without credit or debt."""

import itertools
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_proc.planning.fairness import QUANTUM, FairClients, client_cost
from scheduler_proc.planning.policies import FirstComeFirstServed, Pack, PriorityFirst
from scheduler_proc.state.request import Request
from tests.unit.scheduler.test_policies import make_request

A, B, C = b"A", b"B", b"C"


def fair() -> FairClients:
    return FairClients(FirstComeFirstServed)


def take_first(queue: FairClients) -> Request:
    chosen = queue.first(1, 1000)[0]
    queue.take(chosen)
    chosen.admitted_at = 1.0
    return chosen


def drain(queue: FairClients) -> list[Request]:
    return [take_first(queue) for _ in range(len(queue))]


def sized(seq: int, client: bytes, tokens: int) -> Request:
    """Return a request that costs so many tokens."""
    return make_request(seq, tokens - 1, 1, client=client)


def test_one_request_does_not_wait_for_a_thousand_of_another_client() -> None:
    queue = fair()
    for seq in range(1000):
        queue.push(sized(seq, A, 100))
    for _ in range(10):
        take_first(queue)
    queue.push(sized(1000, B, 100))
    order = [request.client for request in drain(queue)]
    assert order.index(B) <= 2 * QUANTUM // 100


def test_it_is_tokens_that_are_shared_not_requests() -> None:
    queue = fair()
    numbers = itertools.count()
    for _ in range(400):
        queue.push(sized(next(numbers), A, 100))
    for _ in range(100):
        queue.push(sized(next(numbers), B, 1000))
    spent: Counter[bytes] = Counter()
    for _ in range(200):
        request = take_first(queue)
        spent[request.client] += request.num_prompt + request.sampling.max_new_tokens
        assert abs(spent[A] - spent[B]) <= 2 * QUANTUM + 1000


def round_robin(waiting: dict[bytes, list[int]]) -> list[tuple[bytes, int]]:
    """Return the order of textbook deficit round robin: a ring of queues, each with a counter."""
    ring = deque((name, deque(costs), 0) for name, costs in waiting.items() if costs)
    order = []
    while ring:
        name, costs, deficit = ring.popleft()
        deficit += QUANTUM
        while costs and costs[0] <= deficit:
            deficit -= costs[0]
            order.append((name, costs.popleft()))
        if costs:
            ring.append((name, costs, deficit))
    return order


@given(
    st.dictionaries(
        st.binary(min_size=1, max_size=1),
        st.lists(st.integers(2, 3 * QUANTUM), min_size=1, max_size=8),
        max_size=6,
    ),
    st.integers(1, 20),
)
@settings(deadline=None, max_examples=60)
def test_it_is_deficit_round_robin(waiting: dict[bytes, list[int]], at_once: int) -> None:
    queue = fair()
    numbers = itertools.count()
    for name, costs in waiting.items():
        for tokens in costs:
            queue.push(sized(next(numbers), name, tokens))
    expected = round_robin(waiting)
    looked = [(request.client, client_cost(request)) for request in queue.first(1000, 1)]
    assert looked == expected
    taken: list[tuple[bytes, int]] = []
    while len(queue):
        for request in queue.first(at_once, 1):
            taken.append((request.client, client_cost(request)))
            queue.take(request)
    assert taken == expected


def test_a_retracted_request_is_not_charged_again() -> None:
    queue = fair()
    long = sized(0, A, 20 * QUANTUM)
    queue.push(long)
    assert take_first(queue) is long
    queue.push(long)
    for seq in range(1, 10):
        queue.push(sized(seq, A if seq % 2 else B, 100))
    assert take_first(queue) is long
    assert [request.client for request in drain(queue)[:5]].count(A) >= 1


def test_clients_without_waiting_requests_leave_nothing_behind() -> None:
    queue = fair()
    keep = make_request(0, client=b"keep")
    queue.push(keep)
    for seq in range(1, 100):
        queue.push(make_request(seq, client=b"%d" % seq))
    queue.first(10, 100)
    for request in list(queue):
        if request is not keep:
            (queue.take if request.seq % 2 else queue.remove)(request)
    assert len(queue._clients) == len(queue._turns) == 1
    queue.remove(keep)
    assert not queue._clients
    assert not queue._turns
    assert not queue._outdated


def test_leaving_and_coming_back_gives_no_credit() -> None:
    """B always has exactly one request waiting, and is away as soon as it is taken."""
    queue = fair()
    numbers = itertools.count()
    for _ in range(2000):
        queue.push(sized(next(numbers), A, 100))
    queue.push(sized(next(numbers), B, 100))
    taken: Counter[bytes] = Counter()
    for _ in range(1000):
        request = take_first(queue)
        taken[request.client] += 1
        if request.client == B:
            queue.push(sized(next(numbers), B, 100))
    assert taken[A] >= taken[B] > 0


@pytest.mark.parametrize("tokens", [10, QUANTUM, 10 * QUANTUM])
def test_a_client_that_returns_for_each_request_gets_no_more_tokens_than_one_that_waits(
    tokens: int,
) -> None:
    queue = fair()
    numbers = itertools.count()
    for _ in range(3000):
        queue.push(sized(next(numbers), A, 100))
    queue.push(sized(next(numbers), B, tokens))
    spent: Counter[bytes] = Counter()
    for _ in range(1500):
        request = take_first(queue)
        spent[request.client] += request.num_prompt + request.sampling.max_new_tokens
        if request.client == B:
            queue.push(sized(next(numbers), B, tokens))
    assert 0 < spent[B] <= spent[A] + 2 * tokens


def test_a_client_that_was_skipped_is_first_in_the_next_round() -> None:
    queue = fair()
    for seq in range(40):
        queue.push(sized(seq, (A, B)[seq % 2], QUANTUM))
    first, second, third = queue.first(3, 1000)
    assert [first.client, second.client, third.client] == [A, B, A]
    queue.take(first)
    queue.take(third)
    assert queue.first(1, 1000) == [second]


def test_within_a_client_its_own_policy_decides() -> None:
    queue = FairClients(PriorityFirst)
    queue.push(make_request(0, client=A, priority=-5))
    queue.push(make_request(1, client=B, priority=1))
    queue.push(make_request(2, client=A, priority=9))
    queue.push(make_request(3, client=B, priority=7))
    assert [request.seq for request in queue.first(4, 100)] == [2, 0, 3, 1]


def test_lookahead_is_that_of_the_client_whose_turn_it_is() -> None:
    queue = FairClients(lambda: Pack(window=5, fifo_every=2))
    assert queue.lookahead == 0
    for seq in range(4):
        queue.push(sized(seq, (A, B)[seq % 2], QUANTUM))
    assert queue.lookahead == 5
    queue.take(queue.first(1, 1000)[0])  # A's; B has taken nothing yet
    assert queue.lookahead == 5
    queue.take(queue.first(1, 1000)[0])
    assert queue.lookahead == 0


def test_the_cost_of_asking_does_not_grow_with_the_clients() -> None:
    asked = 0

    class Counting(FirstComeFirstServed):
        def first(self, count: int, budget: int) -> list[Request]:
            nonlocal asked
            asked += 1
            return super().first(count, budget)

    queue = FairClients(Counting)
    for seq in range(5000):
        queue.push(make_request(seq, client=b"%d" % seq))
    queue.first(16, 100)
    asked = 0
    for request in queue.first(16, 100):
        queue.take(request)
    assert asked <= 16
    queue.first(16, 100)
    assert asked <= 32
