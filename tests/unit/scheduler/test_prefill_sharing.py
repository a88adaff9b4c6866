"""Prompts side by side: short ones pass a long one, which goes on all the time."""

import random
from typing import Any

import msgspec
import pytest

from quadriga.server.config.engine_args import BATCH_MODES, SchedulerArgs
from scheduler_proc.state.request import Request
from tests.unit.simulation import World, reference, submit

BUDGET = 16
LONG = 160


def make_world(num_pages: int = 256, **flags: Any) -> World:
    return World(SchedulerArgs(chunked_prefill_size=BUDGET, **flags), num_pages)


def request_of(world: World, name: str) -> Request | None:
    requests = world.scheduler.lifecycle.table.of_client(b"c", name)
    return requests[0] if requests else None


def num_left(world: World, name: str) -> int:
    """Return how many tokens of a prompt are not computed."""
    request = request_of(world, name)
    return 0 if request is None or request.first_token_at else request.num_uncomputed_tokens


def has_begun(world: World, name: str) -> bool:
    request = request_of(world, name)
    return request is None or request.admitted_at > 0


def steps_until_first_token(world: World, name: str) -> int:
    for number in range(1, 1000):
        world.step()
        request = request_of(world, name)
        if request is None or request.first_token_at:
            return number
    raise AssertionError(f"{name} has no token")


def test_a_short_prompt_passes_one_that_is_being_computed() -> None:
    world = make_world()
    world.send(submit("long", [9] * LONG, 4))
    world.step()
    world.send(submit("short", [8] * 6, 4))
    assert steps_until_first_token(world, "short") <= 3  # two are planned already
    assert num_left(world, "long") > LONG / 2
    world.run()
    assert world.detok.tokens["long"] == reference([9] * LONG, 4, False)


def test_one_partial_prompt_at_a_time_makes_the_short_one_wait() -> None:
    world = make_world(max_num_partial_prefills=1)
    world.send(submit("long", [9] * LONG, 4))
    world.step()
    world.send(submit("short", [8] * 6, 4))
    assert steps_until_first_token(world, "short") >= LONG // BUDGET - 2
    assert num_left(world, "long") == 0


@pytest.mark.parametrize("mode", BATCH_MODES)
def test_a_long_prompt_has_half_of_each_step_however_many_short_ones_come(mode: str) -> None:
    world = make_world(batch_mode=mode)
    world.send(submit("long", [9] * LONG, 4))
    num_steps = 0
    while num_left(world, "long"):
        world.send(*(submit(f"s{num_steps}/{i}", [20 + i] * 8, 1) for i in range(3)))
        world.step()
        num_steps += 1
        assert num_steps <= 2 * LONG // BUDGET + 4
    assert num_steps > LONG // BUDGET + 2, "the short ones had nothing"


