"""Scheduling policies: the order of admission, starvation, and the cost of a round."""

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quadriga.server.config.engine_args import POLICIES, SchedulerArgs
from scheduler_proc.planning.fairness import make_queue
from scheduler_proc.planning.policies import (
    OLDEST_FIRST_EVERY,
    REGISTRY,
    WINDOW,
    DepthFirst,
    FirstComeFirstServed,
    LongestPrefixFirst,
    Pack,
    PriorityFirst,
    ShortestFirst,
    WaitingQueue,
)
from scheduler_proc.state.request import Request
from tests.unit.scheduler.requests import waiting_request

PAGE = 16
BUDGET = 64


class Page:
    """A node of a prefix tree."""

    def __init__(self, parent: "Page | None" = None) -> None:
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1

    def grow(self, pages: int) -> "Page":
        """Return the end of a chain of so many pages below this one."""
        node = self
        for _ in range(pages):
            node = Page(node)
        return node


class Tree:
    """The nodes that waiting requests match: the root, unless a test sets another one."""

    def __init__(self) -> None:
        self.root = Page()
        self.places: dict[int, Page] = {}
        self.num_lookups = 0

    def match_prefix(self, request: Request) -> Page:
        self.num_lookups += 1
        return self.places.get(request.seq, self.root)


def spread(tree: Tree) -> Callable[[Request], Page]:
    """Match each request with some node of a small tree, by its seq."""
    left, right = tree.root.grow(2), tree.root.grow(1)
    nodes = [tree.root, left, left.grow(3), left.grow(1), right, right.grow(40)]
    return lambda request: nodes[request.seq * 7 % len(nodes)]


def queue_of(policy: str, fair: bool, match_prefix: Callable[[Request], Page]) -> WaitingQueue:
    return make_queue(SchedulerArgs(schedule_policy=policy, fair_clients=fair), match_prefix, PAGE)


def seqs(requests: list[Request]) -> list[int]:
    return [request.seq for request in requests]


def drain(queue: WaitingQueue, budget: int = BUDGET) -> Iterator[int]:
    """Yield the seqs of all requests, taken one in each round."""
    while len(queue):
        chosen = queue.first(1, budget)[0]
        queue.take(chosen)
        yield chosen.seq


every_queue = pytest.mark.parametrize(
    ("policy", "fair"), list(itertools.product(POLICIES, [False, True]))
)

# --- every policy ---------------------------------------------------------------------------------


