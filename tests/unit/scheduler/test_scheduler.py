"""The scheduler, driven by a simulated worker and a simulated clock."""

import gc
from itertools import pairwise
from typing import Any

import pytest

from quadriga.server.config.engine_args import BATCH_MODES, SchedulerArgs
from quadriga.wire.packing import unpack_ids
from quadriga.wire.to_scheduler import AbortAll, Drain, Shutdown, StopFound
from quadriga.wire.worker import DECODE, EXTEND, MIXED
from scheduler_proc.state.kv_cache import KVCache
from tests.unit.simulation import EOS, World, abort, next_token, reference, submit


def args(**flags: Any) -> SchedulerArgs:
    chosen = SchedulerArgs(**flags)
    chosen.validate()
    return chosen


def kv_of(world: World) -> KVCache:
    return world.scheduler.lifecycle.core.kv


def test_every_request_gets_the_tokens_that_it_would_get_alone() -> None:
    world = World(args(max_batch_size=3, prefill_max_batch_size=2, max_running_requests=6))
    prompts = {f"r{i}": [5 + i] * (1 + i % 7) for i in range(20)}
    world.send(*(submit(name, prompt, 9) for name, prompt in prompts.items()))
    world.run()
    for name, prompt in prompts.items():
        assert world.detok.tokens[name] == reference(prompt, 9, False)
        assert world.detok.closed[name].finish_reason in ("stop", "length")


def test_one_iteration_prefills_at_most_prefill_max_batch_size_requests_in_one_step() -> None:
    world = World(args(max_batch_size=8, prefill_max_batch_size=3, batch_mode="prefill-first"))
    world.send(*(submit(f"r{i}", [9], 4, ignore_eos=True) for i in range(7)))
    world.run()
    assert [len(rows) for rows in world.worker.rows_of_steps[:3]] == [3, 3, 1]


def test_prefill_width_is_the_decode_width_where_unset() -> None:
    world = World(args(max_batch_size=2, batch_mode="prefill-first"))
    world.send(*(submit(f"r{i}", [9], 4, ignore_eos=True) for i in range(4)))
    world.run()
    assert [len(rows) for rows in world.worker.rows_of_steps[:2]] == [2, 2]


def test_requests_admitted_together_share_one_admit_time() -> None:
    world = World(args(max_batch_size=4))
    world.send(*(submit(f"r{i}", [9], 2, ignore_eos=True) for i in range(4)))
    world.run()
    assert len({closed.admitted_at for closed in world.detok.closed.values()}) == 1


def test_decode_takes_turns_when_more_are_running_than_fit_in_a_step() -> None:
    world = World(args(max_batch_size=2, prefill_max_batch_size=5))
    world.send(*(submit(f"r{i}", [9], 7, ignore_eos=True) for i in range(5)))
    world.run()
    decodes = world.worker.rows_of_steps[1:]
    assert all(len(rows) <= 2 for rows in decodes)
    seen: set[int] = set()
    for rows in decodes[:3]:
        seen |= set(rows)
    assert len(seen) == 5


def test_without_chunks_a_prompt_over_the_token_budget_goes_alone() -> None:
    world = World(args(prefill_max_tokens=6, chunked_prefill_size=-1))
    world.send(
        submit("a", [4] * 4, 1),
        submit("b", [5] * 4, 1),
        submit("c", [6] * 20, 1),
        submit("d", [7] * 2, 1),
    )
    world.run()
    assert world.worker.tokens_of_steps == [[4], [4], [20], [2]]
    assert len(world.detok.closed) == 4


def test_a_request_that_ends_in_prefill_never_decodes() -> None:
    world = World(args())
    world.send(submit("a", [9, 9], 1))
    assert world.run() == 1
    assert world.detok.closed["a"].finish_reason == "length"


def test_no_step_is_planned_past_max_new_tokens() -> None:
    world = World(args())
    world.send(submit("a", [9, 9], 5, ignore_eos=True))
    assert world.run() == 5


def test_a_stop_token_costs_at_most_one_wasted_step_whose_token_is_dropped() -> None:
    prompt = next(
        [i, j]
        for i in range(3, 90)
        for j in range(3, 90)
        if EOS in reference([i, j], 6, False)[1:4]
    )
    expected = reference(prompt, 20, False)
    world = World(args())
    world.send(submit("a", prompt, 20))
    assert world.run() <= len(expected) + 1
    assert world.detok.tokens["a"] == expected
    assert world.detok.closed["a"].matched_stop == EOS


