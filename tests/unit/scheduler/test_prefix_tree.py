"""The prefix tree and the KV pages, compared with a model that searches."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.prefix_tree import Node, PrefixTree
from scheduler_proc.state.request import Request
from tests.unit.scheduler.requests import request_of_tokens

PAGE = 2


def run(kv: KVCache, tokens: list[int], seq: int = 0) -> Request:
    """Allocate pages to a request and compute its prompt."""
    request = request_of_tokens(tokens, seq)
    kv.allocate(request)
    request.num_computed_tokens = request.num_known_tokens
    kv.cache_computed(request)
    return request


def test_a_prompt_finds_the_whole_pages_of_an_equal_beginning_and_computes_at_least_one_token() -> (
    None
):
    kv = KVCache(16, PAGE)
    first = run(kv, [1, 2, 3, 4, 5])
    for tokens, found in (
        ([1, 2, 3, 4, 5], 4),
        ([1, 2, 3, 4], 2),
        ([1, 2, 3, 9, 9], 2),
        ([2, 1], 0),
        ([1], 0),
    ):
        other = run(kv, tokens)
        assert other.pages[: found // PAGE] == first.pages[: found // PAGE]
        assert len(set(other.pages) & set(first.pages)) == found // PAGE
        kv.release(other)
        kv.check([first])
    kv.release(first)
    kv.check([])


def test_pages_are_shared_while_their_owner_still_computes_and_outlive_it() -> None:
    kv = KVCache(8, PAGE)
    first, second = run(kv, [1, 2, 3, 4, 5], 0), run(kv, [1, 2, 3, 4, 6], 1)
    assert kv.num_held == 4
    kv.release(first)
    kv.check([second])
    assert second.pages[:2] == first.pages[:2] or first.pages == []
    assert kv.num_held == 3
    kv.release(second)
    assert kv.num_cached + kv.num_free == 8


def test_two_who_computed_the_same_at_the_same_time_keep_their_own_pages() -> None:
    kv = KVCache(8, PAGE)
    first, second = request_of_tokens([1, 2, 3, 4], 0), request_of_tokens([1, 2, 3, 4], 1)
    kv.allocate(first)
    kv.allocate(second)
    for request in (first, second):
        request.num_computed_tokens = 4
        kv.cache_computed(request)
    assert not set(first.pages) & set(second.pages)
    kv.check([first, second])
    kv.release(first)
    kv.check([second])
    kv.release(second)
    kv.check([])
    assert kv.num_cached == 2 and kv.num_free == 6


def test_sharing_what_is_cached_already_makes_no_page_less_available() -> None:
    kv = KVCache(6, PAGE)
    first, second = request_of_tokens([1, 2, 3, 4], 0), request_of_tokens([1, 2, 3, 4], 1)
    kv.allocate(first)
    kv.allocate(second)
    first.num_computed_tokens = second.num_computed_tokens = 4
    kv.release(first)
    available = kv.num_available
    kv.cache_computed(second)
    assert kv.num_available == available
    assert [node.page for node in second.prefix_path] == second.pages
    kv.check([second])


def test_pages_with_numbers_that_are_not_finite_are_found_by_no_other_request() -> None:
    kv = KVCache(9, PAGE)
    bad = request_of_tokens([1, 2, 3, 4, 5, 6, 7])
    kv.allocate(bad)
    bad.num_computed_tokens = 6
    kv.cache_computed(bad)
    other, waiting = (
        request_of_tokens([1, 2, 3, 4, 5, 6, 8], 1),
        request_of_tokens([1, 2, 3, 4, 5, 6, 9], 2),
    )
    kv.allocate(other)  # it has the page before the result is known
    assert kv.match_prefix(waiting).depth == 3
    kv.withdraw(bad, 3)
    assert kv.match_prefix(waiting).depth == 1
    bad.num_computed_tokens = other.num_computed_tokens = 7
    kv.release(bad)
    kv.check([other])
    again = request_of_tokens([1, 2, 3, 4, 5, 6, 7], 3)
    kv.allocate(again)
    assert again.num_computed_tokens == 2
    again.num_computed_tokens = 7
    kv.release(again)  # this time they are finite
    kv.release(other)
    assert kv.match_prefix(request_of_tokens([1, 2, 3, 4, 5, 6, 7, 8])).depth == 3
    kv.check([])
    kv.hold(request_of_tokens([0] * 18, 4), [], 9)  # all pages can be taken again


def test_the_least_recently_used_goes_first_and_leaves_before_what_they_hang_on() -> None:
    kv = KVCache(6, PAGE)
    kv.release(run(kv, [1, 2, 3, 4, 5]))
    kv.release(run(kv, [7, 8, 9, 10, 11]))
    kv.release(run(kv, [1, 2, 3, 4, 5]))  # used again
    taken = run(kv, [20, 21, 22, 23, 24, 25, 26])  # 4 pages, 2 are free
    waiting = request_of_tokens([1, 2, 3, 4, 5])
    assert kv.match_prefix(waiting).depth == 2
    assert kv.match_prefix(request_of_tokens([7, 8, 9])).depth == 0
    kv.release(taken)
    kv.check([])


def test_a_waiting_request_whose_prefix_was_evicted_starts_again_from_the_root() -> None:
    kv = KVCache(2, PAGE)
    kv.release(run(kv, [1, 2, 3]))
    waiting = request_of_tokens([1, 2, 3])
    assert kv.match_prefix(waiting).depth == 1
    other = run(kv, [5, 6, 7, 8])
    assert kv.match_prefix(waiting).depth == 0
    kv.release(other)


def test_without_the_cache_nothing_is_found_and_nothing_stays() -> None:
    kv = KVCache(4, PAGE, prefix_cache=False)
    kv.release(run(kv, [1, 2, 3, 4]))
    assert kv.num_free == 4
    assert kv.match_prefix(request_of_tokens([1, 2, 3, 4])).depth == 0


class TreeMachine(RuleBasedStateMachine):
    """Paths over two letters; a plain dictionary holds the last use of each node."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.held: list[list[Node]] = []
        self.last_use: dict[str, int] = {}
        self.clock = 0

    @rule(letters=st.text("ab", min_size=1, max_size=6))
    def use(self, letters: str) -> None:
        path: list[Node] = []
        node = self.tree.root
        for letter in letters:
            child = node.children.get(letter.encode())
            if child is None:
                child = self.tree.add(node, letter.encode(), 0)
            else:
                self.tree.lock(child)
            node = child
            path.append(node)
        assert node.path() == path
        self.held.append(path)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        path = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.tree.unlock(path)
        self.clock += 1
        for node in path:
            self.last_use[word(node)] = self.clock

    @precondition(lambda self: self.tree.num_unlocked)
    @rule()
    def evict(self) -> None:
        unused = [node for node in self.tree.nodes() if node.ref_count == 0]
        leaves = [node for node in unused if not node.children]
        oldest = min(self.last_use[word(leaf)] for leaf in leaves)
        allowed = {word(leaf) for leaf in leaves if self.last_use[word(leaf)] == oldest}
        before = {word(node) for node in self.tree.nodes()}
        self.tree.evict(1)
        gone = before - {word(node) for node in self.tree.nodes()}
        assert len(gone) == 1 and gone <= allowed

    @invariant()
    def it_holds_together(self) -> None:
        self.tree.check()
        for path in self.held:
            assert all(node.parent is not None and node.ref_count for node in path)


def word(node: Node) -> str:
    return b"".join(n.key for n in node.path()).decode()


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