@every_queue
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["push", "push", "take", "remove", "retract"]), st.integers(0)),
        max_size=80,
    ),
    count=st.integers(0, 40),
)
@example(  # of one client, pack chooses another request than it would without a budget
    actions=[("push", 0), ("push", 0), ("push", 1_508_481), ("push", 1), ("remove", 0),
             ("take", 1), ("retract", 0)],
    count=2,
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_first_requests_are_distinct_members_and_the_same_when_asked_for_again(
    policy: str, fair: bool, actions: list[tuple[str, int]], count: int
) -> None:
    queue = queue_of(policy, fair, spread(Tree()))
    waiting: dict[int, Request] = {}
    admitted: list[Request] = []
    numbers = itertools.count()
    for action, number in actions:
        if action == "push":
            seq = next(numbers)
            size = 1 + number % 100
            new = waiting_request(
                seq, size, 1 + seq % 9, client=b"%d" % (number % 4), priority=number % 3
            )
            waiting[seq] = new
            queue.push(new)
        elif action == "take" and waiting:
            first = queue.first(3, BUDGET)
            taken = first[number % len(first)]
            taken.admitted_at = 1.0
            queue.take(taken)
            admitted.append(waiting.pop(taken.seq))
        elif action == "remove" and waiting:
            gone = waiting.pop(list(waiting)[number % len(waiting)])
            queue.remove(gone)
            queue.remove(gone)
        elif action == "retract" and admitted:
            back = admitted.pop(number % len(admitted))
            waiting[back.seq] = back
            queue.push(back)
        first = queue.first(count, BUDGET)
        assert len(first) == len(set(first)) == min(count, len(waiting))
        assert all(waiting[request.seq] is request for request in first)
        assert queue.first(count, BUDGET) == first
        assert queue.first(count // 2, BUDGET) == first[: count // 2]
        assert len(queue) == len(waiting)
        assert {request.seq for request in queue} == set(waiting)
        assert queue.lookahead >= 0


@every_queue
def test_no_request_starves_while_others_keep_coming(policy: str, fair: bool) -> None:
    """All have equal priorities: a larger one may keep a smaller one waiting for ever."""
    tree = Tree()
    cached = tree.root.grow(100)
    queue = queue_of(policy, fair, tree.match_prefix)
    victim = waiting_request(0, prompt=60, new=1000, client=b"small")
    queue.push(victim)
    for seq in range(1, 2000):
        tree.places[seq] = cached
        queue.push(waiting_request(seq, prompt=5, new=1, client=b"large"))
        if seq > 50:
            taken = queue.first(1, BUDGET)[0]
            queue.take(taken)
            if taken is victim:
                return
    raise AssertionError("it was passed over for half an hour")


@every_queue
def test_asking_ten_thousand_for_the_first_sixteen_touches_few_of_them(
    policy: str, fair: bool
) -> None:
    reads: Counter[int] = Counter()

    class Watched(Request):
        """A request that counts the reads of its attributes."""

        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            seq = object.__getattribute__(self, "seq")
            reads[seq] += 1
            return object.__getattribute__(self, name)

    queue = queue_of(policy, fair, spread(Tree()))
    requests = [
        waiting_request(seq, 1 + seq * 31 % 200, client=b"%d" % (seq % 100))
        for seq in range(10_000)
    ]
    for request in requests:
        queue.push(request)
    queue.first(16, BUDGET)
    for request in requests:
        request.__class__ = Watched
    tracemalloc.start()
    try:
        assert len(queue.first(16, BUDGET)) == 16
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(reads) <= (16 * 32 if fair else WINDOW)
    assert peak < 40_000, "10,000 pointers would be 80,000 bytes"


# --- fcfs, shortest, priority ---------------------------------------------------------------------


def test_a_retracted_request_has_its_old_place_again() -> None:
    queue = FirstComeFirstServed()
    requests = [waiting_request(seq) for seq in range(4)]
    for request in requests:
        queue.push(request)
    for request in requests[:3]:
        queue.take(request)
    queue.push(requests[1])
    queue.push(requests[0])
    assert list(drain(queue)) == [0, 1, 3]


def test_taking_a_request_that_does_not_wait_is_an_error_and_removing_it_is_not() -> None:
    queue = FirstComeFirstServed()
    queue.remove(waiting_request(0))
    with pytest.raises(KeyError):
        queue.take(waiting_request(0))


@given(sizes=st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), max_size=30))
def test_of_requests_that_came_together_the_shortest_goes_first(
    sizes: list[tuple[int, int]],
) -> None:
    queue = ShortestFirst()
    for seq, (prompt, new) in enumerate(sizes):
        queue.push(waiting_request(seq, prompt, new, received=1_790_000_000.0))
    expected = sorted(range(len(sizes)), key=lambda seq: (sum(sizes[seq]), seq))
    assert list(drain(queue)) == expected


def test_tokens_generated_before_a_retraction_shorten_a_requests_estimate() -> None:
    back, other = waiting_request(0, 10, 90, received=0.0), waiting_request(1, 10, 50, received=0.0)
    back.tokens.extend([1] * 60)
    back.num_known_tokens += 60
    queue = ShortestFirst()
    queue.push(back)
    queue.push(other)
    # 70 tokens to compute again and 30 to sample, against 10 and 50.
    assert list(drain(queue)) == [1, 0]


def test_waiting_shortens_a_requests_estimate() -> None:
    queue = ShortestFirst()
    queue.push(waiting_request(0, 10, 500, received=0.0))
    queue.push(waiting_request(1, 10, 10, received=4.0))
    queue.push(waiting_request(2, 10, 10, received=6.0))
    assert list(drain(queue)) == [1, 0, 2]


def test_a_key_is_not_read_again_when_the_request_has_changed() -> None:
    queue = ShortestFirst()
    request = waiting_request(0, 100)
    queue.push(request)
    request.num_computed_tokens = 64
    queue.take(request)
    assert len(queue) == 0


@given(priorities=st.lists(st.integers(-3, 3), max_size=30))
def test_the_larger_priority_goes_first_and_among_equals_the_older(priorities: list[int]) -> None:
    queue = PriorityFirst()
    for seq, priority in enumerate(priorities):
        queue.push(waiting_request(seq, priority=priority))
    expected = sorted(range(len(priorities)), key=lambda seq: (-priorities[seq], seq))
    assert list(drain(queue)) == expected