def test_stop_token_ids_stop_and_ignore_eos_does_not_switch_them_off() -> None:
    wanted = next_token([7, 7])
    world = World(args())
    world.send(submit("a", [7, 7], 9, ignore_eos=True, stop_token_ids=[wanted]))
    world.run()
    assert world.detok.tokens["a"] == [wanted]
    assert world.detok.closed["a"].finish_reason == "stop"


def test_a_request_aborted_while_waiting_running_or_in_flight_ends_once_and_frees_its_pages() -> (
    None
):
    world = World(args(max_batch_size=1, prefill_max_batch_size=1, max_running_requests=2))
    world.send(*(submit(f"r{i}", [9] * 3, 6, ignore_eos=True) for i in range(4)))
    world.send(abort("r3"))
    assert world.detok.closed["r3"].finish_reason == "abort"
    world.send(abort("r0"))  # its prefill is in flight
    assert kv_of(world).num_held > 0, "pages must wait for the steps in flight"
    world.step()
    world.send(abort("r1"), abort("r1"), abort("unknown"))
    world.run()
    assert {r: c.finish_reason for r, c in world.detok.closed.items()} == {
        "r0": "abort", "r1": "abort", "r2": "length", "r3": "abort",
    }  # fmt: skip


def test_an_empty_id_aborts_all_requests_of_that_client_and_no_other() -> None:
    world = World(args())
    world.send(submit("a", [9], 6, b"x"), submit("b", [9], 6, b"x"), submit("c", [9], 6, b"y"))
    world.pass_batch_delay()
    world.send(abort("", b"x"))
    assert world.scheduler.info()["running"] == 1
    world.run()
    assert world.scheduler.info()["running"] == 0


def test_a_request_sent_twice_runs_once() -> None:
    world = World(args())
    world.send(submit("a", [9], 3, ignore_eos=True), submit("a", [9], 3, ignore_eos=True))
    assert world.run() == 3
    assert world.scheduler.info()["ended"] == {"stop": 0, "length": 1, "abort": 0, "error": 0}


def test_over_max_queued_requests_a_request_is_refused_at_once_with_the_limit() -> None:
    world = World(args(max_queued_requests=2, max_running_requests=1))
    world.send(submit("a", [9], 3))
    world.send(*(submit(f"q{i}", [9], 3) for i in range(3)))
    refused = world.detok.closed["q2"]
    assert refused.error is not None
    assert refused.error.code == "queue_full"
    assert "--max-queued-requests is 2" in refused.error.message
    world.run()
    assert len(world.detok.closed) == 4


def test_a_request_larger_than_the_whole_pool_is_refused_and_blocks_no_other() -> None:
    world = World(args(), num_pages=4, page_size=4)
    world.send(submit("big", [9] * 17, 10), submit("small", [9], 2, ignore_eos=True))
    error = world.detok.closed["big"].error
    assert error is not None
    assert "holds 16 tokens" in error.message
    world.run()
    assert world.detok.closed["small"].finish_reason == "length"


def test_requests_wait_for_pages_and_all_are_served() -> None:
    world = World(args(), num_pages=4, page_size=4)
    world.send(*(submit(f"r{i}", [9] * 5, 8, ignore_eos=True) for i in range(6)))
    world.run()
    assert len(world.detok.closed) == 6


def test_a_stop_string_found_by_the_detokenizer_ends_the_request() -> None:
    world = World(args())
    world.send(submit("a", [9], 20, ignore_eos=True))
    world.step()
    world.send(StopFound([0, 77]))
    world.run()
    assert world.detok.closed["a"].finish_reason == "stop"
    assert len(world.detok.tokens["a"]) < 20


def test_drain_finishes_what_is_there_and_then_stops_worker_and_detokenizer() -> None:
    world = World(args())
    world.send(submit("a", [9], 5, ignore_eos=True))
    world.send(Drain())
    assert not world.scheduler.stopped
    assert not world.detok.drained
    world.run()
    assert len(world.detok.tokens["a"]) == 5
    assert len(world.detok.drained) == 1 and not world.scheduler.stopped
    world.send(Shutdown())
    assert world.scheduler.stopped and world.worker.stopped and world.detok.stopped


def test_abort_all_ends_everything_with_its_reason() -> None:
    world = World(args(max_running_requests=1))
    world.send(submit("a", [9], 5), submit("b", [9], 5))
    world.send(AbortAll("the server stopped"))
    world.run()
    for closed in world.detok.closed.values():
        assert closed.finish_reason == "abort"
        assert closed.error is not None
        assert closed.error.message == "the server stopped"