def test_what_short_prompts_leave_of_a_step_the_long_one_has() -> None:
    world = make_world()
    world.send(submit("long", [9] * LONG, 4))
    world.send(submit("short", [8] * 4, 1))
    world.run()
    prefills = [counts for counts in world.worker.tokens_of_steps if max(counts) > 1]
    assert all(sum(counts) >= BUDGET for counts in prefills[:-1])
    assert len(prefills) == -(-(LONG + 4) // BUDGET)


def test_two_long_prompts_are_not_computed_in_turns() -> None:
    world = make_world()
    world.send(submit("first", [9] * LONG, 4), submit("second", [8] * LONG, 4))
    while num_left(world, "first") > 2 * BUDGET:
        world.step()
        assert not has_begun(world, "second")
    world.run()
    assert len(world.detok.closed) == 2


def test_a_shorter_long_prompt_passes_a_longer_one() -> None:
    world = make_world()
    world.send(submit("first", [9] * LONG, 1), submit("second", [8] * (LONG // 4), 1))
    world.run()
    assert list(world.detok.closed) == ["second", "first"]


def test_a_waiting_long_prompt_is_passed_only_while_an_earlier_one_is_computed() -> None:
    world = make_world()
    world.send(submit("first", [9] * LONG, 1), submit("second", [8] * LONG, 1))
    number = 0
    while "first" not in world.detok.closed:
        world.send(submit(f"s{number}", [20 + number % 70] * 24, 1))
        world.step()
        number += 1
    for _ in range(4):
        world.step()
    assert has_begun(world, "second")


def test_no_more_prompts_are_partly_computed_than_the_flag_says() -> None:
    world = make_world(max_num_partial_prefills=2)
    world.send(*(submit(f"r{i}", [9 + i] * (LONG - 20 * i), 1) for i in range(6)))
    running = world.scheduler.lifecycle.core.running
    most = 0
    while len(world.detok.closed) < 6:
        world.step()
        most = max(most, len(running.partial))
    assert most == 2


def test_a_prompt_waits_for_the_beginning_that_another_one_is_computing() -> None:
    world = make_world()
    beginning = [9 + i % 80 for i in range(LONG)]
    world.send(submit("long", [*beginning, 5, 6], 1))
    world.send(submit("same", [*beginning[: LONG - 8], 7, 8], 1))
    world.run()
    assert sum(map(sum, world.worker.tokens_of_steps)) < LONG + 2 * BUDGET
    assert world.detok.closed["same"].cached_tokens >= LONG - 16


def test_a_prompt_waits_for_its_beginning_in_a_younger_one_too() -> None:
    world = make_world()
    beginning = [9 + i % 80 for i in range(LONG)]
    world.send(submit("younger", [*beginning, 5, 6], 1))
    world.step()
    older = submit("older", [*beginning, 7, 8], 1)
    world.send(msgspec.structs.replace(older, received_at=older.received_at - 1))
    world.run()
    assert world.detok.closed["older"].cached_tokens == LONG


def test_without_the_prefix_cache_it_does_not_wait() -> None:
    world = make_world(disable_radix_cache=True)
    world.send(submit("long", [9] * LONG, 1), submit("same", [9] * 40, 1))
    world.run()
    assert list(world.detok.closed) == ["same", "long"]


def test_a_prompt_of_a_lower_priority_does_not_share_with_a_more_urgent_one() -> None:
    world = make_world(schedule_policy="priority")
    world.send(submit("urgent", [9] * LONG, 1, priority=5), submit("other", [8] * 8, 1))
    world.run()
    assert list(world.detok.closed) == ["urgent", "other"]


def test_a_more_urgent_prompt_takes_all_of_a_step() -> None:
    world = make_world(schedule_policy="priority")
    world.send(submit("other", [8] * LONG, 1))
    world.step()
    world.send(submit("urgent", [9] * (LONG // 2), 1, priority=5))
    assert steps_until_first_token(world, "urgent") <= LONG // 2 // BUDGET + 3


def test_the_background_does_not_share_with_others() -> None:
    world = make_world()
    world.send(submit("long", [9] * LONG, 1), submit("line", [8] * 8, 1, priority=-1000))
    world.run()
    assert list(world.detok.closed) == ["long", "line"]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_pages", [40, 400])
def test_answers_are_those_of_requests_that_run_alone(seed: int, num_pages: int) -> None:
    """Chunked, side by side, with cached beginnings, and retracted where there are few pages."""
    source = random.Random(seed)
    world = make_world(num_pages, batch_mode=source.choice(BATCH_MODES), max_batch_size=3)
    prompts = {}
    for number in range(30):
        beginning = source.choice([[9] * 50, [8, 7] * 30, []])
        tail = [source.randint(3, 99) for _ in range(source.choice([3, 20, 60]))]
        prompts[f"r{number}"] = [*beginning[: source.randint(0, 60)], *tail]
        world.send(submit(f"r{number}", prompts[f"r{number}"], 20, ignore_eos=True))
        for _ in range(source.randint(0, 3)):
            world.step()
    world.run()
    for name, prompt in prompts.items():
        assert world.detok.tokens[name] == reference(prompt, 20, True)
    assert (world.scheduler.info()["retractions"] > 0) == (num_pages == 40)