# --- pack -----------------------------------------------------------------------------------------


def pack(sizes: list[int], window: int = 32, fifo_every: int = 8) -> Pack:
    queue = Pack(window, fifo_every)
    for seq, size in enumerate(sizes):
        queue.push(waiting_request(seq, size))
    return queue


def test_pack_puts_the_largest_that_fit_first_and_the_others_behind_as_they_came() -> None:
    queue = pack([90, 30, 50, 20, 80, 10])
    # Of 100 tokens: 90, then 10; nothing else fits.
    assert seqs(queue.first(6, 100)) == [0, 5, 1, 2, 3, 4]
    # Of 85: 80; then nothing of 5.
    assert seqs(queue.first(6, 85)) == [4, 0, 1, 2, 3, 5]
    # Of 60: 50, 10.
    assert seqs(queue.first(3, 60)) == [2, 5, 0]


@given(sizes=st.lists(st.integers(1, 99), min_size=1, max_size=50), budget=st.integers(1, 300))
def test_pack_fills_a_step_at_least_as_well_as_any_one_prompt_would(
    sizes: list[int], budget: int
) -> None:
    queue = pack(sizes)
    filled = 0
    for request in queue.first(100, budget):
        if filled + request.num_uncomputed_tokens > budget:
            break
        filled += request.num_uncomputed_tokens
    assert filled >= max((size for size in sizes[:32] if size <= budget), default=0)


def test_pack_looks_no_further_than_its_window() -> None:
    queue = pack([90, 30, 100], window=2)
    assert seqs(queue.first(3, 100)) == [0, 1, 2]


def test_every_nth_round_of_pack_is_first_come_first_served_and_skips_no_request() -> None:
    queue = pack([100, 1, 2, 3, 4, 5, 6], fifo_every=3)
    assert (seqs(queue.first(1, 10)), queue.lookahead) == ([6], 32)
    queue.take(queue.first(1, 10)[0])
    assert (seqs(queue.first(1, 10)), queue.lookahead) == ([5], 32)
    queue.take(queue.first(1, 10)[0])
    for _ in range(3):  # the round lasts until something is taken
        assert queue.lookahead == 0
        assert seqs(queue.first(2, 10)) == [0, 1]
    queue.take(queue.first(1, 10)[0])
    assert queue.lookahead == 32


def test_several_requests_taken_in_a_round_count_as_one_round() -> None:
    queue = pack(list(range(1, 20)), fifo_every=2)
    for request in queue.first(5, 1000):
        queue.take(request)
    assert queue.lookahead == 0
    queue.first(1, 1000)
    assert queue.lookahead == 0


def test_removing_is_no_round() -> None:
    queue = pack([1, 2, 3], fifo_every=2)
    queue.remove(queue.first(1, 10)[0])
    assert queue.lookahead > 0


# --- lpm ------------------------------------------------------------------------------------------


def test_the_longest_cached_prefix_goes_first_and_among_equals_the_oldest() -> None:
    tree = Tree()
    queue = LongestPrefixFirst(tree.match_prefix, PAGE)
    for seq, pages in enumerate([0, 3, 9, 3, 0]):
        tree.places[seq] = tree.root.grow(pages)
        queue.push(waiting_request(seq, received=0.0))
    assert list(drain(queue)) == [2, 1, 3, 0, 4]


def test_the_order_follows_the_tree_as_it_changes() -> None:
    tree = Tree()
    queue = LongestPrefixFirst(tree.match_prefix, PAGE)
    for seq in range(3):
        queue.push(waiting_request(seq, received=0.0))
    assert seqs(queue.first(3, BUDGET)) == [0, 1, 2]
    tree.places[2] = tree.root.grow(1)
    assert seqs(queue.first(3, BUDGET)) == [2, 0, 1]


def test_waiting_counts_like_cached_tokens() -> None:
    tree = Tree()
    queue = LongestPrefixFirst(tree.match_prefix, PAGE)
    for seq, received in enumerate([0.0, 15.0, 17.0]):
        queue.push(waiting_request(seq, received=received))
    tree.places[1] = tree.places[2] = tree.root.grow(250)  # 4,000 tokens: 16 seconds
    assert list(drain(queue)) == [1, 0, 2]


