"""Cached prefixes that requests ask to keep: their time, their share, and what goes first."""

import random

import pytest

from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.cache import CacheHint
from scheduler_proc.state.kv_cache import KVCache, PinLimits
from scheduler_proc.state.pins import PinStats
from tests.unit.scheduler.requests import request_of_tokens
from tests.unit.simulation import World, submit

PAGE = 2
NOW = 1000.0


def pool(num_pages: int = 16, fraction: float = 0.5) -> KVCache:
    kv = KVCache(num_pages, PAGE, limits=PinLimits(fraction, PinStats()))
    kv.pins.advance(NOW)
    return kv


def finish(
    kv: KVCache,
    tokens: list[int],
    key: str | None = "k",
    ttl_s: float = 300.0,
    tenant: str = "",
    weight: float = 1.0,
    num_tokens: int = 0,
) -> int:
    """Run a request of these tokens to its end. Return how many of them were cached.

    key: None: it asks for nothing.
    """
    request = request_of_tokens(tokens, 0)
    request.cache = None if key is None else CacheHint(key, ttl_s, num_tokens)
    request.tenant, request.weight = tenant, weight
    kv.allocate(request)
    num_cached = request.num_computed_tokens
    request.num_computed_tokens = request.num_known_tokens
    kv.keep(request)
    kv.release(request)
    kv.check([])
    return num_cached


def fill(kv: KVCache, first: int = 1000) -> None:
    """Use the whole pool for other requests."""
    for number in range(kv.num_pages):
        finish(kv, [first + 2 * number, first + 2 * number + 1], None)


def cached(kv: KVCache, tokens: list[int]) -> int:
    """Return how many tokens of a prompt are cached, without using them."""
    return kv.num_cached_tokens(request_of_tokens([*tokens, 0], 1))


def test_what_a_request_asks_to_keep_stays_while_others_fill_the_pool() -> None:
    kv = pool()
    finish(kv, [1, 2, 3, 4])
    finish(kv, [5, 6, 7, 8], None)
    fill(kv)
    assert (cached(kv, [1, 2, 3, 4]), cached(kv, [5, 6, 7, 8])) == (4, 0)
    assert kv.num_available == kv.num_pages


def test_the_time_counts_from_the_last_use() -> None:
    kv = pool()
    finish(kv, [1, 2, 3, 4], ttl_s=10)
    kv.pins.advance(NOW + 9)
    finish(kv, [1, 2, 3, 4, 9], None)  # uses it
    kv.pins.advance(NOW + 18)
    fill(kv)
    assert cached(kv, [1, 2, 3, 4]) == 4
    kv.pins.advance(NOW + 19)
    kv.check([])
    assert kv.pins.stats.expired == 1
    fill(kv, 3000)
    assert cached(kv, [1, 2, 3, 4]) == 0


def test_a_request_that_shares_only_a_beginning_does_not_use_the_rest() -> None:
    kv = pool()
    finish(kv, [1, 2, 3, 4, 5, 6, 7, 8], ttl_s=10)
    kv.pins.advance(NOW + 9)
    finish(kv, [1, 2, 99, 99], None)
    kv.pins.advance(NOW + 10)
    assert len(kv.pins) == 0


def test_the_next_turn_replaces_the_pin_of_the_last_one() -> None:
    kv = pool()
    finish(kv, [1, 2, 3, 4])
    finish(kv, [1, 2, 3, 4, 5, 6])
    assert (len(kv.pins), kv.pins.num_pages) == (1, 3)
    finish(kv, [1, 2, 3, 4, 7, 8], "other")
    assert (len(kv.pins), kv.pins.num_pages) == (2, 4)


