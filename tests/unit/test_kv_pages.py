"""The page pool: no page is lost, none is given out twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_proc.kv_pages import PagePool


@given(st.integers(0, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_any_order_of_taking_and_giving_back_keeps_every_page(
    num_pages: int, moves: list[tuple[bool, int]]
) -> None:
    pool = PagePool(num_pages, page_size=4)
    holders: list[list[int]] = []
    for take, number in moves:
        if take and number <= pool.num_free:
            holders.append(pool.take(number))
        elif holders:
            pool.give_back(holders.pop(number % len(holders)))
        pool.check()
        held = [page for pages in holders for page in pages]
        assert len(set(held)) == len(held) == pool.num_held
        assert all(0 <= page < num_pages for page in held)


def test_more_pages_than_are_free_are_an_error_and_take_nothing() -> None:
    pool = PagePool(3, page_size=4)
    with pytest.raises(ValueError, match="4 pages asked for, 3 are free"):
        pool.take(4)
    assert pool.num_free == 3


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_tokens_are_rounded_up_to_whole_pages(tokens: int, pages: int) -> None:
    assert PagePool(10, page_size=4).pages_for(tokens) == pages


def test_a_page_given_back_twice_is_found() -> None:
    pool = PagePool(3, page_size=4)
    pages = pool.take(2)
    pool.give_back(pages)
    pool.give_back(pages)
    with pytest.raises(AssertionError):
        pool.check()
