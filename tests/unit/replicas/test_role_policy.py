"""Roles of replicas that follow the load."""

import itertools
import math
import random

import pytest

from quadriga.server.config.engine_args import AUTO, BY_CACHE, SchedulerArgs
from quadriga.wire.to_detok import PromptWork, ReplicaNews
from tokenizer_proc.replicas.role_policy import HOLD_S, INTERVAL_S, FollowPrompts, RoleLoad
from tokenizer_proc.replicas.roles import RoleRouter, roles_of
from tokenizer_proc.replicas.router import Prompt

TOKEN_S, PAGE = 2e-5, 16
SHORTEST_S = 0.006


class Load:
    """A load that keeps so many replicas busy with prompts, beside streams.

    Args:
        num_replicas: number of all replicas.
        target_s: --itl-target, in seconds.
        page_s: seconds in which a page moves.
        rows_s: what the rows of a step add to it where all replicas have streams.
    """

    def __init__(
        self,
        num_replicas: int = 8,
        target_s: float | None = 0.020,
        page_s: float = 0.0,
        rows_s: float = 0.003,
    ) -> None:
        self.policy = FollowPrompts(num_replicas, target_s)
        self.num_replicas, self.rows_s = num_replicas, rows_s
        self.now, self.prompt_s, self.page_s = 0.0, 0.0, page_s
        self.num_rows, self.sum_s, self.num = 0, 0.0, 0

    def run(self, num_busy: float, seconds: float, num_waiting_tokens: int = 0) -> list[int]:
        """Return the decisions of these seconds, in which so many tokens wait."""
        found = []
        for _ in range(round(seconds / INTERVAL_S)):
            self.now += INTERVAL_S
            self.prompt_s += num_busy * INTERVAL_S
            share = self.num_replicas / (self.num_replicas - self.num)
            self.num_rows += 1000
            self.sum_s += 1000 * (SHORTEST_S + share * self.rows_s)
            load = RoleLoad(
                self.prompt_s,
                int(self.prompt_s / TOKEN_S),
                PAGE,
                self.page_s,
                num_rows=self.num_rows,
                rows_s=self.sum_s,
                shortest_s=SHORTEST_S,
                num_waiting_tokens=num_waiting_tokens,
            )
            self.num = self.policy.decide(load, self.now)
            found.append(self.num)
        return found


def changes(found: list[int]) -> int:
    return sum(a != b for a, b in itertools.pairwise(found))


def test_all_are_mixed_at_first_and_without_prompts() -> None:
    for target_s in (0.020, None):
        assert set(Load(target_s=target_s).run(0.0, 30)) == {0}
        assert set(Load(target_s=target_s).run(0.2, 30)) == {0}


@pytest.mark.parametrize(("num_busy", "expected"), [(0.5, 1), (2.0, 4), (8.0, 5)])
def test_without_a_target_as_many_as_prompts_keep_busy_times_a_factor(
    num_busy: float, expected: int
) -> None:
    assert Load(target_s=None).run(num_busy, 60)[-1] == expected


@pytest.mark.parametrize(("num_busy", "rows_s", "target_s", "least", "most"), [
    (2.0, 0.003, 0.020, 0, 0),  # steps have room for all prompts
    (4.0, 0.003, 0.020, 1, 5),  # they have not
    (2.0, 0.002, 0.011, 1, 3),  # a target hardly longer than a step: no room, but many streams
    (1.0, 0.008, 0.016, 1, 2),  # streams need nearly every replica
])  # fmt: skip
def test_prompts_have_as_many_as_streams_can_spare_and_no_more_than_they_need(
    num_busy: float, rows_s: float, target_s: float, least: int, most: int
) -> None:
    found = Load(target_s=target_s, rows_s=rows_s).run(num_busy, 60)
    assert least <= found[-1] <= most
    assert len(set(found[20:])) == 1, "the number moves by itself"


@pytest.mark.parametrize("target_s", [0.010, 0.014, 0.030])
def test_more_prompts_never_have_fewer_replicas(target_s: float) -> None:
    found = [Load(target_s=target_s).run(num_busy, 60)[-1] for num_busy in (0.5, 1, 2, 4, 6)]
    assert found == sorted(found)


def test_many_replicas_need_less_in_reserve_and_stay_mixed_for_longer() -> None:
    assert Load(8).run(0.37 * 8, 60)[-1] > 0
    assert Load(64).run(0.37 * 64, 60)[-1] == 0
    assert Load(64).run(0.55 * 64, 60)[-1] > 0