def test_beyond_the_share_the_least_recently_used_goes_first_from_its_end() -> None:
    kv = pool(16, 0.25)
    finish(kv, [1, 2, 3, 4, 5, 6], "a")
    finish(kv, [11, 12, 13, 14], "b")
    assert (kv.pins.num_pages, kv.pins.stats.over_limit) == (4, 1)
    fill(kv)
    assert (cached(kv, [1, 2, 3, 4, 5, 6]), cached(kv, [11, 12, 13, 14])) == (4, 4)
    finish(kv, list(range(100, 120)), "c")
    fill(kv)
    assert cached(kv, list(range(100, 120))) == 8  # as much as the share holds
    assert len(kv.pins) == 1


def test_a_hint_may_keep_the_first_tokens_of_a_prompt_only() -> None:
    kv = pool()
    finish(kv, [1, 2, 3, 4, 5, 6, 7, 8], num_tokens=5)
    assert kv.pins.num_pages == 2, "two whole pages"
    finish(kv, [11, 12, 13, 14], num_tokens=1)
    assert len(kv.pins) == 1, "no whole page"
    fill(kv)
    assert cached(kv, [1, 2, 3, 4, 5, 6, 7, 8]) == 4
    kv.pins.advance(NOW + 299)
    finish(kv, [1, 2, 3, 4, 99, 98], None)  # goes on behind what is kept, and so uses it
    kv.pins.advance(NOW + 301)
    assert len(kv.pins) == 1


def tokens_of(number: int, num_pages: int) -> list[int]:
    return [1000 * number + place for place in range(num_pages * PAGE)]


def pages_of(kv: KVCache, tenant: str) -> int:
    """Return the number of pages that stay of a tenant, of those of all its numbers."""
    return len(kv.pins._tenants[tenant].nodes) if tenant in kv.pins._tenants else 0


def test_a_tenant_alone_may_have_the_whole_share_and_gives_half_of_it_to_a_second_one() -> None:
    kv = pool(32, 0.5)  # 16 pages
    for number in range(4):
        finish(kv, tokens_of(number, 4), f"k{number}", tenant="hog")
    assert pages_of(kv, "hog") == 16
    for number in range(4, 10):
        finish(kv, tokens_of(number, 2), f"k{number}", tenant="late/user")
    assert (pages_of(kv, "hog"), pages_of(kv, "late")) == (8, 8)
    for number in range(10, 30):
        finish(kv, tokens_of(number, 4), f"k{number}", tenant="hog")
    assert (pages_of(kv, "hog"), pages_of(kv, "late")) == (8, 8), "its newer pins took its own"
    assert cached(kv, tokens_of(9, 2)) == 4


def test_what_a_tenant_does_not_want_is_left_to_the_others() -> None:
    kv = pool(32, 0.5)
    finish(kv, tokens_of(1, 2), "a", tenant="small")
    for number in range(2, 12):
        finish(kv, tokens_of(number, 4), f"k{number}", tenant="hog")
    assert (pages_of(kv, "small"), pages_of(kv, "hog")) == (2, 14)


def test_shares_are_by_weights() -> None:
    kv = pool(32, 0.5)
    for number in range(12):
        finish(kv, tokens_of(number, 2), f"k{number}", tenant="one", weight=1.0)
        finish(kv, tokens_of(100 + number, 2), f"k{number}", tenant="three", weight=3.0)
    assert (pages_of(kv, "one"), pages_of(kv, "three")) == (4, 12)


def test_pages_that_two_tenants_share_count_for_both_and_stay_for_the_one_that_keeps_them() -> None:
    kv = pool(32, 0.5)
    for tenant in ("a", "b"):
        finish(kv, tokens_of(1, 8), tenant=tenant)
    assert (pages_of(kv, "a"), pages_of(kv, "b"), kv.pins.num_pages) == (8, 8, 8)
    finish(kv, tokens_of(2, 12), "more", tenant="a")
    assert pages_of(kv, "b") == 8
    assert cached(kv, tokens_of(1, 8)) == 16


