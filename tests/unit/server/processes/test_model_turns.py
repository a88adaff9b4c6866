"""Which model is loaded, suspended and unloaded, in a time that the test sets."""

import math
import random
from itertools import pairwise

import pytest

from quadriga.server.processes.model_turns import (
    FAILED_FOR_S,
    LOADS_PER_TURN,
    ModelState,
    ModelTurns,
    ModelUse,
)

GB = 1 << 30
LOAD_S = 2.0


class Host:
    """Carries decisions out, each load in LOAD_S and each unload at once."""

    def __init__(self, turns: ModelTurns) -> None:
        self.turns, self.now = turns, 0.0
        self.loads: list[tuple[float, str]] = []
        self.ready_at = 0.0
        self.loading = ""

    def run(self, until: float, step: float = 0.25) -> None:
        while self.now < until:
            self.act()
            self.now += step

    def act(self) -> None:
        turns = self.turns
        turns.retry_failed(self.now)
        if self.loading and self.now >= self.ready_at:
            turns.on_state(self.loading, ModelState.LOADED, self.now)
            self.loading = ""
        if (name := turns.to_unload(self.now)) is not None:
            turns.on_state(name, ModelState.UNLOADED, self.now)
        if (name := turns.to_load()) is not None:
            turns.on_state(name, ModelState.LOADING, self.now)
            self.loads.append((self.now, name))
            self.loading, self.ready_at = name, self.now + LOAD_S

    @property
    def loaded(self) -> set[str]:
        models = self.turns.models.items()
        return {name for name, model in models if model.state is ModelState.LOADED}


def host(budget: int | None, turn_s: float = 60.0, **models: ModelUse) -> Host:
    return Host(ModelTurns(models, budget, turn_s))


def test_a_model_is_loaded_when_a_request_waits_for_it() -> None:
    one = host(None, a=ModelUse(GB), b=ModelUse(GB))
    one.run(5)
    assert one.loaded == set()
    one.turns.on_open("b", 1, one.now)
    one.run(10)
    assert one.loaded == {"b"}


def test_the_idle_model_that_was_used_least_lately_makes_room() -> None:
    one = host(2 * GB, a=ModelUse(GB), b=ModelUse(GB), c=ModelUse(GB))
    for name in ("a", "b", "c"):
        one.turns.on_open(name, 1, one.now)
        one.run(one.now + 5)
        one.turns.on_open(name, 0, one.now)
    assert [name for _, name in one.loads] == ["a", "b", "c"]
    assert one.loaded == {"b", "c"}
    one.turns.on_open("b", 1, one.now)
    one.turns.on_open("a", 1, one.now)
    one.run(one.now + 5)
    assert one.loaded == {"a", "b"}, "the busy one stays"


def test_busy_models_take_turns_that_are_long_against_loads_and_bounded() -> None:
    for longest_s in (60.0, 5.0):
        one = host(GB, longest_s, a=ModelUse(GB), b=ModelUse(GB))
        one.turns.on_open("a", 9, 0.0)
        one.run(10)
        one.turns.on_open("b", 9, one.now)
        one.run(200)
        times = [time for time, _ in one.loads[2:]]
        turns = [later - earlier - LOAD_S for earlier, later in pairwise(times)]
        expected = min(longest_s, LOADS_PER_TURN * 2 * LOAD_S)
        assert turns and all(abs(turn - expected) <= 0.5 for turn in turns)
        assert {name for _, name in one.loads} == {"a", "b"}


def test_a_turn_in_which_no_request_came_further_is_followed_by_longer_ones() -> None:
    one = host(GB, 5.0, a=ModelUse(GB), b=ModelUse(GB))
    one.turns.on_open("a", 1, 0.0)
    one.run(4)
    one.turns.on_open("b", 1, one.now)
    lengths = []
    for num_tokens in (0, 0, 7, 7):
        while "a" not in one.loaded:
            one.run(one.now + 0.25)
        began_at = one.turns.models["a"].changed_at
        while "a" in one.loaded:
            one.run(one.now + 0.25)
        lengths.append(one.turns.models["a"].changed_at - began_at)
        one.turns.on_turn_over("a", num_tokens)
    assert lengths == pytest.approx([5.0, 10.0, 20.0, 5.0], abs=0.5)


def test_a_turn_ends_early_where_the_busy_model_becomes_idle() -> None:
    one = host(GB, 1000.0, a=ModelUse(GB), b=ModelUse(GB))
    one.turns.on_open("a", 1, 0.0)
    one.run(4)
    one.turns.on_open("b", 1, one.now)
    one.run(6)
    assert one.loaded == {"a"}
    one.turns.on_open("a", 0, one.now)
    one.run(10)
    assert one.loaded == {"b"}


