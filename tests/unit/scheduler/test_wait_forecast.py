"""What recent ends say about the lengths of answers, and the future that is simulated from them."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from quadriga.server.config.engine_args import BATCH_MODES, SchedulerArgs
from scheduler_proc.forecast import MAX_STEPS, RecentEnds, SharedPrefixes, WaitForecast
from scheduler_proc.planning.step_cost import StepCosts
from scheduler_proc.scheduler import places_in_queue
from scheduler_proc.state.batch import ScheduleBatch
from scheduler_proc.state.request import FinishReason, Request
from tests.unit.simulation import STEP_S, World, submit

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


def step(num_tokens: list[int], num_decodes: int, planned_at: float = 0.0) -> ScheduleBatch:
    return ScheduleBatch(
        [SimpleNamespace() for _ in num_tokens],  # type: ignore[misc]
        num_tokens,
        num_decodes=num_decodes,
        planned_at=planned_at,
    )


def test_the_speed_of_steps_has_the_time_between_them_but_no_idle_time() -> None:
    costs = StepCosts()
    assert costs.wall_seconds(1) == 0.0
    now = 0.0
    for number in range(200):
        for batch, seconds, pause in ((step([1, 1], 2), 0.1, 0.02), (step([1, 50], 1), 0.5, 0.05)):
            batch.planned_at = now if number else 0.0
            now += pause
            ended: Any = SimpleNamespace(began=now, ended=now + seconds)
            costs.observe(batch, ended)
            now += seconds
    assert costs.seconds(2) == pytest.approx(0.1, rel=0.05)
    assert costs.wall_seconds(2) == pytest.approx(0.12, rel=0.05)
    assert costs.wall_seconds(1, 50) == pytest.approx(0.55, rel=0.05)
    late, after = step([1, 1], 2, planned_at=now + 99.0), now + 99.1
    idle: Any = SimpleNamespace(began=now + 99.0, ended=after)
    costs.observe(late, idle)
    assert costs.wall_seconds(2) == pytest.approx(0.12, rel=0.05)


def test_requests_wait_for_pages_where_those_run_out_before_slots() -> None:
    args = SchedulerArgs(max_running_requests=8, max_batch_size=8, schedule_conservativeness=1.4)
    world = World(args, num_pages=8, page_size=4)
    names = [str(number) for number in range(6)]
    world.send(*(submit(name, [9 + int(name)] * 8, 8, ignore_eos=True) for name in names))
    for _ in range(3):
        world.step()
    lifecycle = world.scheduler.lifecycle
    assert len(lifecycle.core.waiting) == 4 and lifecycle.core.admission.num_free_slots == 6
    waits = expected(world)
    assert 0 < waits["2"] <= waits["3"] < waits["4"] <= waits["5"]


# --- prompts that are partly computed -------------------------------------------------------------

BUDGET = 16


def equal_steps(num_decodes: int, num_tokens: int = 0, num_pairs: int = 0) -> float:
    """Return the seconds of a step of the simulated worker, whatever it computes."""
    return STEP_S


def play(world: World) -> tuple[WaitForecast, list[Request]]:
    """Simulate the waiting queue; return the forecast, and the requests."""
    lifecycle = world.scheduler.lifecycle
    waiting = lifecycle.core.waiting.first(1000, 100)
    forecast = WaitForecast(lifecycle.core, lifecycle.recent_ends, equal_steps, waiting)
    forecast.run()
    return forecast, waiting


def expected(world: World) -> dict[str, float]:
    """Return the expected waits of all waiting requests by name."""
    forecast, waiting = play(world)
    waits = {request.request_id: forecast.wait_s(request) for request in waiting}
    assert None not in waits.values()
    return {name: wait_s or 0.0 for name, wait_s in waits.items()}


def real(world: World, names: Iterable[str]) -> dict[str, float]:
    """Run until all has ended, and return the waits of the named requests from now on."""
    begins_at = world.worker.now
    world.run()
    return {name: world.detok.closed[name].admitted_at - begins_at for name in names}


def measured(num_pages: int = 1024, **flags: Any) -> World:
    """Return a server that has measured steps of all kinds; each takes STEP_S."""
    world = World(SchedulerArgs(chunked_prefill_size=BUDGET, **flags), num_pages)
    for number in range(8):
        names = (f"m{number}", f"n{number}")
        world.send(*(submit(name, [90 + number] * 32, 3, ignore_eos=True) for name in names))
        world.run()
    world.send(submit("m", [90] * 40 * BUDGET, 3, ignore_eos=True))
    world.run()
    return world


def begin_long(world: World, num_tokens: int, num_steps: int) -> None:
    """Let a prompt of so many tokens be computed for some steps."""
    world.send(submit("long", [9] * num_tokens, 1, ignore_eos=True))
    for _ in range(num_steps):
        world.step()


def assert_close(world: World, num_steps: int = 3) -> dict[str, float]:
    """Compare the expected waits with the real ones, to some steps; return the expected ones."""
    waits = expected(world)
    assert real(world, waits) == pytest.approx(waits, rel=0.1, abs=num_steps * STEP_S)
    return waits


def test_what_is_left_of_a_prompt_counts_and_not_all_of_it() -> None:
    world = measured(max_num_partial_prefills=1)
    begin_long(world, 100 * BUDGET, 75)
    world.send(submit("next", [8] * 8, 1, ignore_eos=True))
    waits = assert_close(world)
    assert 20 * STEP_S < waits["next"] < 30 * STEP_S


def test_short_prompts_pass_a_long_one_and_another_long_one_waits_for_it() -> None:
    world = measured()
    begin_long(world, 100 * BUDGET, 40)
    world.send(submit("second", [8] * 1600, 1, ignore_eos=True))
    world.send(*(submit(f"s{i}", [20 + i] * 8, 1, ignore_eos=True) for i in range(10)))
    waits = assert_close(world)
    assert max(waits[f"s{i}"] for i in range(10)) < 15 * STEP_S
    assert waits["second"] > 50 * STEP_S


@pytest.mark.parametrize("mode", BATCH_MODES)
def test_prompts_and_streams_share_the_steps_in_each_mode(mode: str) -> None:
    world = measured(max_running_requests=4, max_batch_size=4, batch_mode=mode)
    world.send(*(submit(f"r{i}", [30 + i] * 8, 20 * (i + 1), ignore_eos=True) for i in range(3)))
    begin_long(world, 40 * BUDGET, 10)
    world.send(*(submit(f"s{i}", [40 + i] * 24, 30, ignore_eos=True) for i in range(12)))
    assert_close(world, num_steps=8)


def test_a_step_target_leaves_fewer_tokens_for_prompts() -> None:
    world = measured(itl_target=1000 * 2 * STEP_S, max_num_partial_prefills=1)
    begin_long(world, 60 * BUDGET, 20)
    world.send(submit("next", [8] * 8, 1, ignore_eos=True))
    assert_close(world)


# --- cached beginnings ----------------------------------------------------------------------------


def test_prompts_that_are_cached_take_no_time() -> None:
    world = measured(max_num_partial_prefills=1)
    prompt = [9 + i % 80 for i in range(40 * BUDGET)]
    world.send(submit("before", prompt, 1, ignore_eos=True))
    world.run()
    world.send(submit("head", [7] * 4 * BUDGET, 1, ignore_eos=True))
    world.step()
    world.send(*(submit(f"r{i}", [*prompt, 5, i], 1, ignore_eos=True) for i in range(3, 9)))
    world.send(submit("last", [6] * 8, 1, ignore_eos=True))
    assert assert_close(world)["last"] < 12 * STEP_S


def test_a_beginning_that_several_waiting_prompts_have_counts_once() -> None:
    world = measured(max_num_partial_prefills=1)
    beginning = [9 + i % 80 for i in range(40 * BUDGET)]
    world.send(submit("head", [7] * 4 * BUDGET, 1, ignore_eos=True))
    world.step()
    world.send(*(submit(f"r{i}", [*beginning, i, 5], 1, ignore_eos=True) for i in range(3, 9)))
    world.send(submit("last", [6] * 8, 1, ignore_eos=True))
    assert assert_close(world)["last"] < 60 * STEP_S


def test_beginnings_are_evicted_where_the_waiting_prompts_need_more_pages_than_there_are() -> None:
    uses = SharedPrefixes(World(SchedulerArgs(), num_pages=50).scheduler.lifecycle.core, [])
    groups = [[20 + group] * 80 for group in range(4)]  # 20 pages each
    computed = []
    for number in range(12):
        message = submit(f"r{number}", [*groups[number % 4], 3 + number], 1)
        request = Request.from_submit(1000 + number, message, frozenset())
        prefix = uses.prefix_of(request, 1)
        computed.append(81 - max(prefix.num_tokens, prefix.num_led))
    assert computed == [81] * 12, "each is evicted before it is used again"


# --- the core stays as it is ----------------------------------------------------------------------


def state_of(request: Request) -> list[object]:
    """Return all that a step changes of a request."""
    return [
        request.num_known_tokens, request.num_computed_tokens, request.in_flight, request.slot,
        request.status, request.admitted_at, request.waited_for, list(request.pages),
        list(request.prefix_path), request.tokens.tobytes(),
    ]  # fmt: skip


def test_a_forecast_changes_neither_requests_nor_rules() -> None:
    world = measured()
    begin_long(world, 100 * BUDGET, 40)
    world.send(*(submit(f"s{i}", [20 + i] * 24, 3, ignore_eos=True) for i in range(40)))
    core = world.scheduler.lifecycle.core
    requests = [*core.waiting, *core.admission.holders.values()]
    before = [state_of(request) for request in requests], dict(vars(core.prefill.sharing))
    forecast, waiting = play(world)
    assert forecast.num_steps > 20 and forecast.wait_s(waiting[-1]) is not None
    assert before == ([state_of(request) for request in requests], vars(core.prefill.sharing))
    assert len(core.waiting) == 40 and core.kv.num_held == world.scheduler.info()["pages_held"]


# --- many steps -----------------------------------------------------------------------------------


def test_a_forecast_plays_a_bounded_number_of_steps() -> None:
    world = measured(num_pages=100_000)
    world.checked = False
    world.send(*(submit(f"r{i}", [9 + i % 80, i % 90] * 500, 4) for i in range(200)))
    forecast, waiting = play(world)
    assert forecast.num_steps == MAX_STEPS
    assert forecast.wait_s(waiting[0]) is not None and forecast.wait_s(waiting[-1]) is None
    places, num_steps = places_in_queue(world.scheduler.lifecycle, world.scheduler.costs)
    assert num_steps == MAX_STEPS
    last = places[waiting[-1].seq].wait_s
    assert last is not None and last > forecast.seconds
