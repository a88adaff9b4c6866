"""The pages of a model in which every layer has a window.

The simulated worker checks that whatever a token sees is there, and is the request's own. Here it
is checked that no page is held beyond that, and that what was given back is found again.
"""

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quadriga.server.config.engine_args import SchedulerArgs
from scheduler_proc.state.prefix_tree import Node
from scheduler_proc.state.request import Request
from scheduler_proc.state.window import NO_PAGE, WindowedKVCache, make_kv_cache
from tests.unit.chaos import random_life
from tests.unit.scheduler.requests import request_of_tokens
from tests.unit.simulation import World, abort, reference, submit

PAGE_SIZE, WINDOW, CHUNK = 4, 10, 8
PAGE = 2
# Of the window, the chunk, and the begun pages at both ends.
MAX_PAGES = 3 + 2 + 1


def make_world(num_pages: int, window: int = WINDOW, **flags: Any) -> World:
    flags = {"chunked_prefill_size": CHUNK, **flags}
    return World(SchedulerArgs(**flags), num_pages, PAGE_SIZE, window=window)


def holders(world: World) -> list[Request]:
    return list(world.scheduler.lifecycle.core.admission.holders.values())


def most_held(world: World) -> int:
    return max((len(r.pages) - r.first_page for r in holders(world)), default=0)


def check_answers(world: World, prompts: dict[str, list[int]], max_new_tokens: int) -> None:
    for name, prompt in prompts.items():
        assert world.detok.tokens[name] == reference(prompt, max_new_tokens, True)
        assert world.detok.closed[name].finish_reason == "length"
    kv = world.scheduler.lifecycle.core.kv
    assert kv.num_free + kv.num_cached == kv.num_pages


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 13])
def test_lives_of_random_servers_with_a_window(window: int) -> None:
    for number in range(20):
        random_life(random.Random(f"{window}/{number}"), 100, window=window)


@pytest.mark.parametrize("seed", [948, 20208])
def test_a_request_between_two_pages_gets_its_next_one_before_others_are_admitted(
    seed: int,
) -> None:
    """In a pool of two pages, two requests retracted one another for ever."""
    random_life(random.Random(seed), 100, window=1)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_request_holds_the_pages_of_the_window_and_a_step_whatever_its_length(
    prefix_cache: bool,
) -> None:
    world = make_world(60, disable_radix_cache=not prefix_cache)
    prompt = [3 + i % 90 for i in range(100)]
    world.send(submit("a", prompt, 60, ignore_eos=True))
    most = 0
    while world.step():
        most = max(most, most_held(world))
    assert most <= MAX_PAGES
    check_answers(world, {"a": prompt}, 60)


@pytest.mark.parametrize("chunk", [1, CHUNK, -1])
@pytest.mark.parametrize("num_pages", [4, 5, 6, 7])
def test_a_prompt_longer_than_the_pool_is_computed_in_it(chunk: int, num_pages: int) -> None:
    world = make_world(num_pages, chunked_prefill_size=chunk)
    prompt = [3 + i % 90 for i in range(100)]
    world.send(submit("a", prompt, 30, ignore_eos=True), submit("b", prompt[:9], 30, b"c", True))
    world.run()
    check_answers(world, {"a": prompt, "b": prompt[:9]}, 30)


def test_a_prompt_is_refused_where_the_pool_does_not_hold_the_window_and_the_next_token() -> None:
    world = make_world(3)
    world.send(submit("a", [5] * 12, 1), submit("b", [5] * 13, 1))
    world.run()
    assert world.detok.closed["a"].finish_reason in ("length", "stop")
    assert world.detok.closed["b"].error is not None
    assert "the whole KV pool holds 12 tokens" in world.detok.closed["b"].error.message


def test_requests_run_together_that_would_not_fit_without_a_window() -> None:
    prompts = {f"r{i}": [3 + i] * 6 for i in range(8)}
    flags: dict[str, Any] = {"max_running_requests": 8, "schedule_conservativeness": 5.0}
    world, whole = make_world(40, **flags), make_world(40, window=0, **flags)
    most = []
    for server in (world, whole):
        server.send(*(submit(n, p, 50, ignore_eos=True) for n, p in prompts.items()))
        server.run()
        most.append(max(map(len, server.worker.rows_of_steps)))
        check_answers(server, prompts, 50)
    assert most[0] == 8 and most[1] < 4
    assert world.scheduler.info()["retractions"] == 0