def test_an_idle_scheduler_has_every_page_back_and_every_slot_free() -> None:
    world = World(args(max_batch_size=3, max_running_requests=4), num_pages=16)
    world.send(*(submit(f"r{i}", [9] * (1 + i), 5) for i in range(12)))
    world.run()
    info = world.scheduler.info()
    assert info["pages_free"] + info["pages_cached"] == info["pages_total"] == 16
    assert info["running"] == info["waiting"] == 0


# --- chunks and batch modes -----------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 7, 8, -1])
@pytest.mark.parametrize("mode", BATCH_MODES)
def test_tokens_are_the_same_whatever_the_chunk_and_the_batch_mode(chunk: int, mode: str) -> None:
    world = World(args(max_batch_size=2, batch_mode=mode, chunked_prefill_size=chunk))
    prompts = {f"r{i}": [5 + i] * (1 + 3 * i) for i in range(8)}
    world.send(*(submit(name, prompt, 9) for name, prompt in prompts.items()))
    world.run()
    for name, prompt in prompts.items():
        assert world.detok.tokens[name] == reference(prompt, 9, False)


@pytest.mark.parametrize("mode", BATCH_MODES)
def test_a_long_prompt_never_stops_running_streams_for_longer_than_one_chunk(mode: str) -> None:
    world = World(args(batch_mode=mode, chunked_prefill_size=8), num_pages=100)
    world.send(*(submit(f"r{i}", [9, i], 40, ignore_eos=True) for i in range(3)))
    for _ in range(4):
        world.step()
    world.send(submit("long", [7] * 100, 4, ignore_eos=True))
    world.run()
    decodes = [i for i, counts in enumerate(world.worker.tokens_of_steps) if counts.count(1) >= 3]
    assert all(later - earlier <= 2 for earlier, later in pairwise(decodes))
    assert max(sum(counts) for counts in world.worker.tokens_of_steps) <= 8 + 3


def test_mixed_steps_decode_and_prefill_at_once() -> None:
    world = World(args(batch_mode="mixed", chunked_prefill_size=4))
    world.send(submit("a", [9], 12, ignore_eos=True))
    world.step()
    world.send(submit("b", [7] * 10, 4, ignore_eos=True))
    world.run()
    assert world.worker.modes[0] == EXTEND
    assert world.worker.modes.count(MIXED) == 3
    assert [1, 4] in world.worker.tokens_of_steps


def test_decode_first_admits_only_while_a_decode_step_has_room() -> None:
    world = World(args(batch_mode="decode-first", max_batch_size=2, prefill_max_batch_size=1))
    world.send(*(submit(f"r{i}", [9, i], 5, ignore_eos=True) for i in range(4)))
    world.run()
    modes = world.worker.modes
    assert modes[:6] == [EXTEND, EXTEND, DECODE, DECODE, DECODE, DECODE]


def test_alternate_takes_turns_between_prompts_and_decoding() -> None:
    world = World(args(batch_mode="alternate", max_batch_size=2, prefill_max_batch_size=1))
    world.send(*(submit(f"r{i}", [9, i], 9, ignore_eos=True) for i in range(3)))
    world.run()
    assert world.worker.modes[:6] == [EXTEND, DECODE, EXTEND, DECODE, EXTEND, DECODE]


def test_prefill_first_empties_the_queue_before_it_decodes() -> None:
    world = World(args(batch_mode="prefill-first", max_batch_size=2, prefill_max_batch_size=1))
    world.send(*(submit(f"r{i}", [9, i], 9, ignore_eos=True) for i in range(3)))
    world.run()
    assert world.worker.modes[:4] == [EXTEND, EXTEND, EXTEND, DECODE]


def test_static_batching_admits_no_request_before_the_whole_batch_has_ended() -> None:
    world = World(args(batching="static", max_batch_size=2))
    lengths = [3, 9, 3, 3]
    world.send(*(submit(f"r{i}", [9, i], lengths[i], ignore_eos=True) for i in range(4)))
    world.run()
    assert world.worker.modes.count(EXTEND) == 2
    assert len(world.worker.modes) == 9 + 3


