"""The report of a prefix tree's blocks, compared with the tree itself."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.server.prefix_blocks import block_hashes, pages_per_block, split_hashes
from scheduler_proc.observe.replica_report import PageChanges
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.window import make_kv_cache
from tests.unit.scheduler.requests import request_of_tokens

PAGE = 32
BLOCK = PAGE * pages_per_block(PAGE)


def watched(kv: KVCache) -> PageChanges:
    changes = PageChanges(PAGE)
    kv.tree.observers.append(changes)
    return changes


def compute(kv: KVCache, tokens: list[int]) -> None:
    request = request_of_tokens(tokens)
    kv.allocate(request)
    request.num_computed_tokens = request.num_known_tokens
    kv.cache_computed(request)
    kv.release(request)


def tokens_of(group: int, num_tokens: int) -> list[int]:
    return [100 * group + n % 7 for n in range(num_tokens)]


def packed(tokens: list[int]) -> bytes:
    return request_of_tokens(tokens).tokens.tobytes()


def test_blocks_are_reported_with_the_hashes_that_the_frontend_computes() -> None:
    kv = KVCache(16, PAGE)
    changes = watched(kv)
    tokens = tokens_of(1, 3 * BLOCK + 1)
    compute(kv, tokens)
    added, evicted = changes.take()
    assert list(split_hashes(added)) == block_hashes(packed(tokens), BLOCK)
    assert evicted == b""
    assert changes.take() == (b"", b"")
    kv.flush()
    assert set(split_hashes(changes.take()[1])) == set(split_hashes(added))


def test_a_restated_report_has_every_block() -> None:
    kv = KVCache(16, PAGE)
    changes = watched(kv)
    for group in (1, 2):
        compute(kv, tokens_of(group, 2 * BLOCK + 1))
    changes.take()
    changes.restate()
    assert len(list(split_hashes(changes.take()[0]))) == 4


@pytest.mark.parametrize("window", [0, 2 * PAGE])
@settings(max_examples=60, deadline=None)
@given(runs=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4 * BLOCK)), max_size=25))
def test_the_reports_together_say_what_the_tree_holds(
    window: int, runs: list[tuple[int, int]]
) -> None:
    kv = make_kv_cache(12, PAGE, window, 0, prefix_cache=True)
    changes = watched(kv)
    known: set[bytes] = set()
    for group, num_tokens in runs:
        compute(kv, tokens_of(group, num_tokens))
        added, evicted = changes.take()
        known |= set(split_hashes(added))
        known -= set(split_hashes(evicted))
    ends = [n for n in kv.tree.nodes() if n.page >= 0 and n.depth % pages_per_block(PAGE) == 0]
    assert len(known) == len(ends)
    for group in range(5):
        hashes = block_hashes(packed(tokens_of(group, 4 * BLOCK + 1)), BLOCK)
        matched = kv.match_prefix(request_of_tokens(tokens_of(group, 4 * BLOCK + 1)))
        if not window:
            num_known = sum(block in known for block in hashes)
            assert num_known == matched.depth // pages_per_block(PAGE)