def test_a_chat_continues_at_the_window_when_its_beginning_is_no_longer_cached() -> None:
    world = make_world(8)
    prompt = [3 + i % 90 for i in range(80)]
    world.send(submit("a", prompt, 8, ignore_eos=True))
    world.run()
    longer = prompt + world.detok.tokens["a"]
    world.send(submit("beginning", prompt[:9], 1), submit("b", [*longer, 5], 4, ignore_eos=True))
    world.run()
    assert world.detok.closed["beginning"].cached_tokens == 0
    assert world.detok.closed["b"].cached_tokens == 84
    assert world.detok.tokens["b"] == reference([*longer, 5], 4, True)


def test_a_beginning_that_was_given_back_serves_others_as_long_as_it_is_cached() -> None:
    world = make_world(60)
    prompt = [3 + i % 90 for i in range(80)]
    world.send(submit("a", prompt, 40, ignore_eos=True))
    while not holders(world) or holders(world)[0].first_page < 10:
        world.step()
    world.send(submit("b", [*prompt[:22], 3], 4, ignore_eos=True))
    world.run()
    assert world.detok.closed["b"].cached_tokens == 20
    check_answers(world, {"a": prompt}, 40)


def test_an_aborted_or_lost_request_leaves_no_page_behind() -> None:
    world = make_world(12)
    prompt = [3 + i % 90 for i in range(60)]
    world.send(submit("a", prompt, 40, ignore_eos=True), submit("b", prompt, 40, b"d", True))
    for _ in range(12):
        world.step()
    world.restart_worker()
    for _ in range(12):
        world.step()
    world.send(abort("a"))
    world.run()
    check_answers(world, {"b": prompt}, 40)


# --- the pool against a search --------------------------------------------------------------------


class WindowMachine(RuleBasedStateMachine):
    """Sequences over two tokens in a small pool; a match is compared with a search."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = make_kv_cache(7, PAGE, 4, 4, True)
        self.running: list[Request] = []
        self.contents: dict[int, list[int]] = {}  # the tokens up to the end of each page

    @precondition(lambda self: len(self.running) < 3)
    @rule(length=st.integers(0, 20), tail=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3))
    def admit(self, length: int, tail: list[int]) -> None:
        tokens = [1] * length + tail
        request = request_of_tokens(tokens)
        node = self.kv.match_prefix(request)
        assert node.depth == self.deepest(tokens)
        available = self.kv.num_available
        needed = self.kv.pages_needed(request)
        if needed <= available:
            self.kv.allocate(request)
            assert self.kv.num_available == available - needed
            self.read(request)
            self.running.append(request)

    def deepest(self, tokens: list[int]) -> int:
        """Search the longest whole pages after which the window of 4 tokens is cached."""
        path: list[Node] = [self.kv.tree.root]
        for begin in range(0, len(tokens) - 1, PAGE):
            key = request_of_tokens(tokens[begin : begin + PAGE]).tokens.tobytes()
            if begin + PAGE >= len(tokens) or key not in path[-1].children:
                break
            path.append(path[-1].children[key])
        is_cached = [node.page != NO_PAGE for node in path[1:]]
        return max(d for d in range(len(path)) if all(is_cached[max(0, d - 2) : d]))

    def read(self, request: Request) -> None:
        """Check that the pages hold what the next token sees."""
        computed = request.num_computed_tokens
        for page in range(max(0, computed - 3) // PAGE, computed // PAGE):
            end = (page + 1) * PAGE
            assert self.contents[request.pages[page]] == request.tokens[:end].tolist()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """Compute a prompt up to its end, as far as there are pages."""
        request = data.draw(st.sampled_from(self.running))
        while request.num_uncomputed_tokens:
            self.kv.release_unseen([request])
            self.read(request)
            if request.num_computed_tokens == request.page_capacity:
                if self.kv.num_available == 0:
                    return
                self.kv.append_page(request)
            self.compute_pages(request)

    def compute_pages(self, request: Request) -> None:
        first = request.num_computed_tokens // PAGE
        request.num_computed_tokens = min(request.num_known_tokens, request.page_capacity)
        for page in range(first, request.num_computed_tokens // PAGE):
            self.contents[request.pages[page]] = request.tokens[: (page + 1) * PAGE].tolist()
        self.kv.cache_computed(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.kv.release(request)

    @rule()
    def flush(self) -> None:
        self.kv.flush()

    @invariant()
    def no_page_is_lost(self) -> None:
        self.kv.check(self.running)

    def teardown(self) -> None:
        for request in self.running:
            self.kv.release(request)
        self.kv.check([])
        assert self.kv.num_held == 0


TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_without_a_window_the_pool_is_the_plain_one() -> None:
    assert not isinstance(make_kv_cache(8, PAGE, 0, 4, True), WindowedKVCache)