def test_a_static_batch_computes_rows_that_have_ended_until_the_last_one_has() -> None:
    world = World(args(batching="static", max_batch_size=3))
    lengths = {"a": 1, "b": 3, "c": 9}
    world.send(*(submit(name, [9, n], n, ignore_eos=True) for name, n in lengths.items()))
    for step in range(1, 10):
        assert world.step()
        assert set(world.detok.closed) == {name for name, n in lengths.items() if n <= step}
    assert [len(rows) for rows in world.worker.rows_of_steps] == [3] * 9
    assert not world.step()
    assert kv_of(world).num_held == 0
    for name, n in lengths.items():
        assert world.detok.tokens[name] == reference([9, n], n, True)


def test_padding_makes_no_row_longer_than_the_longest_of_its_batch_may_become() -> None:
    world = World(args(batching="static", max_batch_size=2))
    long_prompt = submit("a", [9] * 8, 1, ignore_eos=True)
    long_answer = submit("b", [9], 11, ignore_eos=True)
    world.send(long_prompt, long_answer)
    world.run()
    assert [len(rows) for rows in world.worker.rows_of_steps] == [2] * (1 + 3) + [1] * 7


def test_padding_takes_no_page_that_a_request_needs() -> None:
    world = World(args(batching="static", max_batch_size=2), num_pages=4, page_size=4)
    world.send(submit("short", [9, 8], 2, ignore_eos=True))
    world.send(submit("long", [9, 7], 14, ignore_eos=True))
    world.run()
    assert world.detok.tokens["long"] == reference([9, 7], 14, True)
    assert world.scheduler.info()["retractions"] == 0


@pytest.mark.parametrize("aborted", [["a"], ["b"], ["a", "b"]])
def test_the_pages_of_an_aborted_static_batch_come_back_when_its_last_request_has_ended(
    aborted: list[str],
) -> None:
    world = World(args(batching="static", max_batch_size=2, plan_at_once=True))
    world.send(*(submit(name, [9, n], 20, ignore_eos=True) for n, name in enumerate("ab")))
    for _ in range(4):
        world.step()
    world.send(*map(abort, aborted))
    assert sorted(world.detok.closed) == aborted
    ahead = world.run()
    assert ahead == (2 if len(aborted) == 2 else 16)
    assert kv_of(world).num_held == 0
    world.send(submit("next", [9], 2, ignore_eos=True))
    world.run()
    assert world.detok.tokens["next"] == reference([9], 2, True)


# --- the prefix cache -----------------------------------------------------------------------------


def test_the_next_turn_of_a_chat_finds_the_prompt_and_what_was_generated() -> None:
    world = World(args())
    world.send(submit("a", [9] * 6, 8, ignore_eos=True))
    world.run()
    said = [9] * 6 + world.detok.tokens["a"]
    world.send(submit("b", [*said, 7, 7], 4, ignore_eos=True))
    world.run()
    assert world.detok.closed["b"].cached_tokens == 12  # 13 computed tokens, pages of 4
    assert world.detok.tokens["b"] == reference([*said, 7, 7], 4, True)


def test_equal_beginnings_of_one_step_are_computed_once() -> None:
    world = World(args())
    prefix = list(range(10, 26))
    world.send(*(submit(f"r{i}", [*prefix, 40 + i], 4, ignore_eos=True) for i in range(3)))
    world.run()
    assert world.worker.tokens_of_steps[0] == [17, 1, 1]
    for i in range(3):
        assert world.detok.tokens[f"r{i}"] == reference([*prefix, 40 + i], 4, True)


def test_cached_pages_make_room_for_running_requests() -> None:
    world = World(args(), num_pages=4)
    for i in range(5):
        world.send(submit(f"r{i}", [30 + i] * 6, 8, ignore_eos=True))
        world.run()
    assert all(c.finish_reason == "length" for c in world.detok.closed.values())
    assert kv_of(world).num_cached > 0


def test_a_disabled_prefix_cache_finds_nothing() -> None:
    world = World(args(disable_radix_cache=True))
    for name in "ab":
        world.send(submit(name, [9] * 9, 2))
        world.run()
    assert world.detok.closed["b"].cached_tokens == 0
    assert kv_of(world).num_free == 64


# --- running out of pages -------------------------------------------------------------------------


def test_when_pages_run_out_the_request_with_the_fewest_tokens_is_retracted() -> None:
    flags = args(schedule_conservativeness=0.01, disable_radix_cache=True)
    world = World(flags, num_pages=6, page_size=4)
    world.send(submit("old", [9] * 4, 16, ignore_eos=True))
    for _ in range(4):
        world.step()
    world.send(submit("new", [7] * 4, 16, ignore_eos=True))
    world.run()
    info = world.scheduler.info()
    assert info["retractions"] == 1
    assert world.detok.tokens == {
        "old": reference([9] * 4, 16, True),
        "new": reference([7] * 4, 16, True),
    }
    assert world.detok.closed["old"].first_token_at < world.detok.closed["new"].first_token_at