@pytest.mark.parametrize("make", [lambda t: LongestPrefixFirst(t.match_prefix, PAGE),
                                  lambda t: DepthFirst(t.match_prefix)])  # fmt: skip
def test_only_the_oldest_are_looked_up_in_the_tree(make: Callable[[Tree], WaitingQueue]) -> None:
    tree = Tree()
    queue = make(tree)
    for seq in range(1000):
        queue.push(waiting_request(seq, received=0.0))
    tree.places[WINDOW] = tree.root.grow(5)
    assert seqs(queue.first(WINDOW + 9, BUDGET)) == list(range(WINDOW + 9))
    assert tree.num_lookups == WINDOW


# --- dfs-weight -----------------------------------------------------------------------------------


def depth_first(places: list[Page]) -> tuple[DepthFirst, Tree]:
    tree = Tree()
    queue = DepthFirst(tree.match_prefix)
    for seq, place in enumerate(places):
        tree.places[seq] = place
        queue.push(waiting_request(seq))
    return queue, tree


def test_the_oldest_goes_first_every_few_rounds() -> None:
    root = Page()
    busy = root.grow(1)
    queue, _ = depth_first([root, *[busy] * 40])
    order = list(drain(queue))
    assert order.index(0) == OLDEST_FIRST_EVERY - 1


@st.composite
def trees(draw: st.DrawFn) -> list[Page]:
    """Draw the nodes of a random tree that the requests of a window match."""
    nodes = [Page()]
    for _ in range(draw(st.integers(0, 25))):
        nodes.append(draw(st.sampled_from(nodes)).grow(draw(st.integers(1, 6))))
    return draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=40))


def ancestors(node: Page) -> list[Page]:
    """Return the nodes from the root down to this one."""
    return [*(ancestors(node.parent) if node.parent else []), node]


def by_the_book(places: list[Page]) -> list[int]:
    """Return the depth-first order, computed node by node."""
    weight: Counter[Page] = Counter()
    oldest: dict[Page, int] = {}
    children: dict[Page, list[Page]] = {}
    at: dict[Page, list[int]] = {}
    for seq, place in enumerate(places):
        at.setdefault(place, []).append(seq)
        for node in ancestors(place):
            weight[node] += 1
            oldest.setdefault(node, seq)
            if node.parent is not None and node not in children.setdefault(node.parent, []):
                children[node.parent].append(node)

    def visit(node: Page) -> list[int]:
        below = sorted(children.get(node, []), key=lambda c: (-weight[c], oldest[c]))
        return [seq for child in below for seq in visit(child)] + at.get(node, [])

    return visit(ancestors(places[0])[0])


@given(trees(), trees())
@settings(deadline=None)
def test_it_is_the_depth_first_order_also_when_every_request_has_moved(
    places: list[Page], later: list[Page]
) -> None:
    queue, tree = depth_first(places)
    assert seqs(queue.first(100, BUDGET)) == by_the_book(places)
    moved = [later[seq % len(later)] for seq in range(len(places))]
    tree.places = dict(enumerate(moved))
    assert seqs(queue.first(100, BUDGET)) == by_the_book(moved)


def test_long_chains_are_walked_once() -> None:
    root = Page()
    climbed = 0

    class Counting(Page):
        @property
        def parent(self) -> Page | None:
            nonlocal climbed
            climbed += 1
            return self._parent

        @parent.setter
        def parent(self, parent: Page | None) -> None:
            self._parent = parent

    def chain(start: Page, pages: int) -> Page:
        for _ in range(pages):
            start = Counting(start)
        return start

    shared = chain(root, 1000)
    ends = [chain(shared, 10) for _ in range(20)]
    queue, tree = depth_first(list(ends))
    queue.first(16, BUDGET)
    climbed = 0
    tree.places[3] = chain(ends[3], 1)
    queue.first(16, BUDGET)
    assert climbed < 10


# --- the registry ---------------------------------------------------------------------------------


def test_the_flag_offers_exactly_the_policies_that_are_registered() -> None:
    assert sorted(POLICIES) == sorted(REGISTRY)


def test_every_policy_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "engineering" / "scheduling.md").read_text()
    for name in REGISTRY:
        assert f"| `{name}`" in page
