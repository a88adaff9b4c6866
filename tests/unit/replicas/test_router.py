"""The choice of a replica: by cached blocks, by load, in turn, and what is counted for it."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.server.config.engine_args import BY_CACHE, BY_LOAD, IN_TURN, LOAD_BALANCE_METHODS
from quadriga.server.prefix_blocks import block_hashes, pages_per_block, split_hashes
from quadriga.wire.to_detok import ReplicaNews
from tokenizer_proc.replicas.router import (
    HIT,
    LEAST,
    MAX_CANDIDATES,
    OVERLOAD_MARGIN,
    ROW_TOKENS,
    SPILL,
    UNCACHED_WEIGHT,
    Ledger,
    PageIndex,
    Prompt,
    Router,
)

BLOCK, PAGE = 64, 16
NUM_TOKENS = 4 * BLOCK + 1


def ids(first: int, num_tokens: int = NUM_TOKENS) -> bytes:
    return array("i", range(first, first + num_tokens)).tobytes()


def prompt(first: int, num_tokens: int = NUM_TOKENS, num_choices: int = 1) -> Prompt:
    return Prompt(num_tokens, block_hashes(ids(first, num_tokens), BLOCK), num_choices)


def router_of(method: str = BY_CACHE, num_replicas: int = 3, max_waiting: int = 100) -> Router[str]:
    return Router[str](method, num_replicas, BLOCK, PAGE, max_waiting)


def run(router: Router[str], key: str, asked: Prompt) -> int:
    """Place a request, and let its replica compute it, cache it, and end it."""
    replica = router.place(key, asked).replica
    router.on_news(replica, ReplicaNews(b"".join(asked.hashes), b"", 1000))
    router.on_start(key, 0)
    router.on_end(key, 0)
    return replica


def test_equal_blocks_have_equal_hashes_and_the_last_token_is_never_taken_from_a_cache() -> None:
    assert len(block_hashes(ids(0, 2 * BLOCK), BLOCK)) == 1
    longer, shorter = block_hashes(ids(0, 300), BLOCK), block_hashes(ids(0, 200), BLOCK)
    assert longer[: len(shorter)] == shorter
    assert set(longer).isdisjoint(block_hashes(ids(1, 300), BLOCK))
    assert set(longer).isdisjoint(block_hashes(ids(0, 300), BLOCK, b"tenant"))
    assert list(split_hashes(b"".join(longer))) == longer
    assert [pages_per_block(size) for size in (1, 16, 24, 64, 128)] == [64, 4, 3, 1, 1]


def test_a_prompt_goes_where_its_beginning_is_cached() -> None:
    router = router_of()
    where = {group: run(router, f"first-{group}", prompt(1000 * group)) for group in range(3)}
    assert sorted(where.values()) == [0, 1, 2]
    for turn, group in enumerate([2, 0, 1, 1, 2]):
        routed = router.place(f"next-{turn}", prompt(1000 * group))
        assert routed == (where[group], 4 * BLOCK, HIT)
        router.forget(f"next-{turn}")


def test_requests_that_arrive_together_with_one_new_prefix_go_together() -> None:
    router = router_of()
    replicas = {router.place(f"{number}", prompt(7)).replica for number in range(4)}
    assert len(replicas) == 1


def test_a_replica_whose_queue_costs_more_than_the_prefix_loses_the_request() -> None:
    router = router_of()
    home = run(router, "first", prompt(0))
    for number in range(UNCACHED_WEIGHT * NUM_TOKENS // ROW_TOKENS + 2):
        router.count(f"load-{number}", home, Prompt(0, []))
    routed = router.place("next", prompt(0))
    assert (routed.why, routed.num_cached) == (SPILL, 0)
    assert routed.replica != home
    # It is cached at both from then on.
    router.on_news(routed.replica, ReplicaNews(b"".join(prompt(0).hashes), b"", 1000))
    router.on_start("next", 0)
    assert router.choose(prompt(0)) == (routed.replica, 4 * BLOCK, HIT)


def test_a_shorter_match_with_less_to_do_wins_against_a_longer_one() -> None:
    router = router_of()
    long, short = prompt(0), prompt(0, 2 * BLOCK + 1)
    router.on_news(0, ReplicaNews(b"".join(long.hashes), b"", 1000))
    router.on_news(1, ReplicaNews(b"".join(short.hashes), b"", 1000))
    assert router.choose(long) == (0, 4 * BLOCK, HIT)
    router.count("load", 0, Prompt(5 * BLOCK, []))
    assert router.choose(long) == (1, 2 * BLOCK, SPILL)


def test_a_prefix_that_every_replica_has_loads_them_evenly() -> None:
    num_replicas = 4 * MAX_CANDIDATES
    router = router_of(num_replicas=num_replicas)
    for replica in range(num_replicas):
        router.on_news(replica, ReplicaNews(b"".join(prompt(0).hashes), b"", 1000))
    routed = [router.place(f"{number}", prompt(0)) for number in range(3 * num_replicas)]
    assert {one.why for one in routed} == {HIT}
    assert {load.num_open for load in router.ledger.loads} == {3}


def test_holders_of_a_prefix_are_compared_in_turn_where_there_are_many() -> None:
    num_replicas = 4 * MAX_CANDIDATES
    router = router_of(num_replicas=num_replicas)
    for replica in range(num_replicas):
        if replica % 2:
            router.on_news(replica, ReplicaNews(b"".join(prompt(0).hashes), b"", 1000))
    for number in range(4 * num_replicas):
        router.place(f"{number}", prompt(0))
    loads = [load.num_open for load in router.ledger.loads[1::2]]
    assert max(loads) - min(loads) <= 4


def test_a_replica_with_far_more_choices_than_the_others_gives_a_prefix_away_earlier() -> None:
    router = router_of(num_replicas=20)
    long = prompt(0, 40 * BLOCK + 1)
    home = run(router, "first", long)
    bound = OVERLOAD_MARGIN + 1
    while router.choose(long).replica == home:
        router.count(f"load-{router.ledger.num_open}", home, Prompt(0, []))
        assert router.ledger.num_open < UNCACHED_WEIGHT * 40 * BLOCK // ROW_TOKENS // 4
    assert router.ledger.num_open > bound
    routed = router.place("next", long)
    assert (routed.why, routed.num_cached) == (SPILL, 0)


def test_replicas_that_are_not_there_make_the_others_not_overloaded() -> None:
    router = router_of(num_replicas=20)
    for replica in range(2, 20):
        router.set_up(replica, False)
    home = run(router, "first", prompt(0))
    for number in range(10):
        router.count(f"load-{number}", home, Prompt(0, []))
        router.count(f"other-{number}", 1 - home, Prompt(0, []))
    router.count("one more", home, Prompt(0, []))
    assert router.choose(prompt(0)) == (home, 4 * BLOCK, HIT)


def test_evicted_blocks_and_those_of_a_replica_that_begins_anew_do_not_count() -> None:
    router = router_of()
    known = b"".join(prompt(0).hashes)
    router.on_news(2, ReplicaNews(known, b"", 1000))
    router.on_news(2, ReplicaNews(b"", b"".join(prompt(0).hashes[2:]), 1000))
    assert router.choose(prompt(0)) == (2, 2 * BLOCK, HIT)
    router.on_news(2, ReplicaNews(b"", b"", 1000, restates=True))
    assert router.choose(prompt(0)).why == LEAST
    assert len(router.index) == 0


def test_an_expected_block_that_is_not_reported_is_forgotten_at_the_first_token() -> None:
    router = router_of()
    replica = router.place("a", prompt(0)).replica
    router.on_news(replica, ReplicaNews(b"".join(prompt(0).hashes[:1]), b"", 1000))
    router.on_start("a", 0)
    assert router.index.num_expected == 0
    assert len(router.index.match(prompt(0).hashes)) == 1


def test_least_loaded_counts_prompts_and_choices_and_equal_replicas_have_turns() -> None:
    router = router_of(BY_LOAD)
    assert sorted(router.place(f"{n}", Prompt(100, [])).replica for n in range(3)) == [0, 1, 2]
    router.count("long", 0, Prompt(1000, []))
    router.count("many", 1, Prompt(10, [], num_choices=50))
    assert router.place("next", Prompt(1, [])).replica == 2


def test_a_replica_that_takes_no_requests_gets_none() -> None:
    for method in LOAD_BALANCE_METHODS:
        router = router_of(method)
        home = run(router, "first", prompt(0))
        router.set_up(home, False)
        placed = {router.place(f"{n}", prompt(0)).replica for n in range(99)}
        assert placed == {0, 1, 2} - {home}
        router.set_up(home, True)
        assert home in {router.place(f"again-{n}", prompt(n)).replica for n in range(9)}
        for replica in range(3):
            router.set_up(replica, False)
        assert not router.has_replica


def test_a_full_queue_takes_no_request_as_long_as_another_has_room() -> None:
    router = router_of(BY_LOAD, 2, max_waiting=2)
    router.count("heavy", 1, Prompt(10_000, []))
    assert [router.place(f"{n}", Prompt(1, [])).replica for n in range(3)] == [0, 0, 1]


def test_a_replica_without_free_pages_costs_more() -> None:
    router = router_of()
    for replica in range(3):
        router.on_news(replica, ReplicaNews(b"".join(prompt(0).hashes[:2]), b"", 1000))
    router.on_news(1, ReplicaNews(b"", b"", 1))
    router.on_news(2, ReplicaNews(b"", b"", 1))
    assert {router.choose(prompt(0)).replica for _ in range(9)} == {0}


def test_round_robin_takes_turns() -> None:
    router = router_of(IN_TURN)
    turns = [router.place(f"{n}", prompt(0)).replica for n in range(6)]
    assert turns[:3] == turns[3:]
    assert sorted(turns[:3]) == [0, 1, 2]


def test_the_index_is_bounded_and_keeps_what_was_matched_last() -> None:
    index = PageIndex[str](max_blocks=4)
    first, second = prompt(0, 2 * BLOCK + 1).hashes, prompt(500, 2 * BLOCK + 1).hashes
    index.report(0, first, [])
    index.report(1, second, [])
    assert index.match(first) == [1, 1]
    index.report(0, prompt(900, 2 * BLOCK + 1).hashes, [])
    assert len(index) == 4
    assert index.match(first) == [1, 1]
    assert index.match(second) == []


actions = st.lists(
    st.tuples(
        st.sampled_from(["place", "start", "end", "forget", "news", "restate", "down", "up"]),
        st.integers(0, 7),
        st.integers(0, 2),
    ),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(actions, st.sampled_from(LOAD_BALANCE_METHODS))
def test_whatever_happens_an_idle_router_counts_nothing(
    happened: list[tuple[str, int, int]], method: str
) -> None:
    router = router_of(method)
    for what, number, place in happened:
        key, asked = f"{number}", prompt(100 * (number % 3), num_choices=1 + number % 3)
        match what:
            case "place" if router.has_replica:
                routed = router.place(key, asked)
                assert 0 <= routed.num_cached < asked.num_tokens
            case "start":
                router.on_start(key, place)
            case "end":
                router.on_end(key, place)
            case "forget":
                router.forget(key)
            case "news":
                router.on_news(place, ReplicaNews(b"".join(asked.hashes), b"", number))
            case "restate":
                router.on_news(place, ReplicaNews(restates=True))
            case "down" | "up":
                router.set_up(place, what == "up")
        for load in router.ledger.loads:
            assert load.num_open >= load.num_waiting >= 0
            assert load.num_prefill_tokens >= 0
    for number in range(8):
        router.forget(f"{number}")
    assert router.ledger.costs == [0.0, 0.0, 0.0]
    assert router.index.num_expected == 0
    for load in router.ledger.loads:
        assert (load.num_open, load.num_waiting, load.num_prefill_tokens) == (0, 0, 0)


def test_a_choice_that_was_not_counted_when_its_request_was_opened_changes_nothing() -> None:
    ledger = Ledger[str](1, 100)
    ledger.open("a", 0, 200, 1)
    assert ledger.start("a", 0)
    assert not ledger.start("a", 1)
    assert ledger.loads[0].num_waiting == 0


def test_a_request_of_several_choices_is_open_until_the_last_one_has_ended() -> None:
    ledger = Ledger[str](1, 100)
    ledger.open("a", 0, 200, 3)
    assert ledger.start("a", 1)
    assert not ledger.start("a", 0)
    assert ledger.costs == [3 * ROW_TOKENS]
    for index in (2, 1, 1, 2):
        ledger.end("a", index)
    assert "a" in ledger
    ledger.end("a", 0)
    assert "a" not in ledger
    assert ledger.costs == [0.0]