def test_random_pins_of_tenants_stay_within_their_bounds() -> None:
    source = random.Random(1)
    kv = pool(64, 0.5)
    weights = {"a": 1.0, "b": 2.0, "c": 0.5}
    for number in range(600):
        tenant = source.choice(list(weights))
        tokens = tokens_of(source.randrange(8), source.randint(1, 6))
        key = source.choice([None, "k", f"k{number % 5}"])
        finish(kv, tokens, key, source.choice([1, 50]), tenant, weights[tenant])
        kv.pins.advance(NOW + number)
        if number % 97 == 0:
            kv.pins.release(tenant, None)
        kv.check([])
    kv.pins.advance(NOW + 10_000)
    assert not kv.pins._tenants


@pytest.mark.parametrize("plan_at_once", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_every_request_is_kept_at_its_end(plan_at_once: bool, num_tokens: int) -> None:
    world = World(SchedulerArgs(plan_at_once=plan_at_once), num_pages=64, page_size=4)
    for number in range(3):
        prompt = [100 * number + 5 + n for n in range(8)]
        world.send(submit(f"r{number}", prompt, num_tokens, cache=CacheHint(f"k{number}", 60.0)))
        world.run(100)
    info = world.scheduler.info()
    assert info["cache_pins"] == 3
    assert info["cache_pinned_pages"] == 3 * ((8 + num_tokens - 1) // 4)


def test_without_a_share_nothing_is_kept() -> None:
    kv = pool(16, 0.0)
    finish(kv, [1, 2, 3, 4])
    assert len(kv.pins) == 0


def test_a_pin_gives_way_where_a_request_needs_the_page() -> None:
    kv = pool(8, 1.0)
    finish(kv, [1, 2, 3, 4], "old")
    finish(kv, [11, 12, 13, 14], "new")
    request = request_of_tokens(list(range(100, 111)), 2)  # 6 pages of 8, of which 4 are pinned
    assert kv.pages_needed(request) <= kv.num_available
    kv.allocate(request)
    kv.check([request])
    assert kv.pins.stats.gave_way == 2
    assert (cached(kv, [1, 2, 3, 4]), cached(kv, [11, 12, 13, 14])) == (0, 4)
    kv.append_page(request)
    kv.append_page(request)
    kv.check([request])
    assert (len(kv.pins), kv.pins.stats.gave_way) == (0, 4)


def test_a_release_is_of_a_tenant_and_a_key() -> None:
    kv = pool()
    finish(kv, [1, 2, 3, 4], "a", tenant="bob")
    finish(kv, [11, 12, 13, 14], "b", tenant="bob/user")
    finish(kv, [21, 22, 23, 24], "a", tenant="eve")
    assert kv.pins.release("bob", "none") == 0
    assert kv.pins.release("bob", "a") == 1
    assert kv.pins.release("bob", None) == 1
    assert (len(kv.pins), kv.pins.stats.released) == (1, 2)
    fill(kv)
    assert (cached(kv, [1, 2, 3, 4]), cached(kv, [21, 22, 23, 24])) == (0, 4)


def test_a_flush_frees_what_is_kept_too() -> None:
    kv = pool()
    finish(kv, [1, 2, 3, 4])
    kv.flush()
    kv.check([])
    assert (kv.num_free, len(kv.pins)) == (kv.num_pages, 0)


def test_pages_that_are_not_finite_lose_their_pin() -> None:
    kv = pool()
    finish(kv, [1, 2, 3, 4])
    finish(kv, [1, 2, 8, 8], "other")
    again = request_of_tokens([1, 2, 3, 4, 5], 1)
    kv.allocate(again)
    kv.withdraw(again, 2)
    kv.check([again])
    assert len(kv.pins) == 1
    kv.release(again)
    kv.check([])


def test_many_keys_of_one_prompt_are_bounded() -> None:
    kv = pool(8)
    for number in range(100):
        finish(kv, [1, 2, 3, 4], f"key {number}")
    assert len(kv.pins) <= kv.pins.max_pages
    assert len(kv.pins._deadlines) <= 2 * kv.pins.max_pages + 65