def test_a_retraction_raises_the_ratio_by_which_admission_expects_tokens() -> None:
    world = World(args(schedule_conservativeness=0.01), num_pages=6, page_size=4)
    world.send(*(submit(f"r{i}", [9 + i] * 4, 12, ignore_eos=True) for i in range(3)))
    before = world.scheduler.info()["new_token_ratio"]
    while world.scheduler.info()["retractions"] == 0:
        world.step()
    assert world.scheduler.info()["new_token_ratio"] > before
    world.run()


def test_a_lone_request_that_fills_the_pool_ends_with_an_error_and_the_next_is_served() -> None:
    world = World(args(), num_pages=4, page_size=4)
    world.send(submit("greedy", [9] * 6, 100, ignore_eos=True), submit("next", [7], 2))
    world.run()
    error = world.detok.closed["greedy"].error
    assert error is not None
    assert "KV pool of 16 tokens" in error.message
    assert world.detok.tokens["greedy"] == reference([9] * 6, 100, True)[:11]
    assert world.detok.closed["next"].finish_reason in ("stop", "length")


def test_conservative_admission_lets_fewer_run_at_once() -> None:
    peaks = []
    for conservativeness in (0.1, 2.0):
        world = World(args(schedule_conservativeness=conservativeness), num_pages=20)
        world.send(*(submit(f"r{i}", [9 + i] * 4, 40, ignore_eos=True) for i in range(8)))
        world.pass_batch_delay()
        peaks.append(len(world.worker.plans[0][1].new))
        world.run()
    assert peaks[0] > peaks[1] >= 1


# --- priorities and deadlines ---------------------------------------------------------------------


def test_an_urgent_request_preempts_a_running_one_which_goes_on_later() -> None:
    world = World(args(schedule_policy="priority", max_running_requests=1))
    world.send(submit("slow", [9] * 4, 30, ignore_eos=True))
    for _ in range(5):
        world.step()
    world.send(submit("urgent", [7] * 4, 4, ignore_eos=True, priority=10))
    world.run()
    slow, urgent = world.detok.closed["slow"], world.detok.closed["urgent"]
    assert urgent.admitted_at > slow.admitted_at
    assert list(world.detok.closed) == ["urgent", "slow"]
    assert world.detok.tokens["slow"] == reference([9] * 4, 30, True)


def test_a_little_more_priority_goes_first_but_preempts_no_request() -> None:
    world = World(args(schedule_policy="priority", max_running_requests=1))
    world.send(submit("running", [9] * 4, 9, ignore_eos=True))
    world.step()
    world.send(submit("low", [7] * 4, 4), submit("high", [8] * 4, 4, priority=9))
    world.run()
    assert list(world.detok.closed) == ["running", "high", "low"]


def test_a_request_that_waits_past_its_queue_deadline_ends_with_a_clear_error() -> None:
    world = World(args(max_running_requests=1))
    world.send(submit("a", [9], 30, ignore_eos=True))
    world.send(submit("b", [9], 30, queue_deadline=1000.05))
    world.send(submit("c", [9], 3, queue_deadline=2000.0))
    world.run()
    error = world.detok.closed["b"].error
    assert error is not None
    assert error.code == "deadline_exceeded"
    assert "not admitted within 0.05 s (queue_timeout)" in error.message
    assert world.detok.closed["c"].finish_reason in ("stop", "length")


def test_a_running_request_past_its_deadline_ends_and_frees_its_pages() -> None:
    world = World(args())
    world.send(submit("a", [9], 60, ignore_eos=True, deadline=1000.1))
    world.run()
    error = world.detok.closed["a"].error
    assert error is not None
    assert "did not finish within 0.1 s (timeout), after" in error.message
    assert 5 <= len(world.detok.tokens["a"]) <= 10
    assert world.wake_at is None


# --- the size of a step ---------------------------------------------------------------------------


def prefill_steps(*lengths: int) -> list[list[int]]:
    """Return the prompt tokens of each step; a step of eight tokens keeps the worker busy."""
    world = World(args(), num_pages=200, prefill_tokens=8)
    world.send(*(submit(f"r{i}", [9] * n, 1) for i, n in enumerate(lengths)))
    steps = []
    world.pass_batch_delay()
    while world.worker.plans:
        steps.append(unpack_ids(world.worker.plans[0][1].num_tokens).tolist())
        world.step()
    return steps