def test_a_pinned_model_stays_and_one_that_proved_larger_than_the_rest_has_its_turns() -> None:
    one = host(2 * GB, 5.0, a=ModelUse(GB, is_pinned=True), b=ModelUse(GB), c=ModelUse(2 * GB))
    one.turns.want("a", 0.0)
    one.run(5)
    one.turns.on_open("c", 1, one.now)
    one.turns.on_open("b", 1, one.now)
    one.run(60)
    loads = [name for _, name in one.loads]
    assert "a" in one.loaded and loads.count("a") == 1
    assert loads.count("b") > 1 and loads.count("c") > 1


def test_a_model_that_is_lost_leaves_its_memory_to_the_others() -> None:
    one = host(GB, a=ModelUse(GB, is_pinned=True), b=ModelUse(GB))
    one.turns.on_open("a", 1, 0.0)
    one.run(5)
    one.turns.on_open("b", 1, one.now)
    one.turns.forget("a")
    one.run(10)
    assert one.loaded == {"b"}


def test_a_model_without_requests_is_unloaded_after_its_time_and_not_before_its_first_one() -> None:
    one = host(None, a=ModelUse(GB, idle_unload_s=10.0))
    one.turns.want("a", 0.0)
    one.run(5)
    one.turns.on_open("a", 1, one.now)
    one.run(30)
    assert one.loaded == {"a"}
    one.turns.on_open("a", 0, one.now)
    assert one.turns.next_at() == pytest.approx(one.now + 10)
    one.run(39)
    assert one.loaded == {"a"}
    one.run(42)
    assert one.loaded == set()


def test_a_model_that_could_not_be_loaded_is_tried_again_after_a_while() -> None:
    one = host(None, a=ModelUse(GB))
    one.turns.on_open("a", 1, 0.0)
    one.act()
    one.loading = ""
    one.turns.on_state("a", ModelState.FAILED, one.now)
    one.run(FAILED_FOR_S - 1)
    assert len(one.loads) == 1
    one.run(FAILED_FOR_S + 5)
    assert one.loaded == {"a"}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_the_budget_holds_and_every_model_gets_its_turn(seed: int) -> None:
    rng = random.Random(seed)
    budget = 4 * GB
    models = {
        f"m{n}": ModelUse(rng.randint(1, 4) * GB, idle_unload_s=rng.choice([None, 3.0]))
        for n in range(rng.randint(2, 5))
    }
    one = Host(ModelTurns(models, budget, 10.0))
    waited_at: dict[str, float] = {}
    for _ in range(300):
        name = rng.choice(list(models))
        model = models[name]
        one.turns.on_open(name, rng.choice([0, 1, 5]), one.now)
        one.run(one.now + rng.choice([0.25, 1.0, 4.0]))
        used = sum(model.num_bytes for model in models.values() if model.takes_memory)
        assert used <= budget
        for other, model in models.items():
            if model.waits_since is None:
                waited_at.pop(other, None)
            else:
                waited_at.setdefault(other, one.now)
                bound = len(models) * (10.0 + 2 * LOAD_S) * 2
                assert one.now - waited_at[other] <= bound, "starved"


def test_a_client_keeps_a_model_for_longer_or_has_it_unloaded_until_it_is_unloaded() -> None:
    one = host(None, a=ModelUse(GB, idle_unload_s=5.0))
    turns = one.turns
    turns.want("a", 0.0)
    one.run(3)
    turns.keep("a", math.inf, one.now)
    assert turns.next_at() is None
    one.run(100)
    assert one.loaded == {"a"}
    turns.keep("a", 20.0, one.now)
    one.run(119)
    assert one.loaded == {"a"}
    one.run(122)
    assert one.loaded == set()
    turns.want("a", one.now)  # what the client has asked for is over
    one.run(126)
    assert one.loaded == {"a"} and turns.models["a"].idle_s == 5.0
    assert (turns.models["a"].num_loads, turns.models["a"].num_unloads) == (2, 1)
    turns.on_open("a", 1, one.now)
    turns.keep("a", 0.0, one.now)
    one.run(130)
    assert one.loaded == {"a"}
    turns.on_open("a", 0, one.now)
    one.act()
    assert one.loaded == set()


def test_a_suspended_model_stays_as_long_as_a_client_has_asked_for() -> None:
    one = host(GB, a=ModelUse(GB), b=ModelUse(GB))
    turns = one.turns
    turns.on_open("a", 1, 0.0)
    one.run(3)
    turns.keep("a", 7.0, one.now)
    turns.on_open("b", 1, one.now)
    one.run(40)
    assert one.loaded == {"b"}
    assert turns.models["a"].idle_s == 7.0


def test_a_pinned_model_is_not_unloaded_by_a_client() -> None:
    one = host(None, a=ModelUse(GB, is_pinned=True))
    one.turns.want("a", 0.0)
    one.run(3)
    one.turns.keep("a", 0.0, one.now)
    one.run(10)
    assert one.loaded == {"a"}
