"""What recent ends say about the lengths of answers, and the future that is played from them."""

from types import SimpleNamespace
from typing import Any

import pytest

from quadriga.config.scheduler_args import SchedulerArgs
from scheduler_proc.observe.recent_ends import RecentEnds
from scheduler_proc.observe.step_speed import StepSpeed
from scheduler_proc.observe.wait_forecast import WaitForecast
from scheduler_proc.state.batch import ForwardMode
from scheduler_proc.state.request import FinishReason
from tests.unit.simulation import World, submit

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def ends_of(
    *answers: tuple[int, FinishReason], num_prompt: int = 10, cached: int = 0, can_stop: bool = True
) -> RecentEnds:
    ends = RecentEnds()
    for num_generated, reason in answers:
        request: Any = SimpleNamespace(
            num_generated=num_generated,
            finish_reason=reason,
            can_stop=can_stop,
            num_prompt=num_prompt,
            cached_tokens=cached,
        )
        ends.on_end(request)
    return ends


def test_without_stops_an_answer_reaches_its_limit() -> None:
    for ends in (RecentEnds(), ends_of((10, LENGTH), (20, LENGTH), (7, FinishReason.ABORT))):
        assert [ends.length(0, 64, share) for share in (0.0, 0.5, 0.99)] == [64] * 3


def test_lengths_are_those_of_recent_stops_and_longer_than_what_is_generated() -> None:
    ends = ends_of((10, STOP), (20, STOP), (30, STOP), (40, STOP))
    assert [ends.length(0, 64, share) for share in (0.2, 0.4, 0.6, 0.9)] == [10, 20, 30, 40]
    assert [ends.length(20, 64, share) for share in (0.2, 0.9)] == [30, 40]
    assert ends.length(40, 64, 0.5) == 64
    assert ends.length(0, 15, 0.9) == 15


def test_an_answer_that_was_cut_counts_as_one_that_would_have_gone_on() -> None:
    ends = ends_of((10, STOP), (10, LENGTH), (20, STOP), (20, LENGTH))
    assert ends.curve == [(10, 0.75), (20, 0.375)]
    assert ends.length(0, 64, 0.2) == 10
    assert ends.length(0, 64, 0.7) == 64


def test_answers_that_cannot_stop_say_nothing_about_others() -> None:
    ends = ends_of((90, LENGTH), (90, LENGTH), can_stop=False)
    assert ends.curve == []
    world = World(SchedulerArgs())
    world.send(submit("endless", [9] * 4, 40, ignore_eos=True), submit("other", [9] * 4, 40))
    table = world.scheduler.lifecycle.table
    assert [table.of_client(b"c", n)[0].can_stop for n in ("endless", "other")] == [False, True]


def test_the_share_of_prompts_that_is_computed_is_that_of_recent_ends() -> None:
    assert RecentEnds().uncached_share == 1.0
    assert ends_of((1, STOP), (1, STOP), num_prompt=100, cached=75).uncached_share == 0.25


def step(mode: ForwardMode, num_tokens: list[int], num_decodes: int) -> Any:
    batch = SimpleNamespace(mode=mode, num_tokens=num_tokens, num_decodes=num_decodes)
    return SimpleNamespace(**vars(batch), planned_at=0.0)


def test_the_speed_of_steps_counts_from_end_to_end_and_idle_time_does_not() -> None:
    speed = StepSpeed()
    ended: Any = SimpleNamespace(ended=1.0)
    speed.on_step(step(ForwardMode.EXTEND, [100], 0), ended)
    assert speed.prefill_s_per_token == pytest.approx(0.01)
    assert speed.decode_s is None
    ended.ended = 1.5
    speed.on_step(step(ForwardMode.DECODE, [1, 1], 2), ended)
    assert speed.decode_s == pytest.approx(0.5)
    late = step(ForwardMode.DECODE, [1, 1], 2)
    late.planned_at, ended.ended = 99.0, 99.5
    speed.on_step(late, ended)
    assert speed.decode_s == pytest.approx(0.5)
    mixed = step(ForwardMode.MIXED, [1, 1, 50], 2)
    ended.ended = 100.5
    speed.on_step(mixed, ended)
    assert speed.prefill_s_per_token == pytest.approx((1.0 + 0.5) / (100 + 50))


def test_requests_wait_for_pages_where_those_run_out_before_slots() -> None:
    args = SchedulerArgs(max_running_requests=8, max_batch_size=8, schedule_conservativeness=1.4)
    world = World(args, num_pages=8, page_size=4)
    names = [str(number) for number in range(6)]
    world.send(*(submit(name, [9 + int(name)] * 8, 8, ignore_eos=True) for name in names))
    for _ in range(3):
        world.step()
    lifecycle = world.scheduler.lifecycle
    waiting = lifecycle.core.waiting.first(6, 100)
    assert len(waiting) == 4 and lifecycle.core.admission.num_free_slots == 6
    forecast = WaitForecast(lifecycle.core, lifecycle.recent_ends, world.scheduler.speed)
    waits = [forecast.wait_s(request) or 0.0 for request in waiting]
    assert 0 < waits[0] <= waits[1] < waits[2] <= waits[3]