def test_several_prompts_share_a_step_as_large_as_the_worker_measured() -> None:
    assert prefill_steps(4, 4, 4, 4, 4) == [[4, 4], [4, 4, 4]]  # no step for the last one alone
    assert prefill_steps(4, 4, 4, 4, 4, 4, 4) == [[4, 4], [4, 4], [4, 4, 4]]


def test_of_a_single_prompt_a_step_computes_more() -> None:
    assert prefill_steps(600) == [[256], [256], [88]]
    assert prefill_steps(40, 4, 4) == [[40], [4, 4]]
    assert prefill_steps(258, 4, 4) == [[256], [2, 4, 4]]


# --- batch delay ----------------------------------------------------------------------------------


def first_step(*gaps: float, **flags: Any) -> int:
    """Return the number of requests in the first step of an idle server.

    Args:
        gaps: seconds between the arrivals.
        flags: of the scheduler.
    """
    world = World(args(max_batch_size=8, **flags))
    world.send(submit("one", [9], 2, ignore_eos=True))
    for i, gap in enumerate(gaps):
        world.wake(world.worker.now + gap)
        world.send(submit(f"other{i}", [9], 2, ignore_eos=True))
    world.pass_batch_delay()
    return len(world.worker.plans[0][1].new)


def test_requests_that_come_together_share_an_idle_workers_step() -> None:
    assert first_step(0.001, 0.001, 0.0015) == 4


def test_a_later_request_is_not_waited_for() -> None:
    assert first_step(0.001, 0.0025) == 2


def test_the_batch_delay_is_bounded() -> None:
    assert first_step(*[0.0015] * 7) == 7


def test_a_batch_delay_whose_request_was_aborted_ends_without_a_step() -> None:
    world = World(args())
    world.send(submit("one", [9], 2))
    world.send(abort("one"))
    assert world.scheduler.pipeline.in_batch_delay(world.worker.now)
    world.pass_batch_delay()
    assert not world.worker.plans
    assert not world.scheduler.pipeline.in_batch_delay(world.worker.now)
    world.wake(world.worker.now + 1)
    world.send(submit("other", [9], 2))
    assert not world.worker.plans
    world.run()
    assert world.detok.closed["other"].finish_reason == "length"


def test_a_full_step_is_not_delayed() -> None:
    assert first_step(0.0, 0.0, prefill_max_batch_size=2) == 2
    assert first_step(0.0, 0.0, prefill_max_tokens=2) == 2
    world = World(args(prefill_max_tokens=4))
    world.send(submit("long", [9] * 4, 2))
    assert world.worker.plans


def test_there_is_no_batch_delay_with_plan_at_once() -> None:
    world = World(args(plan_at_once=True))
    world.send(submit("one", [9], 2))
    assert world.worker.plans


# --- plan pipelining ------------------------------------------------------------------------------


def waiting_steps(**flags: Any) -> float:
    """Return the steps between the arrival of a request at a busy server and its first token."""
    world = World(args(max_batch_size=4, **flags))
    world.send(submit("busy", [9], 40, ignore_eos=True))
    for _ in range(5):
        world.step()
    assert world.worker.done_at is not None
    world.wake(world.worker.done_at - 0.007)  # in the middle of a step
    arrived = world.worker.now
    world.send(submit("late", [7], 2))
    world.run()
    return (world.detok.closed["late"].first_token_at - arrived) / 0.01


def test_a_request_that_arrives_during_a_step_is_in_the_next_one() -> None:
    assert waiting_steps() < 2
    assert waiting_steps(plan_at_once=True) > 2


def test_a_late_plan_is_still_there_before_the_worker_needs_it() -> None:
    world = World(args())
    world.send(submit("a", [9], 40, ignore_eos=True))
    world.run()
    assert world.scheduler.info()["late_plans"] <= 2  # until the first durations are known


def test_nothing_that_the_scheduler_makes_needs_the_garbage_collector() -> None:
    world = World(args(max_running_requests=4), num_pages=12)
    gc.collect()
    gc.disable()
    try:
        for i in range(200):
            world.send(submit(f"r{i}", [9 + i % 5] * (1 + i % 17), 6, queue_deadline=1000.5 + i))
            world.send(abort(f"r{i // 2}"))
            world.step()
        world.run()
        assert gc.collect() == 0
    finally:
        gc.enable()