def test_prompts_that_wait_count_where_replicas_compute_as_many_as_they_can() -> None:
    without, load = Load(target_s=0.014), Load(target_s=0.014)
    tokens = int(10 / TOKEN_S)  # ten seconds of one replica
    assert load.run(2.0, 60, tokens)[-1] > without.run(2.0, 60)[-1]


def test_the_number_follows_the_load_up_and_down() -> None:
    load = Load()
    assert load.run(6.0, 60)[-1] >= 3
    assert load.run(0.0, 120)[-1] == 0


def test_one_replica_is_always_left_for_tokens() -> None:
    for num_replicas in (2, 3, 64):
        found = Load(num_replicas, target_s=None).run(1000.0, 60)
        assert 0 < found[-1] < num_replicas


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("target_s", [0.020, None])
@pytest.mark.parametrize("mean", [3.0, 4.0, 5.0])
def test_a_load_that_varies_around_a_value_changes_roles_seldom(
    seed: int, mean: float, target_s: float | None
) -> None:
    load, draw = Load(target_s=target_s), random.Random(seed)
    load.run(mean, 60)
    found = [load.run(draw.uniform(mean - 3, mean + 3), 1)[0] for _ in range(600)]
    assert changes(found) <= 30


def test_roles_stay_for_a_while() -> None:
    load = Load()
    found = [load.run(num_busy, 1)[0] for num_busy in [16.0, 0.0] * 60]
    last = -math.inf
    for second, (before, after) in enumerate(itertools.pairwise(found)):
        if before != after:
            assert second - last >= HOLD_S / INTERVAL_S - 1e-9
            last = second


def test_pages_that_move_more_slowly_than_they_are_computed_stay() -> None:
    assert Load(page_s=0.5 * TOKEN_S * PAGE).run(6.0, 60)[-1] >= 3
    assert Load(page_s=3.0 * TOKEN_S * PAGE).run(6.0, 60)[-1] == 0


def test_roles_end_where_no_request_goes_on_elsewhere_and_are_tried_again_later() -> None:
    policy, num, found = FollowPrompts(8, None), 0, []
    for second in range(400):
        num += 4
        load = RoleLoad(6.0 * second, int(6.0 * second / TOKEN_S), PAGE, 0.0, num, num // 10)
        found.append(policy.decide(load, float(second)))
    trials = [second for second in range(1, 400) if found[second] and not found[second - 1]]
    assert len(trials) == 3, "at first, after one minute and after two more"
    assert trials[2] - trials[1] > 1.5 * (trials[1] - trials[0])
    assert sum(map(bool, found)) < 40


def test_a_restarted_scheduler_takes_nothing_away() -> None:
    load = Load()
    before = load.run(6.0, 60)[-1]
    load.prompt_s, load.num_rows, load.sum_s = 0.0, 0, 0.0
    assert load.run(6.0, 1)[-1] == before
    assert load.run(6.0, 60)[-1] == before


# --- the router ---


def router_of(num_replicas: int = 4) -> RoleRouter[str]:
    limits = SchedulerArgs(itl_target=20.0)
    return RoleRouter(roles_of(AUTO, num_replicas, limits), BY_CACHE, num_replicas, 64, PAGE, 100)


def report(router: RoleRouter[str], seconds: float) -> None:
    for replica in range(4):
        rows = int(1000 * seconds)
        work = PromptWork(seconds / 4, int(seconds / 4 / TOKEN_S), 0.0, rows, 0.009 * rows, 0.006)
        router.on_news(replica, ReplicaNews(num_available=1000, work=work))


def test_a_router_changes_roles_by_what_replicas_report() -> None:
    router = router_of()
    assert router.has_roles and router.num_prefill == 0
    changed = []
    for second in range(60):
        report(router, 4.0 * second)
        changed.append(router.follow_load(float(second)))
        assert not router.follow_load(second + 0.1), "too soon"
    assert sum(changed) == router.num_changes == 1
    assert router.num_prefill == 2
    assert router.hands_over(0) and router.hands_over(1) and not router.hands_over(2)


def test_new_requests_go_by_the_new_roles() -> None:
    router = router_of()
    for number in range(8):
        router.place(f"stream {number}", Prompt(10, []))
        router.on_start(f"stream {number}", 0)
    assert {router.ledger.loads[n].num_open for n in range(4)} == {2}
    for second in range(60):
        report(router, 4.0 * second)
        router.follow_load(float(second))
    assert router.place("long", Prompt(5000, [])).replica in (0, 1)
    found = router.find_next(Prompt(5001, [], goes_on=True), 0)
    assert found is not None and found.replica in (2, 3)
